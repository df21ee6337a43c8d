"""What control groups leave this process of the machine's memory and cores: the limits of a container, or of a service.

Both versions; of a group and those above it the tightest limit holds. Refuses to know: systems without them.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")  # lines of number:controllers:path; version 2 names no controllers
# Beyond `high` nobody is killed, but everything is reclaimed that can be, so that nothing goes on at speed.
LIMITS = ("memory.max", "memory.high", "memory.limit_in_bytes")
RECLAIMABLE = ("inactive_file", "active_file")  # in memory.stat; version 1 has them with `total_` for groups below too


def available_bytes() -> float:
    """Memory that this process may still take, with what the system can reclaim; without bound where none is set."""
    return min((_available(group) for group in _groups("memory")), default=inf)


def cpu_limit() -> float:
    """CPUs that this process may use, in part too; without bound where none is set."""
    return min((_cpus(group) for group in _groups("cpu")), default=inf)


def _groups(controller: str) -> Iterator[Path]:
    """Folders of this process's groups; those that a container does not see are left out by who reads them."""
    try:
        lines = OWN.read_text(encoding="utf-8").splitlines()
    except OSError:  # no Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = ROOT / controller if controllers else ROOT
        if not mount.exists():  # several in one, and no links to it
            mount = ROOT / controllers
        group = mount / path.lstrip("/")
        yield from (each for each in (group, *group.parents) if each.is_relative_to(mount))


def _available(group: Path) -> float:
    limits = [limit for name in LIMITS for limit in _numbers(group / name)]
    used = _numbers(group / "memory.current") or _numbers(group / "memory.usage_in_bytes")
    if not limits or not used:
        return inf
    stat = dict(line.split() for line in _read(group / "memory.stat").splitlines())
    limits.append(float(stat.get("hierarchical_memory_limit", inf)))  # of groups that a container may not see
    cached = sum(int(stat.get(f"total_{name}", stat.get(name, 0))) for name in RECLAIMABLE)
    return max(0.0, min(limits) - used[0] + cached)


def _cpus(group: Path) -> float:
    if len(both := _numbers(group / "cpu.max")) == 2:
        return both[0] / both[1]
    quota, period = _numbers(group / "cpu.cfs_quota_us"), _numbers(group / "cpu.cfs_period_us")
    return quota[0] / period[0] if quota and period and quota[0] > 0 else inf


def _numbers(file: Path) -> list[float]:
    """Those that a file holds; none where there is no such file."""
    return [inf if word == "max" else float(word) for word in _read(file).split()]


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii")
    except OSError:
        return ""
