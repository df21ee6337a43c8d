"""Memory, once everything is loaded: what only starting up needed is given back, and no garbage is collected at work.

An engine's objects make no cycles (a test holds it to that), so counting references frees them all. Looking for cycles
takes as long as there are objects, tens of milliseconds with hundreds of requests under way, during which no step is
planned: that waits until the engine is idle. Code that was dropped comes back from its file by itself when it is called
after all. Refuses to know: whose memory it is.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

MADV_DONTNEED = 4  # for code, which is never written: drop it from this process, not from the system's cache
MIN_MAPPING_BYTES = 1 << 20  # of a mapping worth asking about
MAX_NEW_OBJECTS = 1_000_000  # objects more than when last looked before cycles are looked for at work: a leak, then
IDLE_NEW_OBJECTS = 10_000  # as many more, and an idle engine looks


def shed() -> None:
    """Once, when everything is loaded."""
    settle()
    give_back()


def give_back() -> None:
    """Free memory and code, to the system; on Linux only."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # glibc's
        libc.malloc_trim(0)
    for start, end in _code():
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_DONTNEED)


def settle() -> None:
    """What lives now is taken to live for ever and never looked at again; the rest when idle."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(MAX_NEW_OBJECTS)


def tidy() -> None:
    """For an idle moment."""
    if gc.get_count()[0] > IDLE_NEW_OBJECTS:
        gc.collect()


class _Calm:
    """While an engine works in another program's process, whose own collector settings come back with the last
    to leave."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._usual = gc.get_threshold()

    def __enter__(self) -> None:
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                self._usual = gc.get_threshold()
                if 0 < self._usual[0] < MAX_NEW_OBJECTS:
                    gc.set_threshold(MAX_NEW_OBJECTS)

    def __exit__(self, *exc: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                gc.set_threshold(*self._usual)


calm = _Calm()


def _code() -> Iterator[tuple[int, int]]:
    """Mappings of files that may be run and not written."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:  # not known; then the code stays
        return
    for line in maps.splitlines():
        addresses, rights, *_, name = line.split(maxsplit=5) if line.count("/") else (line, "", "")
        if rights == "r-xp" and name.startswith("/"):
            start, end = (int(part, 16) for part in addresses.split("-"))
            if end - start >= MIN_MAPPING_BYTES:
                yield start, end
