"""One API worker as the main process has it: its process, the ways to it, what it said last.

Refuses to know: other workers, when one is replaced.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import msgspec

from quire.serve.core.shared_counts import SharedCounts
from quire.serve.workers import connections, control
from quire.types.errors import EngineDeadError, QuireError, from_wire
from quire.types.exit_codes import exit_reason

MODULE = "quire.serve.workers.api_worker"


class WorkerProcess:
    """`counts`: this one's row in them says how many of its connections have ended, and when it last gave a sign of
    life. `on_report` is given what it reports."""

    def __init__(
        self,
        number: int,
        directory: Path,
        counts: SharedCounts,
        start: control.Start,
        on_report: Callable[[WorkerProcess, control.Report], None],
    ):
        self.number = number
        self.name = f"API worker {number}"
        self.began = time.monotonic()
        self.up: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.gone = asyncio.Event()
        self.requests: set[str] = set()  # that it works on, as far as it has said
        self.preparing = self.memory = 0
        self._why = ""  # it was ended
        self._counts = counts
        self._start = start
        self._given = 0  # connections
        self._on_report = on_report
        self._asked: dict[int, asyncio.Future[None]] = {}
        self._channel = control.Channel[control.FromWorker](control.FromWorker, self._hear, self._lost)
        with ExitStack() as theirs:
            self._control, control_end = socket.socketpair()
            self._way, way_end = socket.socketpair()
            ends = [theirs.enter_context(end).fileno() for end in (control_end, way_end)]
            command = [sys.executable, "-P", "-m", MODULE, *map(str, ends), str(os.getpid()), str(directory)]
            try:
                self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=ends)
            except OSError as error:  # for want of memory, processes or descriptors
                self._control.close()
                self._way.close()
                raise EngineDeadError(f"no API worker could be started: {error}") from error
        self.pid = self._process.pid
        self._way.setblocking(False)

    async def connect(self) -> None:
        await self._channel.open(self._control)
        self.send(self._start)

    # ---- what it is told ------------------------------------------------------------------------------------

    def send(self, message: msgspec.Struct) -> None:
        self._channel.send(message)

    @property
    def ready(self) -> bool:
        return self.up.done() and not self.up.cancelled() and self.up.exception() is None and not self.gone.is_set()

    @property
    def open(self) -> int:
        """Connections that it has, those on their way to it included."""
        return self._given - int(self._counts.of_row(self.number, "ended"))

    def give(self, connection: socket.socket, word: bytes) -> bool:
        given = connections.give(self._way, connection, word)
        self._given += given
        return given

    def ask(self, number: int) -> asyncio.Future[None]:
        """Done when it has reported all until now, or is gone."""
        told = self._asked[number] = asyncio.get_running_loop().create_future()
        self.send(control.Tell(number))
        return told

    # ---- what it says ---------------------------------------------------------------------------------------

    def _hear(self, message: control.FromWorker) -> None:
        match message:
            case control.Up():
                self._be_up(None)
            case control.Unable(kind, words):
                self._be_up(from_wire(kind, words))
            case control.Report():
                self._on_report(self, message)
                if (told := self._asked.pop(message.number, None)) is not None and not told.done():
                    told.set_result(None)

    def _be_up(self, error: QuireError | None) -> None:
        if self.up.done():
            return
        if error is None:
            self.up.set_result(None)
        else:
            self.up.set_exception(error)
            self.up.exception()  # whoever waits is told; the log is, where nobody does

    def _lost(self) -> None:
        self._be_up(EngineDeadError(f"{self.name} ended before it was ready"))
        for told in self._asked.values():
            if not told.done():
                told.set_result(None)
        self._asked.clear()
        self.gone.set()

    # ---- its end --------------------------------------------------------------------------------------------

    def kill(self, why: str = "") -> None:
        self._why = self._why or why
        self._process.kill()

    async def ended(self) -> str:
        """Wait until it has gone, by itself or because it closed its end; how it ended."""
        await self.gone.wait()
        if self._process.poll() is None:
            try:
                await asyncio.to_thread(self._process.wait, 1.0)  # it may be about to
            except subprocess.TimeoutExpired:
                self._process.kill()
        code = await asyncio.to_thread(self._process.wait)
        self._channel.close()
        self._way.close()
        return self._why or exit_reason(code)
