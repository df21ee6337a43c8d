"""The safetensors reader: equal to the library's own, and as strict as it."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from quire.assets.safetensors_reader import INDEX, SafetensorsFile, SafetensorsModel
from quire.types.errors import ModelFileError


def pack(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(encoded) if length is None else length) + encoded + data


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def open_bytes(tmp_path: Path, data: bytes) -> SafetensorsFile:
    path = tmp_path / "case.safetensors"
    path.unlink(missing_ok=True)  # writing over a file can wait for the disk; making a new one does not
    path.write_bytes(data)
    return SafetensorsFile(path)


def test_equal_to_the_library(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    arrays = {
        "a": rng.standard_normal((3, 4)).astype(np.float32),
        "b": rng.standard_normal((2, 2, 2)).astype(np.float16),
        "c": rng.integers(-9, 9, 5).astype(np.int8),
        "d": np.array(7, dtype=np.int64),
        "e": np.zeros((0, 3), dtype=np.float64),
    }
    path = tmp_path / "model.safetensors"
    save_file(arrays, path, metadata={"format": "np"})
    ours = SafetensorsFile(path)
    with safe_open(path, "np") as oracle:
        assert set(ours.tensors) == set(oracle.keys())
        for name in oracle.keys():  # noqa: SIM118 (not a dict)
            info = ours.tensors[name]
            assert info.shape == tuple(oracle.get_slice(name).get_shape())
            assert info.kind == oracle.get_slice(name).get_dtype()
            assert ours.read(name).tobytes() == oracle.get_tensor(name).tobytes()


BAD = {
    "empty": (b"", "empty"),
    "seven bytes": (b"1234567", "too few"),
    "lying length": (pack({}, length=1 << 60), "claims"),
    "length past the end": (pack({}, length=3), "claims"),
    "not json": (pack(b"{nonsense}"), "not valid JSON"),
    "a list": (pack([]), "JSON list"),
    "deep json": (pack(b"[" * 100_000), "not valid JSON"),
    "long number": (pack(b'{"a": ' + b"9" * 5000 + b"}"), "not valid JSON"),
    "not utf-8": (pack(b'{"\xff": 1}'), "not valid JSON"),
    "repeated name": (pack(b'{"a": {}, "a": {}}'), "twice"),
    "entry of text": (pack({"a": "b"}), "not an object"),
    "unknown dtype": (pack({"a": entry("F3")}, bytes(8)), "unknown dtype"),
    "dtype list": (pack({"a": entry(["F32"])}, bytes(8)), "unknown dtype"),
    "negative shape": (pack({"a": entry(shape=(-2,))}, bytes(8)), "not lists of counts"),
    "fractional shape": (pack({"a": entry(shape=(2.0,))}, bytes(8)), "not lists of counts"),
    "missing offsets": (pack({"a": {"dtype": "F32", "shape": [2]}}, bytes(8)), "not lists of counts"),
    "backward offsets": (pack({"a": entry(offsets=(8, 0))}, bytes(8)), "needs 8 bytes"),
    "wrong span": (pack({"a": entry(offsets=(0, 4))}, bytes(4)), "needs 8 bytes"),
    "overflowing product": (pack({"a": entry(shape=(1 << 62, 1 << 62))}, bytes(8)), "needs"),
    "truncated": (pack({"a": entry()}, bytes(7)), "truncated"),
    "trailing bytes": (pack({"a": entry()}, bytes(9)), "bytes follow"),
    "overlap": (pack({"a": entry(), "b": entry(offsets=(4, 12))}, bytes(12)), "overlap"),
    "hole": (pack({"a": entry(), "b": entry(offsets=(12, 20))}, bytes(20)), "hole"),
}


@pytest.mark.parametrize("case", BAD)
def test_each_lie_has_its_own_error(case: str, tmp_path: Path) -> None:
    data, message = BAD[case]
    with pytest.raises(ModelFileError, match=message) as caught:
        open_bytes(tmp_path, data)
    assert "case.safetensors" in str(caught.value)


def test_random_damage_is_judged_as_the_library_judges_it(tmp_path: Path) -> None:
    """Thousands of damaged files: refused here whenever the library refuses them, and with no other error."""
    rng = random.Random(4)
    header = {"a": entry(shape=(2, 1)), "bb": entry("BF16", (3,), (8, 14)), "c": entry("I8", (2,), (14, 16))}
    whole = pack(header, bytes(16))
    accepted = 0
    for _ in range(2500):
        data = bytearray(whole)
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            at = rng.randrange(len(data) - 16)
            data[at] = rng.choice(b'0123456789[]{},:"abF') if rng.random() < 0.7 else rng.randrange(256)
        if rng.random() < 0.1:
            data = data[: rng.randrange(len(data))]
        try:
            ours = open_bytes(tmp_path, bytes(data))
        except ModelFileError:
            continue
        accepted += 1
        with safe_open(
            tmp_path / "case.safetensors", "np"
        ) as oracle:  # must not raise: it accepts whatever is accepted here
            assert set(oracle.keys()) == set(ours.tensors)
    assert 10 < accepted < 2400


def test_truncation_everywhere(tmp_path: Path) -> None:
    whole = pack({"a": entry()}, bytes(8))
    open_bytes(tmp_path, whole)
    for cut in range(len(whole)):
        with pytest.raises(ModelFileError):
            open_bytes(tmp_path, whole[:cut])


# Directories


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 128}')
    save_file({"a": np.ones(3, np.float32)}, tmp_path / "model-1.safetensors")
    save_file({"b": np.zeros((2, 2), np.float16), "c": np.ones(1, np.int8)}, tmp_path / "model-2.safetensors")
    write_index(tmp_path, {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-2.safetensors"})
    return tmp_path


def write_index(directory: Path, weight_map: Any) -> None:
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_shards_are_one_model(sharded: Path) -> None:
    model = SafetensorsModel(sharded)
    assert {n: (i.shape, i.kind) for n, i in model.tensors().items()} == {
        "a": ((3,), "F32"),
        "b": ((2, 2), "F16"),
        "c": ((1,), "I8"),
    }
    assert model.read("a").view(np.float32).tolist() == [1.0, 1.0, 1.0]
    assert model.metadata()["model_type"] == "llama"


def test_missing_shard(sharded: Path) -> None:
    (sharded / "model-2.safetensors").unlink()
    with pytest.raises(ModelFileError, match=r"model-2\.safetensors, which is missing"):
        SafetensorsModel(sharded)


@pytest.mark.parametrize(
    "name", ["../model-1.safetensors", "/etc/x.safetensors", "a\\b.safetensors", "x.bin", "", 3, ["a"], None]
)
def test_shards_stay_in_their_directory(sharded: Path, name: Any) -> None:
    write_index(sharded, {"a": name})
    with pytest.raises(ModelFileError, match="beside the index"):
        SafetensorsModel(sharded)


def test_index_that_lies(sharded: Path) -> None:
    write_index(sharded, {"zz": "model-1.safetensors"})
    with pytest.raises(ModelFileError, match="not there"):
        SafetensorsModel(sharded)
    write_index(sharded, [])
    with pytest.raises(ModelFileError, match="weight_map"):
        SafetensorsModel(sharded)


def test_config_alone_is_a_source_without_tensors(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    model = SafetensorsModel(tmp_path)
    assert model.tensors() == {}
    assert model.metadata() == {"hidden_size": 8}


def test_pickles_and_ambiguity_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ModelFileError, match="pickle"):
        SafetensorsModel(tmp_path)
    for name in ("x", "y"):
        save_file({"a": np.ones(1, np.float32)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ModelFileError, match="several weight files"):
        SafetensorsModel(tmp_path)


def test_the_library_agrees_on_the_bad_cases(tmp_path: Path) -> None:
    """The table above is not stricter than the format: what it refuses, the library refuses too."""
    lenient = {"repeated name"}  # the library lets the last one win
    for case, (data, _) in BAD.items():
        path = tmp_path / "case.safetensors"
        path.write_bytes(data)
        if case not in lenient:
            with pytest.raises((SafetensorError, OSError, ValueError)), safe_open(path, "np"):
                pass
