"""Memory files of host memory that several processes map: filled once, then sealed, so that no process can change them.

    create ──► filled through a shared mapping ──► seal ──► private mappings, here at the same address, elsewhere at any

Refuses to know: what is in them, who keeps their descriptors.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from functools import cache

import torch

from quire.types.memory_use import available_bytes

SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
MAP_FIXED = 0x10


class HostBlock:
    """`at`: the descriptor of one that another process has sealed. What this process then writes, it alone sees."""

    def __init__(self, size: int, at: int | None = None):
        self.size = size
        if at is not None:
            if os.fstat(at).st_size != size or fcntl.fcntl(at, fcntl.F_GET_SEALS) != SEALS:
                raise ValueError("this is no sealed block of that size")
            self.descriptor = os.dup(at)
        else:
            if (free := available_bytes()) < size:  # who would write there would be killed
                raise OSError(errno.ENOMEM, f"{size:,} bytes are needed beside the model, {free:,} are available")
            self.descriptor = os.memfd_create("quire-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            if at is None:
                os.truncate(self.descriptor, size)
            self._address = _map(self.descriptor, size, mmap.MAP_SHARED if at is None else mmap.MAP_PRIVATE)
        except OSError:
            os.close(self.descriptor)
            raise
        self.bytes = torch.frombuffer((ctypes.c_uint8 * size).from_address(self._address), dtype=torch.uint8)

    def seal(self) -> None:
        """It is full, and stays as it is."""
        _map(self.descriptor, self.size, mmap.MAP_PRIVATE | MAP_FIXED, self._address)
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, SEALS)

    def close(self) -> None:
        """Nothing may point there any more."""
        os.close(self.descriptor)
        _libc().munmap(self._address, self.size)


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc


def _map(descriptor: int, size: int, flags: int, address: int | None = None) -> int:
    """In huge pages where the system gives them to memory files."""
    found = _libc().mmap(address, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, 0)
    if found == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), f"{size} bytes of weights could not be mapped")
    _libc().madvise(found, size, mmap.MADV_HUGEPAGE)
    return int(found)
