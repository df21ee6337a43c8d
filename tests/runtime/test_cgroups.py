"""Limits of control groups, of both versions: what a container may take is less than what its machine has."""

from __future__ import annotations

from math import inf

import pytest

from quire.runtime import hardware
from quire.types import cgroups
from quire.types.memory_use import available_bytes, usable_cores

GIB = 1 << 30
STAT = f"anon 5\ninactive_file {GIB}\nactive_file 7\n"


@pytest.fixture
def group(tmp_path, monkeypatch):
    """Writes files of a group, and says that this process is in it."""

    def write(own, **files):
        (tmp_path / "own").write_text(own)
        for name, text in files.items():
            file = tmp_path / name.replace("__", "/").replace("_dot_", ".")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)

    monkeypatch.setattr(cgroups, "ROOT", tmp_path)
    monkeypatch.setattr(cgroups, "OWN", tmp_path / "own")
    return write


def limited(limit, used, cpu, *, at=""):
    return {
        f"{at}memory_dot_max": f"{limit}\n", f"{at}memory_dot_current": f"{used}\n", f"{at}memory_dot_stat": STAT,
        f"{at}cpu_dot_max": cpu,
    }  # fmt: skip


def test_no_groups_and_groups_without_limits(group):
    assert (cgroups.available_bytes(), cgroups.cpu_limit()) == (inf, inf)  # no such file: no Linux
    group("0::/\n")
    assert (cgroups.available_bytes(), cgroups.cpu_limit()) == (inf, inf)
    group("0::/\n", **limited("max", 5 * GIB, "max 100000"))
    assert (cgroups.available_bytes(), cgroups.cpu_limit()) == (inf, inf)


def test_the_limits_of_a_container_are_the_machines(group):
    group("0::/\n", **limited(3 * GIB, 2 * GIB, "50000 100000"))
    assert available_bytes() == 2 * GIB + 7 and usable_cores() == 1
    found = hardware.probe("cpu")
    assert (found.memory, found.cores) == (2 * GIB + 7, 1)
    group("0::/\n", **limited(GIB, 3 * GIB, "max 100000"))
    assert available_bytes() == 0


def test_the_tightest_of_a_group_and_those_above_it_holds(group):
    group("0::/pod/box\n", **limited(9 * GIB, GIB, "400000 100000", at="pod__box__"))
    group("0::/pod/box\n", **limited(4 * GIB, 3 * GIB, "150000 100000", at="pod__"))
    assert cgroups.available_bytes() == 2 * GIB + 7 and cgroups.cpu_limit() == 1.5
    group("0::/not/seen/from/here\n", **limited(2 * GIB, 2 * GIB, "max 100000"))
    assert cgroups.available_bytes() == GIB + 7


def test_version_1(group):
    group(
        "12:cpu,cpuacct:/box\n4:memory:/box\n1:name=systemd:/\n0::/\n",
        memory__box__memory_dot_limit_in_bytes=f"{2 * GIB}",
        memory__box__memory_dot_usage_in_bytes=f"{GIB}",
        memory__box__memory_dot_stat="inactive_file 1\ntotal_inactive_file 5\ntotal_active_file 6\n",
        memory__memory_dot_limit_in_bytes="9223372036854771712",
        memory__memory_dot_usage_in_bytes="8",
        cpu__cpu_dot_cfs_quota_us="-1",
        cpu__cpu_dot_cfs_period_us="100000",
        cpu__box__cpu_dot_cfs_quota_us="250000",
        cpu__box__cpu_dot_cfs_period_us="100000",
    )
    assert cgroups.available_bytes() == GIB + 11 and cgroups.cpu_limit() == 2.5
