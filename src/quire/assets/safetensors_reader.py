"""Readers of safetensors files and of model directories made of them, sharded or not.

A file is: header length (8 bytes), a JSON header of that length, data. Every span is checked against its shape
and the file before anything is mapped out. A directory's own description is its config.json; with nothing but
that file it still is a source (for random weights), one without tensors.

Knows: the container and the shard index. Refuses to know: what tensor names mean to a model.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from quire.assets.json_files import BeginningTooShort, map_file, parse_json, read_json
from quire.types.errors import ModelFileError
from quire.types.seams import TensorInfo

MAX_HEADER = 100_000_000  # the limit of the format's own library
INDEX = "model.safetensors.index.json"

ITEM_SIZES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4,
    "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip


class SafetensorsHeader:
    """What is in a file of `size` bytes, by its beginning; all of it is checked."""

    def __init__(self, beginning: bytes | memoryview, size: int, where: str):
        self._where = where
        if size < 8:
            raise self._fail(f"it has {size} bytes, too few for a header")
        length = int.from_bytes(beginning[:8], "little")
        if length > min(MAX_HEADER, size - 8):
            raise self._fail(f"its header claims {length} bytes, but {size - 8} follow (and {MAX_HEADER} are allowed)")
        self.start = 8 + length
        if len(beginning) < self.start:
            raise BeginningTooShort(self.start)
        header = parse_json(bytes(beginning[8 : self.start]), f"the header of {where}")
        header.pop("__metadata__", None)
        self.spans: dict[str, tuple[int, int]] = {}
        self.tensors = {name: self._entry(name, entry) for name, entry in header.items()}
        self._check_coverage(size - self.start)

    def _fail(self, message: str) -> ModelFileError:
        return ModelFileError(f"{self._where} is not a sound safetensors file: {message}")

    def _entry(self, name: str, entry: Any) -> TensorInfo:
        if not isinstance(entry, dict):
            raise self._fail(f"the entry of {name!r} is not an object")
        kind, shape, span = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
        if not isinstance(kind, str) or kind not in ITEM_SIZES:
            raise self._fail(f"the tensor {name!r} has unknown dtype {kind!r}; known: {', '.join(ITEM_SIZES)}")
        if not _counts(shape) or not _counts(span) or len(span) != 2:
            raise self._fail(f"shape or data_offsets of {name!r} are not lists of counts: {shape!r}, {span!r}")
        start, end = span
        nbytes = math.prod(shape) * ITEM_SIZES[kind]
        if end - start != nbytes:
            raise self._fail(f"{name!r} of shape {shape} and dtype {kind} needs {nbytes} bytes, not {start}..{end}")
        self.spans[name] = (start, end)
        return TensorInfo(name=name, shape=tuple(shape), kind=kind, nbytes=nbytes)

    def _check_coverage(self, available: int) -> None:
        """Tensors follow each other without hole or overlap and fill the file exactly, as the format demands."""
        reached, before = 0, "the header"
        for name, (start, end) in sorted(self.spans.items(), key=lambda item: item[1]):
            if start != reached:
                problem = "overlap" if start < reached else "leave a hole"
                raise self._fail(f"{before!r} and {name!r} {problem}: {reached} is followed by {start}")
            reached, before = end, name
        if reached != available:
            problem = "it is truncated" if reached > available else "bytes follow the last tensor"
            raise self._fail(f"tensors take {reached} bytes, the file has {available} for them; {problem}")


class SafetensorsFile:
    """One file, its header read and checked."""

    def __init__(self, path: Path):
        self._data = map_file(path)
        self._header = SafetensorsHeader(self._data.data, len(self._data), str(path))
        self.tensors = self._header.tensors

    def read(self, name: str) -> np.ndarray:
        start, end = self._header.spans[name]
        return self._data[self._header.start + start : self._header.start + end]


class SafetensorsModel:
    """A directory with config.json and its weights, if there are any: a WeightSource."""

    def __init__(self, directory: Path):
        self._config = read_json(directory / "config.json")
        self._homes: dict[str, SafetensorsFile] = {}
        self._tensors: dict[str, TensorInfo] = {}
        index = directory / INDEX
        if index.exists():
            self._open_shards(directory, index)
        elif (path := single_file(directory)) is not None:
            file = SafetensorsFile(path)
            self._tensors = file.tensors
            self._homes = dict.fromkeys(file.tensors, file)

    def _open_shards(self, directory: Path, index: Path) -> None:
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelFileError(f"{index} has no weight_map object; it does not say which shard holds what")
        shards: dict[str, SafetensorsFile] = {}
        for name, value in weight_map.items():
            shard = _plain_name(value, index)
            if shard not in shards:
                shards[shard] = SafetensorsFile(_existing(directory / shard, index))
            info = shards[shard].tensors.get(name)
            if info is None:
                raise ModelFileError(f"{index} places {name!r} in {shard}, but it is not there")
            self._tensors[name] = info
            self._homes[name] = shards[shard]

    def metadata(self) -> dict[str, Any]:
        return self._config

    def tensors(self) -> dict[str, TensorInfo]:
        return self._tensors

    def read(self, name: str) -> np.ndarray:
        return self._homes[name].read(name)


def single_file(directory: Path) -> Path | None:
    """The one weight file of an unsharded directory; None if it has no weights at all."""
    usual = directory / "model.safetensors"
    if usual.exists():
        return usual
    files = sorted(directory.glob("*.safetensors"))
    if len(files) > 1:
        names = ", ".join(f.name for f in files[:4])
        raise ModelFileError(f"{directory} has several weight files ({names}) but no {INDEX} to say which to use")
    if files:
        return files[0]
    if any(directory.glob("pytorch_model*.bin")):
        raise ModelFileError(
            f"{directory} holds its weights as a pickle (pytorch_model.bin), which can run code when opened and is "
            "never read here; convert it to safetensors first"
        )
    return None


def _counts(value: Any) -> TypeGuard[list[int]]:
    """A list of non-negative whole numbers that fit 63 bits (True and 1.0 are neither)."""
    return isinstance(value, list) and len(value) <= 64 and all(type(n) is int and 0 <= n < 1 << 63 for n in value)


def _plain_name(shard: Any, index: Path) -> str:
    """A shard is a file beside its index: never a path that leads elsewhere."""
    if not isinstance(shard, str) or Path(shard).name != shard or "\\" in shard or not shard.endswith(".safetensors"):
        raise ModelFileError(f"{index} names the shard {shard!r}; a shard must be a .safetensors file beside the index")
    return shard


def _existing(path: Path, index: Path) -> Path:
    if not path.exists():
        raise ModelFileError(f"{index} needs the shard {path.name}, which is missing; fetch the model again")
    return path
