"""A reader of GGUF headers (versions 2 and 3) that believes nothing it has not checked against the file's size.

    magic, version, tensor count, key-value count
    key-values:   key, type, value            (strings and arrays carry their own lengths)
    tensor infos: name, dimensions, type, offset
    padding to the alignment, then tensor data

Knows: the container. Refuses to know: what keys mean to a model, how blocks are dequantised.
"""

from __future__ import annotations

import math
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from quire.assets.json_files import BeginningTooShort, map_file
from quire.types.errors import ModelFileError
from quire.types.seams import TensorInfo

MAX_HEADER = 256 << 20
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 17
MAX_DIMS = 4
MAX_ELEMENTS = 1 << 24  # array elements over the whole header
MAX_NESTING = 4
MAX_STRING = 16 << 20
MAX_ALIGNMENT = 1 << 16

# GGML tensor types we read: number → (name, elements per block, bytes per block).
TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    39: ("MXFP4", 32, 17),
}
BLOCKS = {name: (elements, size) for name, elements, size in TYPES.values()}

_SCALARS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 10: "<u8", 11: "<i8", 12: "<f8"}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_DTYPES = {number: np.dtype(code) for number, code in _SCALARS.items()} | {_BOOL: np.dtype("u1")}
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


class GGUFFile:
    """An open GGUF file: a WeightSource. The header is read and checked when it is made; data stays mapped."""

    def __init__(self, path: Path):
        self._data = map_file(path)
        header = GGUFHeader(self._data.data, len(self._data), str(path))
        self._metadata = header.metadata
        self._tensors = header.tensors
        self._starts = header.starts

    def metadata(self) -> dict[str, Any]:
        return self._metadata

    def tensors(self) -> dict[str, TensorInfo]:
        return self._tensors

    def read(self, name: str) -> np.ndarray:
        start = self._starts[name]
        return self._data[start : start + self._tensors[name].nbytes]


