"""Products by a kernel of cuBLAS that we name: the one it prefers for a shape need not be the fastest.

    out [rows, n] = x [rows, k] · weight [n, k]ᵀ (+ residual)          16 bits; or 8, with a scale a row on both sides

Talks to the cublasLt that torch has loaded. Whatever is not as expected (no such library, no such kernel for the shape)
means None, and the caller takes torch's product. Refuses to know: which kernel is the fastest, layers.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Sequence
from ctypes import byref, c_float, c_int, c_int8, c_int32, c_int64, c_size_t, c_uint16, c_uint32, c_uint64, c_void_p
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch

TYPES = {torch.bfloat16: 14, torch.float16: 2, torch.float8_e4m3fn: 28}  # the library's names, here and below
FLOAT32, COMPUTE_FLOAT32 = 0, 68
TRANSPOSE_A, A_SCALE, B_SCALE, FAST_ACCUMULATION, A_SCALE_MODE, B_SCALE_MODE = 3, 17, 18, 25, 31, 32  # of a product
MAX_WORKSPACE = 1  # of a wish
TILE, CUSTOM, CLUSTER = 1, 5, 8  # of an algorithm
ATTRIBUTES: dict[int, type[ctypes._SimpleCData[int]]] = {TILE: c_uint32, CUSTOM: c_uint32, CLUSTER: c_uint16}
SCALE_EACH = 3  # a scale for each output, and each row
CANDIDATES = 16
PRODUCTS = 4096  # shapes and kernels that are kept described
WORKSPACE = 1 << 20  # the most that a kernel may want for itself: those here ask for a counter


class Algorithm(NamedTuple):
    """What tells kernels of one family apart, in cublasLt's numbers; with a tile alone: the one offered that has it."""

    tile: int
    cluster: int | None = None
    custom: int | None = None


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
def _open(device: torch.device) -> tuple[ctypes.CDLL, c_void_p] | None:
    """The library and a handle for this device."""
    if device.type != "cuda":
        return None
    for name in ("libcublasLt.so.13", "libcublasLt.so.12"):
        try:
            library = ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        except OSError:
            continue
        handle = c_void_p()
        with torch.cuda.device(device):
            return (library, handle) if library.cublasLtCreate(byref(handle)) == 0 else None
    return None


class _Shape(NamedTuple):
    device: torch.device
    dtype: torch.dtype  # of x and the weight
    out: torch.dtype
    rows: int
    outputs: int
    width: int


def version(device: torch.device) -> int:
    """Of the library; 0: there is none."""
    opened = _open(device)
    if opened is None:
        return 0
    ask = opened[0].cublasLtGetVersion
    ask.restype = c_size_t
    return int(ask())


