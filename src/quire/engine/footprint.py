"""Giving back memory that only starting up needed: free heap pages, and code that has run and will not run again.

Code comes back from the file by itself when it is called after all. Linux only; elsewhere nothing happens.
Refuses to know: whose memory it is.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator
from pathlib import Path

MADV_DONTNEED = 4  # for code, which nobody writes: drop it from this process, not from the system's cache
LEAST = 1 << 20  # bytes of a mapping worth asking about


def shed() -> None:
    """Once, when everything is loaded. What lives now is taken to live for ever and never scanned again."""
    gc.collect()
    gc.freeze()
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # glibc's
        libc.malloc_trim(0)
    for start, end in _code():
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_DONTNEED)


def _code() -> Iterator[tuple[int, int]]:
    """Mappings of files that may be run and not written."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, rights, *_, name = line.split(maxsplit=5) if line.count("/") else (line, "", "")
        if rights == "r-xp" and name.startswith("/"):
            start, end = (int(part, 16) for part in addresses.split("-"))
            if end - start >= LEAST:
                yield start, end
