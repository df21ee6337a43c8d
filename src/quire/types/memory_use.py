"""What the system says of its memory and cores, and of this process's."""

from __future__ import annotations

import ctypes
import os
import re
import struct
import subprocess
import sys

from quire.types import cgroups

GIB = 1 << 30
TASK_INFO, TASK_BYTES = 4, 96  # PROC_PIDTASKINFO and its struct proc_taskinfo, which begins: virtual, resident


def resident_bytes(pid: int | None = None) -> int:
    """Memory resident now, of this process unless told; 0 where the system does not say."""
    pid = pid or os.getpid()
    if sys.platform == "darwin":
        return _resident_on_a_mac(pid)
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def _resident_on_a_mac(pid: int) -> int:
    info = ctypes.create_string_buffer(TASK_BYTES)
    try:
        found = ctypes.CDLL(None).proc_pidinfo(pid, TASK_INFO, ctypes.c_uint64(0), info, TASK_BYTES)
    except (OSError, AttributeError):
        return 0
    return int(struct.unpack_from("=QQ", info)[1]) if found == TASK_BYTES else 0


def available_bytes() -> int:
    """Memory that can be had without swapping, within the limits of a container; half of it all where the system does
    not say."""
    return int(min(_available_on_the_machine(), cgroups.available_bytes()))


def usable_cores() -> int:
    """Those that this process may run on, within the limits of a container."""
    return max(1, int(min(_cores_to_run_on(), cgroups.cpu_limit())))


def described_limits() -> dict[str, str]:
    """Cores and memory in words, and where a container has less of them than its machine."""
    cores, limit = _cores_to_run_on(), cgroups.cpu_limit()
    free, left = _available_on_the_machine(), cgroups.available_bytes()
    allowed = f"; a control group allows {limit:g} of {cores}" if limit < cores else ""
    beside = f"; a control group's limit, of {free / GIB:.1f} GiB" if left < free else ""
    return {"cores": f"{usable_cores()}{allowed}", "memory": f"{min(free, left) / GIB:.1f} GiB free{beside}"}


def _cores_to_run_on() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _available_on_the_machine() -> int:
    try:
        with open("/proc/meminfo", encoding="ascii") as info:
            for line in info:
                if line.startswith("MemAvailable"):
                    return int(line.split()[1]) * 1024
    except OSError:  # no Linux
        if said := command_output("vm_stat"):
            return reclaimable(said)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def reclaimable(vm_stat: str) -> int:
    """Bytes a Mac has free or can have back at once, by its `vm_stat`."""
    size = re.search(r"page size of (\d+) bytes", vm_stat)
    pages = re.findall(r"^Pages (?:free|inactive|speculative|purgeable): +(\d+)", vm_stat, re.MULTILINE)
    return int(size[1]) * sum(map(int, pages)) if size else 0


def command_output(*command: str) -> str:
    """What a command of the system prints; nothing where there is no such command."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
