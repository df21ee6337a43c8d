"""`quire serve` as a process of its own, which must leave nothing behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

MODEL = "smollm2-135m"


@contextmanager
def live_server(
    *flags: str, exit_code: int = 0, leaves_s: float = 20
) -> Iterator[tuple[str, str, subprocess.Popen[str]]]:
    """Where its API and its admin API listen, and its process, which ends with `exit_code`; all others that it started
    have ended `leaves_s` later."""
    model = [] if "--models" in flags else [MODEL]
    command = [sys.executable, "-m", "quire", "serve", *model, *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"RAY_DEDUP_LOGS": "0"})
    assert process.stdout is not None
    welcome = next((line for line in process.stdout if line.startswith("Quire serves")), "")
    found = re.search(r"at (http://\S+)  .*admin: (http://[^;]+);", welcome)
    assert found, "the server did not start"
    family = psutil.Process(process.pid).children(recursive=True)
    yield found[1], found[2], process
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == exit_code
    _, left = psutil.wait_procs(family, timeout=leaves_s)
    assert not left, "processes outlive the server"
