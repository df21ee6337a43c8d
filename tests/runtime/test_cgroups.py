"""Limits of control groups, of both versions: what a container may take is less than what its machine has."""

from __future__ import annotations

from math import inf

import pytest

from quire.runtime import hardware
from quire.simulation import fleet
from quire.simulation.devices import load_device
from quire.simulation.traces import Arrival
from quire.types import cgroups, memory_use
from quire.types.config import EngineOptions
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


def test_what_is_throttled_is_no_room(group):
    """Beyond `memory.high` everything is reclaimed, over and over."""
    group("0::/\n", memory_dot_high=f"{2 * GIB}\n", **limited("max", GIB, "max 100000"))
    assert cgroups.available_bytes() == 2 * GIB + 7
    group("0::/\n", memory_dot_high="max\n", **limited(3 * GIB, GIB, "max 100000"))
    assert cgroups.available_bytes() == 3 * GIB + 7


def test_limits_of_groups_that_a_container_does_not_see(group):
    """Version 1 tells of the tightest above; version 2 tells of none."""
    group(
        "4:memory:/kubepods/pod/box\n",
        memory__memory_dot_limit_in_bytes="9223372036854771712",
        memory__memory_dot_usage_in_bytes=f"{GIB}",
        memory__memory_dot_stat=f"hierarchical_memory_limit {3 * GIB}\ntotal_inactive_file 5\n",
    )
    assert cgroups.available_bytes() == 2 * GIB + 5


def test_controllers_mounted_together_without_links(group, tmp_path):
    group("4:cpu,cpuacct:/\n")
    folder = tmp_path / "cpu,cpuacct"
    folder.mkdir()
    (folder / "cpu.cfs_quota_us").write_text("150000\n")
    (folder / "cpu.cfs_period_us").write_text("100000\n")
    assert cgroups.cpu_limit() == 1.5


def test_paths_outside_of_what_is_seen_do_no_harm(group):
    """A process that was moved out of its container's groups, or whose group is gone."""
    for own in ("0::/../../elsewhere\n", "0::/box (deleted)\n", "0::/\n1:name=a:b:/c\n"):
        group(own, **limited(3 * GIB, 2 * GIB, "200000 100000"))
        assert cgroups.available_bytes() == 2 * GIB + 7 and cgroups.cpu_limit() == 2.0


def test_limits_are_told(group, monkeypatch):
    monkeypatch.setattr(memory_use, "_cores_to_run_on", lambda: 8)
    monkeypatch.setattr(memory_use, "_available_on_the_machine", lambda: 20 * GIB)
    assert memory_use.described_limits() == {"cores": "8", "memory": "20.0 GiB free"}
    group("0::/\n", **limited(3 * GIB, 2 * GIB, "150000 100000"))
    assert memory_use.described_limits() == {
        "cores": "1; a control group allows 1.5 of 8",
        "memory": "2.0 GiB free; a control group's limit, of 20.0 GiB",
    }


def test_processes_of_a_simulation_are_no_more_than_the_cores_there_are(group, monkeypatch):
    """A container of one core on a machine of many has its fleet in one process."""
    group("0::/\n", **limited("max", GIB, "100000 100000"))
    monkeypatch.setattr(memory_use, "_cores_to_run_on", lambda: 64)
    monkeypatch.setattr(fleet, "RemoteWorker", None)
    asked = [Arrival(0.0, 100, 2), Arrival(0.1, 100, 2)]
    result = fleet.simulate(fleet.Fleet(EngineOptions(), load_device("h200"), 2, "round-robin"), asked)
    assert len(result.rows["ttft"]) == 2
