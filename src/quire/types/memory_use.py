"""What the system says of this process."""

from __future__ import annotations

import ctypes
import os
import struct
import sys

TASK_INFO, TASK_BYTES = 4, 96  # PROC_PIDTASKINFO and its struct proc_taskinfo, which begins: virtual, resident


def resident_bytes() -> int:
    """Memory resident now; 0 where the system does not say."""
    if sys.platform == "darwin":
        return _resident_on_a_mac()
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def _resident_on_a_mac() -> int:
    info = ctypes.create_string_buffer(TASK_BYTES)
    try:
        found = ctypes.CDLL(None).proc_pidinfo(os.getpid(), TASK_INFO, ctypes.c_uint64(0), info, TASK_BYTES)
    except (OSError, AttributeError):
        return 0
    return int(struct.unpack_from("=QQ", info)[1]) if found == TASK_BYTES else 0
