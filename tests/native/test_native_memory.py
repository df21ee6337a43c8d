"""What a server keeps in memory on the default model: weights once, in their quantised form, and the pages."""

import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from quire.kernels.cpu import shared_object as library

LIMIT = 450_000_000  # bytes of all processes of a server, beside the pages and what grammars need
GRAMMARS = 110_000_000  # the vocabulary in the engine, and the process that tries grammars: ready for the first one


def resident(pid: int) -> int:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


@pytest.fixture
def server(default_model) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-m", "quire", "serve", str(default_model.path), "--port", "0", "--kv-memory", "64M"]
    command.append("--no-spare-engine")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            yield process, next(found[0] for line in process.stdout if (found := re.search(r"http://[\w.:]+", line)))
        finally:
            process.terminate()


def gauge(url: str, name: str) -> float:
    found = re.search(rf"^{name}(?:{{.*}})? (\S+)$", httpx.get(f"{url}/metrics").text, re.MULTILINE)
    assert found is not None, name
    return float(found[1])


def fill(url: str) -> None:
    """Other prompts until the pool keeps no more of them: every page has been written."""
    chance, cached = random.Random(7), -1.0
    model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]

    def ask(number: int) -> None:
        words = " ".join(str(chance.randrange(10**6)) for _ in range(100))
        body = {"model": model, "prompt": f"{number} {words}", "max_tokens": 4}
        httpx.post(f"{url}/v1/completions", json=body, timeout=600).raise_for_status()

    with ThreadPoolExecutor(8) as pool:
        while (now := gauge(url, "quire_kv_pages_cached")) > cached:
            cached = now
            list(pool.map(ask, range(8)))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_a_server_is_small(server, capsys):
    if reason := library.available():
        pytest.skip(reason)
    process, url = server
    fill(url)
    pages = int(gauge(url, "quire_kv_bytes"))
    api, engine = resident(process.pid), sum(map(resident, children(process.pid)))
    with capsys.disabled():
        print(f"\nAPI process {api >> 20} MiB, engine {engine >> 20} MiB, of which pages {pages >> 20} MiB")
    assert engine > pages > 60 << 20
    assert api + engine <= LIMIT + GRAMMARS + pages