class GGUFHeader:
    """One pass over the header of a file of `size` bytes, of which `view` is the beginning. `fail` names the file and
    the byte at which things went wrong."""

    def __init__(self, view: memoryview, size: int, where: str):
        self._view = view
        self._size = size
        self._where = where
        self._at = 0
        self._elements = 0
        tensors, keys = self._preamble()
        self.metadata = self._key_values(keys)
        self.tensors, self.starts = self._tensor_infos(tensors)

    def fail(self, message: str) -> ModelFileError:
        return ModelFileError(f"{self._where}: {message} (at byte {self._at} of {self._size})")

    # Primitive reads

    def _take(self, count: int, what: str) -> int:
        """Advance over `count` bytes that must be there; returns where they start."""
        start = self._at
        if count > self._size - start:
            raise self.fail(f"the file ends inside {what}, which needs {count} bytes; it is truncated or lying")
        if start + count > MAX_HEADER:
            raise self.fail(f"the header is longer than {MAX_HEADER} bytes")
        if start + count > len(self._view):
            raise BeginningTooShort(start + count)
        self._at = start + count
        return start

    def _u32(self, what: str) -> int:
        return int(_U32.unpack_from(self._view, self._take(4, what))[0])

    def _u64(self, what: str) -> int:
        return int(_U64.unpack_from(self._view, self._take(8, what))[0])

    def _string(self, what: str) -> str:
        length = self._u64(what)
        if length > MAX_STRING:
            raise self.fail(f"the length of {what} is {length}; at most {MAX_STRING} bytes are allowed")
        start = self._take(length, what)
        try:
            return str(self._view[start : self._at], "utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} is not UTF-8") from error

    def _strings(self, what: str, count: int) -> list[str]:
        """As so many times `_string`: vocabularies have hundreds of thousands. Those that are sound are read without
        calls; from the first that is not on, `_string` says what is wrong."""
        view, at, found = self._view, self._at, list[str]()
        end = min(len(view), MAX_HEADER)
        with suppress(UnicodeDecodeError):
            while len(found) < count and at + 8 <= end:
                (length,) = _U64.unpack_from(view, at)
                if length > MAX_STRING or length > end - at - 8:
                    break
                found.append(str(view[at + 8 : at + 8 + length], "utf-8"))
                at += 8 + length
        self._at = at
        return found + [self._string(what) for _ in range(count - len(found))]

    # Sections

    def _preamble(self) -> tuple[int, int]:
        if bytes(self._view[: min(4, self._size)]) != b"GGUF":
            raise self.fail("this is not a GGUF file (its first four bytes are not 'GGUF')")
        self._take(4, "the magic")
        version = self._u32("the version")
        if version & 0xFFFF == 0 and version:
            raise self.fail("big-endian GGUF files are not supported")
        if version not in (2, 3):
            raise self.fail(f"GGUF version {version} is not supported; versions 2 and 3 are")
        tensors = self._u64("the tensor count")
        keys = self._u64("the key count")
        remaining = self._size - self._at
        # The smallest key-value has 13 bytes (empty key, one-byte value), the smallest tensor info 24.
        if keys > min(MAX_KEYS, remaining // 13):
            raise self.fail(f"the header claims {keys} keys, more than the file can hold or is allowed to")
        if tensors > min(MAX_TENSORS, remaining // 24):
            raise self.fail(f"the header claims {tensors} tensors, more than the file can hold or is allowed to")
        return tensors, keys

    def _key_values(self, count: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for _ in range(count):
            key = self._string("a key")
            if key in found:
                raise self.fail(f"the key {key!r} appears twice")
            found[key] = self._value(self._u32(f"the type of {key!r}"), key, 0)
        return found

    def _value(self, kind: int, key: str, nesting: int) -> Any:
        if kind == _STRING:
            return self._string(f"the value of {key!r}")
        if kind == _ARRAY:
            return self._array(key, nesting + 1)
        return self._scalars(kind, 1, key)[0]

    def _array(self, key: str, nesting: int) -> list[Any]:
        if nesting > MAX_NESTING:
            raise self.fail(f"arrays in {key!r} are nested deeper than {MAX_NESTING}")
        kind = self._u32(f"the element type of {key!r}")
        count = self._u64(f"the length of {key!r}")
        self._elements += count
        if self._elements > MAX_ELEMENTS:
            raise self.fail(f"arrays up to {key!r} claim more than {MAX_ELEMENTS} elements")
        if kind not in (_STRING, _ARRAY):
            return self._scalars(kind, count, key)
        smallest = 8 if kind == _STRING else 12
        if count * smallest > self._size - self._at:
            raise self.fail(f"{key!r} claims {count} elements, more than the file can hold")
        if kind == _STRING:
            return self._strings(f"an element of {key!r}", count)
        return [self._array(key, nesting + 1) for _ in range(count)]

    def _scalars(self, kind: int, count: int, key: str) -> list[Any]:
        dtype = _DTYPES.get(kind)
        if dtype is None:
            raise self.fail(f"{key!r} has the unknown value type {kind}")
        start = self._take(count * dtype.itemsize, f"the value of {key!r}")
        values = np.frombuffer(self._view[start : self._at], dtype)
        if kind != _BOOL:
            return list(values.tolist())
        if (values > 1).any():
            raise self.fail(f"{key!r} holds a boolean that is neither 0 nor 1")
        return list(values.astype(bool).tolist())

    def _tensor_infos(self, count: int) -> tuple[dict[str, TensorInfo], dict[str, int]]:
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 8 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise self.fail(f"general.alignment is {alignment!r}; it must be a power of two from 8 to {MAX_ALIGNMENT}")
        infos: dict[str, TensorInfo] = {}
        offsets: dict[str, int] = {}
        for _ in range(count):
            info, offset = self._tensor_info()
            if info.name in infos:
                raise self.fail(f"the tensor {info.name!r} appears twice")
            if offset % alignment:
                raise self.fail(f"the offset {offset} of tensor {info.name!r} is not a multiple of {alignment}")
            infos[info.name], offsets[info.name] = info, offset
        data = -(-self._at // alignment) * alignment
        self._check_spans(infos, offsets, data)
        return infos, {name: data + offset for name, offset in offsets.items()}

    def _tensor_info(self) -> tuple[TensorInfo, int]:
        name = self._string("a tensor name")
        dims = self._u32(f"the dimension count of {name!r}")
        if not 1 <= dims <= MAX_DIMS:
            raise self.fail(f"the tensor {name!r} has {dims} dimensions; 1 to {MAX_DIMS} are allowed")
        inner_first = [self._u64(f"the shape of {name!r}") for _ in range(dims)]
        if 0 in inner_first:
            raise self.fail(f"the tensor {name!r} has an empty dimension: {inner_first}")
        number = self._u32(f"the type of {name!r}")
        if number not in TYPES:
            known = ", ".join(BLOCKS)
            raise self.fail(f"the tensor {name!r} has type number {number}, which is not read here; known: {known}")
        kind, elements, size = TYPES[number]
        if inner_first[0] % elements:
            raise self.fail(f"rows of {name!r} have {inner_first[0]} elements, not a multiple of {kind}'s {elements}")
        nbytes = math.prod(inner_first) // elements * size
        offset = self._u64(f"the offset of {name!r}")
        return TensorInfo(name=name, shape=tuple(reversed(inner_first)), kind=kind, nbytes=nbytes), offset

    def _check_spans(self, infos: dict[str, TensorInfo], offsets: dict[str, int], data: int) -> None:
        """All tensors lie inside the file and none shares a byte with another."""
        end, before = 0, ""
        for name in sorted(offsets, key=offsets.__getitem__):
            start = offsets[name]
            if start < end:
                raise self.fail(f"the tensors {before!r} and {name!r} overlap")
            end, before = start + infos[name].nbytes, name
            if data + end > self._size:
                raise self.fail(f"the tensor {name!r} ends at byte {data + end}, past the end; the file is truncated")
