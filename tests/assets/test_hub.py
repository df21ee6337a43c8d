"""Fetching from a hub, against a small one on the loopback that drops connections when told to."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from loopback_hub import Hub
from safetensors.numpy import save
from test_gguf_parts import write as write_gguf

from quire.assets import copy, list_models, pull, remove, resolve
from quire.types.errors import InputError, ModelFileError, ModelNotFoundError


def model_files() -> dict[str, bytes]:
    weights = np.frombuffer(random.Random(9).randbytes(400_000), np.float32)
    return {
        "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
        "tokenizer.json": b'{"version": "1.0"}',
        "tokenizer_config.json": b"{}",
        "model.safetensors": save({"w": weights}),
        "consolidated.safetensors": b"the same again",
        "pytorch_model.bin": b"pickle",
        "onnx/model.safetensors": b"other",
        "README.md": b"# hello",
    }


@pytest.mark.timeout(60)
def test_a_dropped_download_resumes_and_is_exact(hub: Hub, tmp_path: Path) -> None:
    files = hub.files["org/tiny"] = model_files()
    hub.drops["model.safetensors"] = [123_457, 50_000]
    model = resolve("org/tiny", progress=False)
    assert (model.name, model.kind) == ("org/tiny", "safetensors")
    data = model.path.joinpath("model.safetensors").read_bytes()
    assert data == files["model.safetensors"]
    ranges = [wanted for name, wanted in hub.downloads if name == "model.safetensors"]
    assert ranges[0] is None
    assert len(ranges) == 3
    starts = [int(r.removeprefix("bytes=").removesuffix("-")) for r in ranges[1:] if r]
    assert 0 < starts[0] < starts[1] < len(data)  # it went on, it did not start over
    fetched = {name for name, _ in hub.downloads}
    assert fetched == {"config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"}


def test_what_is_here_is_not_asked_for_again(hub: Hub) -> None:
    hub.files["org/tiny"] = model_files()
    first = resolve("org/tiny", progress=False)
    before = hub.requests
    assert resolve("org/tiny") == first
    assert hub.requests == before
    assert pull("org/tiny", progress=False) == first
    assert hub.requests > before
    assert [info.name for info in list_models()] == ["org/tiny"]
    remove("org/tiny")
    assert list_models() == []
    assert not first.path.exists()


def test_one_gguf_of_many(hub: Hub, tiny_gguf: bytes) -> None:
    hub.files["org/quants"] = {"a.gguf": tiny_gguf, "sub/b.gguf": tiny_gguf + bytes(32), "README.md": b""}
    a = resolve("org/quants:a.gguf", progress=False)
    b = resolve("org/quants:sub/b.gguf@main", progress=False)
    assert (a.kind, b.kind) == ("gguf", "gguf")
    assert a.path.read_bytes() == tiny_gguf
    assert {name for name, _ in hub.downloads} == {"a.gguf", "sub/b.gguf"}
    assert [info.name for info in list_models()] == ["org/quants:a.gguf", "org/quants:sub/b.gguf@main"]
    remove("org/quants:a.gguf")
    assert not a.path.exists()
    assert b.path.exists()
    remove("org/quants:sub/b.gguf@main")
    assert not b.path.exists()
    with pytest.raises(ModelNotFoundError, match=r"one of them: org/quants:a\.gguf \(0\.00 GB\), org/quants:sub/b"):
        resolve("org/quants", progress=False)


def test_all_parts_of_a_split_gguf(hub: Hub, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", parts_of=2)
    hub.files["org/quants"] = {f"q4/{path.name}": path.read_bytes() for path in tmp_path.glob("m-*.gguf")}
    first, *_, last = sorted(hub.files["org/quants"])
    model = resolve(f"org/quants:{last}", progress=False)
    assert model.path.name == Path(first).name
    assert len(model.open().tensors()) == 5
    assert resolve("org/quants", progress=False).path == model.path  # there is no other
    remove("org/quants")
    assert model.path.exists()
    remove(f"org/quants:{last}")
    assert list(model.path.parent.glob("*.gguf")) == []


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("org/nothing", "no model 'org/nothing'"),
        ("org/tiny@other", "no revision 'other'"),
        ("org/tiny:x.gguf", r"no file 'x\.gguf'"),
        ("org/empty", "no model that can be read"),
    ],
)
def test_what_the_hub_does_not_have(hub: Hub, reference: str, message: str) -> None:
    hub.files["org/tiny"] = model_files()
    hub.files["org/empty"] = {"README.md": b""}
    with pytest.raises(ModelNotFoundError, match=message):
        resolve(reference, progress=False)
    assert list_models() == []


def test_an_unsound_model_is_not_recorded(hub: Hub) -> None:
    hub.files["org/bad"] = model_files() | {"model.safetensors": b"nonsense, and short"}
    with pytest.raises(ModelFileError):
        resolve("org/bad", progress=False)
    assert list_models() == []


@pytest.mark.timeout(60)
def test_no_hub_at_all(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFoundError, match="Check the network"):
        resolve("org/tiny", progress=False)
    assert hub.requests == 0


def test_progress_is_told(hub: Hub) -> None:
    files = hub.files["org/tiny"] = model_files()
    told: list[tuple[str, int, int]] = []
    pull("org/tiny", progress=lambda *step: told.append(step))
    assert len(told) > 10
    assert max(done for _, done, _ in told) >= len(files["model.safetensors"])
    assert all(done <= total for _, done, total in told if total)


def test_copies_keep_their_files(hub: Hub, tiny_gguf: bytes) -> None:
    hub.files["org/quants"] = {"a.gguf": tiny_gguf, "b.gguf": tiny_gguf + bytes(32)}
    for name in ("a", "b"):
        resolve(f"org/quants:{name}.gguf", progress=False)
    copy("org/quants:b.gguf", "mine:v1")
    path = resolve("mine:v1", progress=False).path
    for name in ("b", "a"):
        remove(f"org/quants:{name}.gguf")
    assert [info.name for info in list_models()] == ["mine:v1"] and path.read_bytes() == tiny_gguf + bytes(32)
    for wrong in ("../x", "org/other", "smollm2-135m", "a b", ""):
        with pytest.raises(InputError):
            copy("mine:v1", wrong)
    with pytest.raises(ModelNotFoundError):
        copy("nothing", "x")
    remove("mine:v1")
    assert list_models() == []