class _Product:
    """One shape by one kernel; of no kernel, only what the library offers for it."""

    def __init__(self, shape: _Shape, algorithm: Algorithm | None):
        opened = _open(shape.device)
        if opened is None:
            raise _Failed
        self._library, self._handle = opened
        self._description = c_void_p()
        self._check(self._library.cublasLtMatmulDescCreate(byref(self._description), COMPUTE_FLOAT32, FLOAT32))
        self._describe(TRANSPOSE_A, c_int32(1))
        if shape.dtype == torch.float8_e4m3fn:
            self._describe(FAST_ACCUMULATION, c_int8(1))
            for mode, scale in ((A_SCALE_MODE, A_SCALE), (B_SCALE_MODE, B_SCALE)):
                self._describe(mode, c_int32(SCALE_EACH))
                self._describe(scale, c_void_p(256))  # some place: there is nothing to offer without
        # what is in rows here is in columns there: outᵀ [n, rows] = weight [n, k] · xᵀ [k, rows]
        self._weight = self._layout(shape.dtype, shape.width, shape.outputs)
        self._x = self._layout(shape.dtype, shape.width, shape.rows)
        self._out = self._layout(shape.out, shape.outputs, shape.rows)
        self._lock = threading.Lock()  # a description has the scales of one call
        if algorithm is not None:
            self._algorithm = self._find(algorithm)

    def __del__(self) -> None:
        for made, destroy in (
            ("_description", "cublasLtMatmulDescDestroy"),
            *((name, "cublasLtMatrixLayoutDestroy") for name in ("_weight", "_x", "_out")),
        ):
            if pointer := getattr(self, made, None):
                getattr(self._library, destroy)(pointer)

    def offers(self) -> list[Algorithm]:
        """What the library would take, its favourite first."""
        return [Algorithm(*(self._read(one, each) for each in (TILE, CLUSTER, CUSTOM))) for one in self._offered()]

    def run(
        self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, add: bool, scales: Sequence[torch.Tensor]
    ) -> None:
        """`scales`: of x and the weight, where they are in 8 bits."""
        one, beta, result = c_float(1.0), c_float(float(add)), c_void_p(out.data_ptr())
        size = self._algorithm.workspace
        workspace = torch.empty(size, dtype=torch.uint8, device=x.device) if size else None
        with self._lock:
            for attribute, scale in zip((B_SCALE, A_SCALE), scales, strict=False):
                self._describe(attribute, c_void_p(scale.data_ptr()))
            self._check(
                self._library.cublasLtMatmul(
                    self._handle, self._description, byref(one), c_void_p(weight.data_ptr()), self._weight,
                    c_void_p(x.data_ptr()), self._x, byref(beta), result, self._out, result, self._out,
                    byref(self._algorithm), None if workspace is None else c_void_p(workspace.data_ptr()),
                    c_size_t(size), c_void_p(torch.cuda.current_stream(x.device).cuda_stream),
                )
            )  # fmt: skip

    def _find(self, wanted: Algorithm) -> _Candidate:
        """Among what the library offers; or one of those, turned into the wanted one."""
        for candidate in self._offered():
            if wanted.cluster is not None and wanted.custom is not None:
                found = self._turned(candidate, {TILE: wanted.tile, CLUSTER: wanted.cluster, CUSTOM: wanted.custom})
            else:
                found = candidate if self._read(candidate, TILE) == wanted.tile else None
            if found is not None:
                return found
        raise _Failed

    def _turned(self, candidate: _Candidate, attributes: dict[int, int]) -> _Candidate | None:
        """Another kernel of its family, if the library says that there is one."""
        made, checked = _Candidate(algorithm=candidate.algorithm), _Candidate()
        write = self._library.cublasLtMatmulAlgoConfigSetAttribute
        for attribute, value in attributes.items():
            number = ATTRIBUTES[attribute](value)
            if write(byref(made), attribute, byref(number), c_size_t(ctypes.sizeof(number))):
                return None
        status = self._library.cublasLtMatmulAlgoCheck(
            self._handle, self._description, self._weight, self._x, self._out, self._out, byref(made), byref(checked)
        )
        if status or checked.status or checked.workspace > WORKSPACE:
            return None
        made.workspace = checked.workspace
        return made

    def _read(self, candidate: _Candidate, attribute: int) -> int:
        number, size = c_uint32(), c_size_t(ctypes.sizeof(ATTRIBUTES[attribute]))
        read = self._library.cublasLtMatmulAlgoConfigGetAttribute
        self._check(read(byref(candidate), attribute, byref(number), size, byref(c_size_t())))
        return number.value

    def _offered(self) -> list[_Candidate]:
        """Those that need no memory beside, the library's favourite first; so none that splits a sum."""
        wishes, found, count, none = c_void_p(), (_Candidate * CANDIDATES)(), c_int(), c_uint64(0)
        self._check(self._library.cublasLtMatmulPreferenceCreate(byref(wishes)))
        limit = self._library.cublasLtMatmulPreferenceSetAttribute
        self._check(limit(wishes, MAX_WORKSPACE, byref(none), c_size_t(8)))
        self._check(
            self._library.cublasLtMatmulAlgoGetHeuristic(
                self._handle, self._description, self._weight, self._x, self._out, self._out, wishes, CANDIDATES, found,
                byref(count),
            )
        )  # fmt: skip
        self._library.cublasLtMatmulPreferenceDestroy(wishes)
        return [one for one in found[: count.value] if one.status == 0]

    def _layout(self, dtype: torch.dtype, width: int, count: int) -> c_void_p:
        made = c_void_p()
        create = self._library.cublasLtMatrixLayoutCreate
        self._check(create(byref(made), TYPES[dtype], c_uint64(width), c_uint64(count), c_int64(width)))
        return made

    def _describe(self, attribute: int, value: ctypes._SimpleCData[Any]) -> None:
        size = c_size_t(ctypes.sizeof(value))
        self._check(self._library.cublasLtMatmulDescSetAttribute(self._description, attribute, byref(value), size))

    def _check(self, status: int) -> None:
        if status:
            raise _Failed


@lru_cache(PRODUCTS)
def _product(shape: _Shape, algorithm: Algorithm) -> _Product | None:
    try:
        return _Product(shape, algorithm)
    except (_Failed, AttributeError):  # the latter: a library without such a function
        return None


def _shape(x: torch.Tensor, weight: torch.Tensor) -> _Shape:
    out = torch.bfloat16 if x.dtype == torch.float8_e4m3fn else x.dtype
    return _Shape(x.device, x.dtype, out, x.shape[0], *weight.shape)


def offers(x: torch.Tensor, weight: torch.Tensor) -> list[Algorithm]:
    """Kernels that the library would take for such a product, its favourite first."""
    if x.dtype not in TYPES or weight.dtype != x.dtype:
        return []
    try:
        return _Product(_shape(x, weight), None).offers()
    except (_Failed, AttributeError):
        return []


def matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    algorithm: Algorithm,
    *,
    residual: torch.Tensor | None = None,  # added to, in place, and returned
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,  # of x and the weight, in 8 bits: bf16 comes out
) -> torch.Tensor | None:
    """None: the library has no such kernel for this product."""
    if x.dtype not in TYPES or (x.dtype == torch.float8_e4m3fn) == (scales is None):
        return None
    shape = _shape(x, weight)
    if weight.dtype != x.dtype or (residual is not None and residual.dtype != shape.out):
        return None
    if not all(each.is_contiguous() for each in (x, weight, residual) if each is not None):
        return None
    product = _product(shape, algorithm)
    if product is None:
        return None
    out = torch.empty(x.shape[0], weight.shape[0], dtype=shape.out, device=x.device) if residual is None else residual
    try:
        with torch.cuda.device(x.device):
            product.run(x, weight, out, residual is not None, scales or ())
    except _Failed:
        return None
    return out
