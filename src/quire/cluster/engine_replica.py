"""The actor that hosts one engine process: what Ray sees of a replica.

It starts the process, passes on whether it is well, and ends when the process does, so that Ray starts another. Where
the process was told to make way for another, that is started here, and for Ray nothing happened. It is handed to Ray as
a deployment's class (`cluster/ray_host.py`). Refuses to know: requests, Ray's API.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import subprocess
import sys
import threading
import time
from math import inf
from typing import Any

import msgspec
from msgspec.structs import replace

from quire.types.exit_codes import exit_reason
from quire.types.membership import RESTART_EXIT_CODE, ReplicaMembership

log = logging.getLogger(__name__)

HEARTBEATS_READ = 4096  # bytes of heartbeats read at a time


class EngineReplica:
    def __init__(self, number: int, hub: str, member: bytes, options: dict[str, Any], hang_timeout: float):
        """Returns when the engine is ready; `member`: a ReplicaMembership in JSON, the same for all replicas."""
        self._hang_timeout = hang_timeout
        said = (hub, str(os.getpid()), json.dumps(options))
        self._command = [sys.executable, "-P", "-m", "quire.engine.engine_process", *said]
        self._member = replace(msgspec.json.decode(member, type=ReplicaMembership), number=number)
        self._start()
        threading.Thread(target=self._listen, name="quire-heartbeats", daemon=True).start()

    def _start(self) -> None:
        self._heard = inf  # while it starts, its silence means nothing
        self._heartbeats, theirs = os.pipe()
        member = replace(self._member, identity=secrets.token_hex(8), heartbeat_fd=theirs)
        # Ray tells its own workers to compute with as many threads as they have CPUs of its book-keeping.
        environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, pass_fds=[theirs], env=environment)
        os.close(theirs)
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(member))
        self._process.stdin.close()
        if not os.read(self._heartbeats, HEARTBEATS_READ):
            raise RuntimeError(f"the engine process ended with {exit_reason(self._process.wait())} before it was ready")
        self._heard = time.monotonic()

    def _listen(self) -> None:
        try:
            while self._follow() == RESTART_EXIT_CODE:
                os.close(self._heartbeats)
                self._start()
            log.warning("the engine process ended with %s", exit_reason(self._process.returncode))
        finally:
            os._exit(1)  # Ray starts another replica

    def _follow(self) -> int:
        """The exit code of the process, once it has ended."""
        while os.read(self._heartbeats, HEARTBEATS_READ):
            self._heard = time.monotonic()
        self._heard = inf
        return self._process.wait()

    def check_health(self) -> None:
        """Called by Ray; raises where the engine hangs."""
        silent = time.monotonic() - self._heard
        if 0 < self._hang_timeout < silent:
            raise RuntimeError(f"the engine gave no sign of life for {silent:.0f} s")
