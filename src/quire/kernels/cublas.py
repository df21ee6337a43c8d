"""Large products by a tile of cuBLAS that we name: at a card's power limit the one it prefers need not be the fastest.

    out [rows, n] = x [rows, k] · weight [n, k]ᵀ          16 bits

Talks to the cublasLt that torch has loaded. Whatever is not as expected (no such library, no such tile for the shape)
means None, and the caller takes torch's product. Refuses to know: layers, which tile is fast (`triton/configs.py`).
"""

from __future__ import annotations

import ctypes
import os
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from functools import cache

import torch

TYPES = {torch.bfloat16: 14, torch.float16: 2}  # the library's names, here and below: cublasLt.h
FLOAT32, COMPUTE_FLOAT32 = 0, 68
TRANSPOSE_A, TILE_ID, MAX_WORKSPACE = 3, 1, 1
CANDIDATES = 16


class _Candidate(ctypes.Structure):
    _fields_ = [
        ("algorithm", c_uint64 * 8),
        ("workspace", c_size_t),
        ("status", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    ]


class _Failed(Exception):
    pass


@cache
def _open(device: int) -> tuple[ctypes.CDLL, c_void_p] | None:
    """The library and a handle for this device."""
    for name in ("libcublasLt.so.13", "libcublasLt.so.12"):
        try:
            library = ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        except OSError:
            continue
        handle = c_void_p()
        with torch.cuda.device(device):
            return (library, handle) if library.cublasLtCreate(byref(handle)) == 0 else None
    return None


class _Product:
    """One shape by one candidate that has the wanted tile."""

    def __init__(self, device: int, kind: int, rows: int, outputs: int, width: int, tiles: tuple[int, ...]):
        opened = _open(device)
        if opened is None:
            raise _Failed
        self._library, self._handle = opened
        self._description = c_void_p()
        self._check(self._library.cublasLtMatmulDescCreate(byref(self._description), COMPUTE_FLOAT32, FLOAT32))
        self._set("MatmulDesc", self._description, TRANSPOSE_A, c_int32(1))
        # what is in rows here is in columns there: outᵀ [n, rows] = weight [n, k] · xᵀ [k, rows]
        self._weight = self._layout(kind, width, outputs)
        self._x = self._layout(kind, width, rows)
        self._out = self._layout(kind, outputs, rows)
        self._algorithm = self._find(tiles)

    def run(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        one, zero, result = c_float(1.0), c_float(0.0), c_void_p(out.data_ptr())
        self._check(
            self._library.cublasLtMatmul(
                self._handle, self._description, byref(one), c_void_p(weight.data_ptr()), self._weight,
                c_void_p(x.data_ptr()), self._x, byref(zero), result, self._out, result, self._out,
                byref(self._algorithm), None, c_size_t(0), c_void_p(torch.cuda.current_stream(x.device).cuda_stream),
            )
        )  # fmt: skip

    def _find(self, tiles: tuple[int, ...]) -> ctypes.Array[c_uint64]:
        wishes, found, count = c_void_p(), (_Candidate * CANDIDATES)(), c_int()
        self._check(self._library.cublasLtMatmulPreferenceCreate(byref(wishes)))
        self._set("MatmulPreference", wishes, MAX_WORKSPACE, c_uint64(0))
        self._check(
            self._library.cublasLtMatmulAlgoGetHeuristic(
                self._handle, self._description, self._weight, self._x, self._out, self._out, wishes, CANDIDATES, found,
                byref(count),
            )
        )  # fmt: skip
        self._library.cublasLtMatmulPreferenceDestroy(wishes)
        by_tile = {self._tile(one): one.algorithm for one in reversed(found[: count.value]) if one.status == 0}
        chosen = next((by_tile[tile] for tile in tiles if tile in by_tile), None)
        if chosen is None:
            raise _Failed
        return (c_uint64 * 8)(*chosen)

    def _tile(self, candidate: _Candidate) -> int:
        tile, size = c_uint32(), c_size_t()
        read = self._library.cublasLtMatmulAlgoConfigGetAttribute
        self._check(read(byref(candidate), TILE_ID, byref(tile), c_size_t(4), byref(size)))
        return tile.value

    def _layout(self, kind: int, width: int, count: int) -> c_void_p:
        made = c_void_p()
        create = self._library.cublasLtMatrixLayoutCreate
        self._check(create(byref(made), kind, c_uint64(width), c_uint64(count), c_int64(width)))
        return made

    def _set(self, what: str, thing: c_void_p, attribute: int, value: ctypes._SimpleCData[int]) -> None:
        write = getattr(self._library, f"cublasLt{what}SetAttribute")
        self._check(write(thing, attribute, byref(value), c_size_t(ctypes.sizeof(value))))

    def _check(self, status: int) -> None:
        if status:
            raise _Failed


@cache
def _product(device: int, kind: int, rows: int, outputs: int, width: int, tiles: tuple[int, ...]) -> _Product | None:
    try:
        return _Product(device, kind, rows, outputs, width, tiles)
    except (_Failed, AttributeError):  # the latter: a library without such a function
        return None


def matmul(x: torch.Tensor, weight: torch.Tensor, tiles: tuple[int, ...]) -> torch.Tensor | None:
    """By the first of these tiles that the library offers for this shape; None: by none."""
    kind = TYPES.get(x.dtype)
    if kind is None or weight.dtype != x.dtype or not (x.is_contiguous() and weight.is_contiguous()):
        return None
    product = _product(x.device.index or 0, kind, x.shape[0], *weight.shape, tiles)
    if product is None:
        return None
    out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
    try:
        product.run(x, weight, out)
    except _Failed:
        return None
    return out
