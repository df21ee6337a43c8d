"""What a server keeps in memory on the default model: weights once, in their quantised form, and the pages."""

import re
from pathlib import Path

import pytest

from quire.bench.offline import run_workload
from quire.bench.workloads import fixed
from quire.engine.link import ProcessLink
from quire.kernels.cpu import library
from quire.types.config import EngineOptions

LIMIT = 340_000_000  # bytes, beside the pages; of 450 for a server, whose other process takes about 100


def resident(pid: int) -> int:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_the_engine_process_is_small(default_model, capsys):
    if reason := library.available():
        pytest.skip(reason)
    link = ProcessLink(EngineOptions.of(kv_memory="64M"))
    try:
        stats = run_workload(link, fixed(64, 300, 4, vocab=link.info.vocab_size)).stats
        assert stats.pages_used + stats.pages_cached > 0.95 * stats.pages_total  # all touched, but for odd ends
        size = resident(link.pid)
    finally:
        link.close()
    with capsys.disabled():
        print(f"\nengine process: {size >> 20} MiB resident, of which pages {stats.kv_bytes >> 20} MiB")
    assert size <= LIMIT + stats.kv_bytes
