"""`quire serve` itself, in a process of its own, for tests that kill, stop and drain it."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

HEARTBEAT = 2.0


class Running:
    """`quire serve` in a directory of its own for temporary files, so that whatever it leaves behind is found."""

    def __init__(self, *flags: str, await_welcome: bool = True):
        self.directory = Path(tempfile.mkdtemp(prefix="quire-test-"))
        self.log = self.directory / "log"
        command = [
            sys.executable, "-m", "quire", "serve", "smollm2-135m", "--port", "0", "--kv-memory", "256M",
            "--threads", "1", "--max-model-len", "1024", "--served-model-name", "faulty",
            "--heartbeat", str(HEARTBEAT), *flags,
        ]  # fmt: skip
        source = str(Path(__file__).parents[2] / "src")
        env = {**os.environ, "TMPDIR": str(self.directory), "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=env)
        self.url, self.admin = self._await_welcome() if await_welcome else ("", "")
        self.http = httpx.Client(base_url=self.url, timeout=60)

    def _await_welcome(self) -> tuple[str, str]:
        def welcome() -> str | None:
            assert self.process.poll() is None, self.log.read_text()
            return next((line for line in self.log.read_text().splitlines() if line.startswith("Quire serves")), None)

        line = wait_for(welcome, 120)
        return line.split(" at ")[1].split()[0], line.split("admin: ")[1].split(";")[0]

    @property
    def engine_pid(self) -> int:
        [replica] = httpx.get(f"{self.admin}/v1/replicas", timeout=60).json()["data"]
        return int(replica["pid"])

    @property
    def engine(self) -> psutil.Process:
        return psutil.Process(self.engine_pid)

    def ready(self) -> bool:
        return self.http.get("/ready").status_code == 200

    def metric(self, name: str) -> float:
        families = text_string_to_metric_families(httpx.get(f"{self.admin}/metrics", timeout=60).text)
        return next(s.value for family in families for s in family.samples if s.name == name)

    def idle(self) -> bool:
        names = ("quire_requests_inflight", "quire_num_requests_running", "quire_kv_cache_usage_perc")
        return self.ready() and not any(map(self.metric, names))

    def left_behind(self) -> list[str]:
        """Files and sockets beside the log."""
        return [str(path) for path in self.directory.rglob("*") if path != self.log]

    def close(self) -> None:
        self.http.close()
        with contextlib.suppress(psutil.NoSuchProcess):
            family = [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]
            for process in family:
                process.kill()
        self.process.wait()
        shutil.rmtree(self.directory)


def wait_for(what: Any, seconds: float) -> Any:
    end = time.monotonic() + seconds
    while not (value := what()):
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.05)
    return value
