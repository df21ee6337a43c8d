"""Links: how a client reaches an engine. The same four calls whether it lives in this process or its own.

`LocalLink` holds the engine itself: receiving runs a step. `ProcessLink` starts `python -m quire.engine.process`
and speaks msgpack over a unix socket in a directory only this user can enter.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import deque
from pathlib import Path
from typing import Protocol

import msgspec

from quire.engine.core import EngineCore
from quire.engine.preparing import endings
from quire.types.config import EngineOptions
from quire.types.errors import EngineDeadError, QuireError, from_wire
from quire.types.request import FinishReason
from quire.types.wire import (
    MAX_FRAME,
    Abort,
    EngineInfo,
    Events,
    Failed,
    FinishAt,
    GetStats,
    Ready,
    Reset,
    Shutdown,
    Stats,
    Submit,
    ToClient,
    ToEngine,
)  # fmt: skip

START_TIMEOUT = 600.0
CLOSE_TIMEOUT = 10.0


class Link(Protocol):
    info: EngineInfo

    def send(self, message: ToEngine) -> None: ...

    def receive(self, timeout: float | None) -> list[ToClient]:
        """Messages from the engine; an empty list after `timeout` seconds (None: wait) or a wake()."""
        ...

    def wake(self) -> None:
        """Make a waiting receive() return; the one call allowed from another thread."""
        ...

    def close(self) -> None: ...


def handle(core: EngineCore, message: ToEngine) -> list[ToClient]:
    """Apply one client message to an engine; what both forms share."""
    if isinstance(message, Submit):
        try:
            core.submit(message.request)
        except QuireError as error:
            return [Events(endings(message.request, FinishReason.ERROR, error))]
    elif isinstance(message, Abort):
        return [Events(core.abort(message.request))]
    elif isinstance(message, FinishAt):
        return [Events(core.finish_at(message.request, message.branch, message.tokens))]
    elif isinstance(message, GetStats):
        return [Stats(core.stats())]
    elif isinstance(message, Reset):
        core.reset()
    return []


class LocalLink:
    """The engine in this process; the caller's receive() is what makes it step."""

    def __init__(self, core: EngineCore, info: EngineInfo):
        self.core = core
        self.info = info
        self._replies: deque[ToClient] = deque()
        self._woken = threading.Event()

    def send(self, message: ToEngine) -> None:
        self._replies.extend(handle(self.core, message))

    def receive(self, timeout: float | None) -> list[ToClient]:
        if not self._replies and not self.core.busy:
            self._woken.wait(timeout)
        self._woken.clear()
        replies, self._replies = list(self._replies), deque()
        if self.core.busy and (events := self.core.step()):
            replies.append(Events(events))
        return replies

    def wake(self) -> None:
        self._woken.set()

    def close(self) -> None:
        self.core.close()


class ProcessLink:
    """The engine in a process of its own."""

    def __init__(self, options: EngineOptions):
        import zmq

        self._directory = Path(tempfile.mkdtemp(prefix="quire-"))  # mode 0700
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME)
        address = f"ipc://{self._directory / 'engine.sock'}"
        self._socket.bind(address)
        self._wake_in, self._wake_out = os.pipe()
        os.set_blocking(self._wake_in, False)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake_in, zmq.POLLIN)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToClient)
        command = [sys.executable, "-m", "quire.engine.process", address, json.dumps(options.flat())]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        self.pid = self._process.pid
        self.info = self._await_ready()

    def _await_ready(self) -> EngineInfo:
        try:
            for message in self.receive(START_TIMEOUT):
                if isinstance(message, Ready):
                    return message.info
            raise EngineDeadError(f"the engine process was not ready within {START_TIMEOUT:.0f} s")
        except BaseException:
            self.close()
            raise

    def send(self, message: ToEngine) -> None:
        import zmq

        try:
            self._socket.send(self._encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again:  # nobody is connected: queues have no limit of their own
            raise EngineDeadError("the engine process is gone") from None

    def receive(self, timeout: float | None) -> list[ToClient]:
        import zmq

        waited = 0.0
        while True:
            slice_ = 0.5 if timeout is None else min(0.5, timeout - waited)
            ready = dict(self._poller.poll(int(max(0.0, slice_) * 1000)))
            if ready:
                break
            waited += slice_
            if self._process.poll() is not None:
                raise EngineDeadError(f"the engine process ended with exit code {self._process.returncode}")
            if timeout is not None and waited >= timeout:
                return []
        if self._wake_in in ready:
            os.read(self._wake_in, 4096)
        messages: list[ToClient] = []
        while self._socket.poll(0):
            message = self._decoder.decode(self._socket.recv(zmq.NOBLOCK))
            if isinstance(message, Failed):
                raise from_wire(message.kind, message.message)
            messages.append(message)
        return messages

    def wake(self) -> None:
        os.write(self._wake_out, b"w")

    def close(self) -> None:
        if self._process.poll() is None:
            try:
                self.send(Shutdown())
                self._process.wait(CLOSE_TIMEOUT)
            except (EngineDeadError, subprocess.TimeoutExpired):
                self._process.kill()
                self._process.wait()
        self._socket.close()
        self._context.term()
        os.close(self._wake_in)
        os.close(self._wake_out)
        shutil.rmtree(self._directory, ignore_errors=True)


def open_link(options: EngineOptions, *, process: bool, progress: bool = False) -> Link:
    """An engine in this process, or in one of its own."""
    if process:
        return ProcessLink(options)
    from quire.engine.build import build_engine

    return LocalLink(*build_engine(options, progress=progress))
