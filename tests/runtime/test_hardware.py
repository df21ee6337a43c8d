"""What the machine says of itself, on systems of other kinds too."""

import os
import sys
from pathlib import Path

from quire.runtime import hardware
from quire.types import cgroups
from quire.types import memory_use as process

VM_STAT = """Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                               10000.
Pages active:                            300000.
Pages inactive:                           20000.
Pages speculative:                         3000.
Pages throttled:                              0.
Pages wired down:                        100000.
Pages purgeable:                            400.
"Translation faults":                 123456789.
"""


def no_proc(monkeypatch, said):
    def closed(path, *args, **kwargs):
        raise FileNotFoundError(path)

    monkeypatch.setattr(cgroups, "OWN", Path("no/such/file"))
    for module in (hardware, process):
        monkeypatch.setattr(module, "open", closed, raising=False)
        monkeypatch.setattr(module, "command_output", lambda *command: said.get(command[0], ""))


def test_a_mac(monkeypatch):
    no_proc(monkeypatch, {"vm_stat": VM_STAT, "sysctl": "Apple M2\n"})
    found = hardware.probe("cpu")
    assert (found.name, found.memory) == ("CPU (Apple M2)", 33400 * 16384)


def test_a_system_that_says_nothing(monkeypatch):
    no_proc(monkeypatch, {})
    found = hardware.probe("cpu")
    assert found.memory == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    assert os.uname().machine in found.name


def test_resident_memory_without_a_library_that_tells(monkeypatch):
    assert process.resident_bytes() > 1 << 20
    if sys.platform != "darwin":
        assert process._resident_on_a_mac(os.getpid()) == 0
