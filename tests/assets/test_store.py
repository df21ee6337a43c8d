"""Finding models by name and path, the cache, and what is said about models."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from quire.assets import cache_dir, describe, list_models, remove, resolve
from quire.assets.hub import HubReference
from quire.types.errors import ModelFileError, ModelNotFoundError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


def write_directory(path: Path) -> Path:
    path.mkdir(parents=True)
    config = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 256}
    (path / "config.json").write_text(json.dumps(config))
    save_file({"a": np.zeros((3, 4), np.float16), "b": np.zeros(2, np.float32)}, path / "model.safetensors")
    return path


def test_directories_and_files(tmp_path: Path, tiny_gguf: bytes) -> None:
    directory = write_directory(tmp_path / "tiny")
    model = resolve(str(directory))
    assert (model.name, model.path, model.kind) == ("tiny", directory, "safetensors")
    assert model.open().tensors()["a"].shape == (3, 4)
    assert model.file("config.json") == directory / "config.json"
    assert model.file("tokenizer.json") is None
    assert model.file("../tiny/config.json") == directory / "config.json"  # only ever a file beside the weights
    assert resolve("./tiny").name == resolve("tiny").name == "tiny"

    file = tmp_path / "x.gguf"
    file.write_bytes(tiny_gguf)
    assert resolve(str(file)).kind == "gguf"
    assert resolve(str(file)).open().metadata()["general.architecture"] == "llama"
    assert describe(resolve(str(file))).context_length == 64
    (tmp_path / "only").mkdir()
    file.rename(tmp_path / "only" / "x.gguf")
    assert resolve(str(tmp_path / "only")).path.name == "x.gguf"


def test_what_headers_tell(tmp_path: Path) -> None:
    info = describe(resolve(str(write_directory(tmp_path / "tiny"))))
    assert (info.architecture, info.parameters, info.context_length) == ("LlamaForCausalLM", 14, 256)
    assert info.quantisation == "F16"
    assert info.size > 32
    (tmp_path / "tiny" / "model.safetensors").write_bytes(b"broken")
    assert "too few" in describe(resolve(str(tmp_path / "tiny"))).problem


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="did you mean smollm2-135m") as caught:
        resolve("smollm2-135")
    assert str(cache_dir()) in str(caught.value)
    with pytest.raises(ModelNotFoundError, match="org/name"):
        resolve("no such thing")
    with pytest.raises(ModelNotFoundError, match="name of the model is empty"):
        resolve("")  # not the folder one is in
    with pytest.raises(ModelNotFoundError, match="directory or"):
        resolve("./missing/model.gguf")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelNotFoundError, match="holds no model"):
        resolve("empty")
    for name in ("a", "b"):
        (tmp_path / "empty" / f"{name}.gguf").write_bytes(b"x")
    with pytest.raises(ModelNotFoundError, match="several models"):
        resolve("empty")
    (tmp_path / "w.safetensors").write_bytes(b"x")
    with pytest.raises(ModelFileError, match="directory"):
        resolve("w.safetensors")


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_dir() == tmp_path / "cache"
    monkeypatch.delenv("QUIRE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_dir() == Path("/x/quire")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "quire"


def test_an_empty_cache() -> None:
    assert list_models() == []
    with pytest.raises(ModelNotFoundError, match="nothing to remove"):
        remove("org/name")
    with pytest.raises(ModelNotFoundError, match="nothing to remove"):
        remove("smollm2-135m")


def test_paths_are_never_removed(tmp_path: Path) -> None:
    directory = write_directory(tmp_path / "org" / "name")
    with pytest.raises(ModelNotFoundError):
        remove("org/name")
    with pytest.raises(ModelNotFoundError):
        remove(str(directory))
    assert (directory / "config.json").exists()


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("org/name", ("org/name", None, None)),
        ("org/na.me-1_B@v1.0", ("org/na.me-1_B", None, "v1.0")),
        ("org/name:x.Q4_K.gguf", ("org/name", "x.Q4_K.gguf", None)),
        ("org/name:dir/x.gguf@refs/pr/1", ("org/name", "dir/x.gguf", "refs/pr/1")),
    ],
)
def test_hub_references(text: str, parts: tuple[str, str | None, str | None]) -> None:
    reference = HubReference.parse(text)
    assert reference is not None
    assert (reference.repository, reference.file, reference.revision) == parts


@pytest.mark.parametrize(
    "text", ["name", "a/b/c", "../b", "a/..", "/a/b", "a/b:c.bin", "a/b:../c.gguf", "a/b@../c", "a b/c", ""]
)
def test_what_is_no_hub_reference(text: str) -> None:
    assert HubReference.parse(text) is None
