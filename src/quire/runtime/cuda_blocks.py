"""Blocks of a GPU's memory that outlast the process that filled them, by the driver's virtual memory management.

    cuMemCreate ──► exported as a descriptor, which keeps it alive ──► imported and mapped by another process

A holder of descriptors needs no CUDA context, so that no fault of an engine's reaches it. Mapped for reading only, once
they are full. Refuses to know: what is in them, who keeps their descriptors.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from typing import Any

import torch

PINNED, DEVICE, POSIX_FD = 1, 1, 1  # CU_MEM_ALLOCATION_TYPE_, _LOCATION_TYPE_, _HANDLE_TYPE_
READ, READ_WRITE = 1, 3  # CU_MEM_ACCESS_FLAGS_PROT_
SIZE, POINTER = ctypes.c_size_t, ctypes.c_uint64


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Allocation(ctypes.Structure):
    """CUmemAllocationProp"""

    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("metadata", ctypes.c_void_p),
        ("flags", ctypes.c_uint8 * 8),
    ]


class _Access(ctypes.Structure):
    """CUmemAccessDesc"""

    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


class _Bytes:
    """Memory as torch takes it without a copy."""

    def __init__(self, address: int, size: int):
        self.__cuda_array_interface__ = {
            "data": (address, False), "shape": (size,), "typestr": "|u1", "strides": None, "version": 3,
        }  # fmt: skip


class CudaBlock:
    """`at`: the descriptor of one that another process has filled."""

    def __init__(self, size: int, device: torch.device, at: int | None = None):
        torch.zeros(1, device=device)  # there is a context, and it is this thread's
        self._location = _Location(DEVICE, device.index or 0)
        kind = _Allocation(PINNED, POSIX_FD, self._location)
        unit = SIZE()
        _call("cuMemGetAllocationGranularity", ctypes.byref(unit), ctypes.byref(kind), ctypes.c_int(0))
        self.size = -(-size // unit.value) * unit.value
        self.descriptor = -1
        handle, address = POINTER(), POINTER()
        if at is None:
            _call("cuMemCreate", ctypes.byref(handle), SIZE(self.size), ctypes.byref(kind), POINTER(0))
        else:
            descriptor = ctypes.c_void_p(at)
            _call("cuMemImportFromShareableHandle", ctypes.byref(handle), descriptor, ctypes.c_int(POSIX_FD))
        try:
            if at is None:
                out = ctypes.c_int(-1)
                _call("cuMemExportToShareableHandle", ctypes.byref(out), handle, ctypes.c_int(POSIX_FD), POINTER(0))
                self.descriptor = out.value
            else:
                self.descriptor = os.dup(at)
            _call("cuMemAddressReserve", ctypes.byref(address), SIZE(self.size), SIZE(0), POINTER(0), POINTER(0))
            _call("cuMemMap", address, SIZE(self.size), SIZE(0), handle, POINTER(0))
        finally:
            _call("cuMemRelease", handle)  # the mapping keeps it
        self._address = address
        self._allow(READ_WRITE if at is None else READ)
        self.bytes = torch.as_tensor(_Bytes(address.value, self.size), device=device)[:size]

    def _allow(self, flags: int) -> None:
        access = _Access(self._location, flags)
        _call("cuMemSetAccess", self._address, SIZE(self.size), ctypes.byref(access), SIZE(1))

    def seal(self) -> None:
        """It is full, and stays as it is."""
        torch.cuda.synchronize(self._location.id)
        self._allow(READ)

    def close(self) -> None:
        """Nothing may point there any more."""
        torch.cuda.synchronize(self._location.id)
        os.close(self.descriptor)
        _call("cuMemUnmap", self._address, SIZE(self.size))
        _call("cuMemAddressFree", self._address, SIZE(self.size))


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: Any) -> None:
    if error := getattr(_driver(), name)(*arguments):
        raise OSError(f"{name} failed with error {error} of the CUDA driver")
