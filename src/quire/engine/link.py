"""Links: how a client reaches an engine. The same four calls whether it lives in this process or its own.

`LocalLink` holds the engine itself: receiving runs a step. `ProcessLink` starts `python -m quire.engine.engine_process`
and speaks msgpack over a unix socket in a directory only this user can enter, which is gone as soon as both ends hold
the connection: whatever ends either of them later leaves no file behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from pathlib import Path
from typing import Protocol

from msgspec.structs import replace

from quire.engine.core import EngineCore
from quire.engine.grammar_queue import endings
from quire.engine.interrupts import uninterrupted
from quire.engine.pair_link import POLL_INTERVAL_S, PairLink
from quire.engine.weight_holder import WeightHolder
from quire.types.config import EngineOptions
from quire.types.errors import EngineDeadError, QuireError, to_wire
from quire.types.exit_codes import exit_reason
from quire.types.messages import (
    Abort,
    Adapted,
    Answer,
    Cache,
    Cached,
    EngineInfo,
    Events,
    FinishAt,
    GetStats,
    GetTimelines,
    GetView,
    LoadAdapter,
    Power,
    Powered,
    Query,
    Question,
    Ready,
    Refused,
    Reply,
    Reset,
    Shutdown,
    Stats,
    Submit,
    Timelines,
    ToClient,
    ToEngine,
    UnloadAdapter,
    View,
    received,
    wall_clock,
)  # fmt: skip
from quire.types.request import FinishReason

START_TIMEOUT_S = 600.0
CLOSE_TIMEOUT_S = 5.0
SPARE_TIMEOUT_S = 60.0  # that a spare has to take its options: its imports may not be done
SERVED_NAME = "served_name"  # beside the options of an engine process: what its lines in the log call the model


class Link(Protocol):
    info: EngineInfo

    @property
    def heard(self) -> float:
        """When the engine last gave a sign of life, on the monotonic clock."""
        ...

    def send(self, *messages: ToEngine) -> None: ...

    def receive(self, timeout: float | None) -> list[ToClient]:
        """Messages from the engine; an empty list after `timeout` seconds (None: wait) or a wake()."""
        ...

    def wake(self) -> None:
        """Make a waiting receive() return; the one call allowed from another thread."""
        ...

    def close(self, *, force: bool = False) -> None:
        """End the engine; with `force`, without asking it."""
        ...


def handle(core: EngineCore, message: ToEngine) -> list[ToClient]:
    """Apply one client message to an engine; what both forms share."""
    if isinstance(message, Submit):
        try:
            core.submit(received(message.request))
        except QuireError as error:
            return [Events(endings(message.request, FinishReason.ERROR, error))]
    elif isinstance(message, Abort):
        return [Events(core.abort(message.request))]
    elif isinstance(message, FinishAt):
        return [Events(core.finish_at(message.request, message.branch, message.tokens))]
    elif isinstance(message, Query):
        try:
            return [Reply(message.id, answer(core, message.question))]
        except QuireError as error:
            return [Reply(message.id, Refused(*to_wire(error)))]
    elif isinstance(message, Reset):
        core.reset()
    return []


def answer(core: EngineCore, question: Question) -> Answer:
    """Do what a query asks; a QuireError says why not."""
    match question:
        case GetStats():
            return Stats(core.stats())
        case GetView():
            return View(replace(core.view(), now=time.time()))
        case GetTimelines(request):
            return Timelines([wall_clock(timeline) for timeline in core.timelines(request)])
        case Power(asleep, level):
            core.power(asleep=asleep, level=level)
            return Powered()
        case Cache(order):
            return Cached(*core.cache(order))
        case LoadAdapter(name, path):
            core.load_adapter(name, path)
            return Adapted(core.adapters.list())
        case UnloadAdapter(name):
            core.unload_adapter(name)
            return Adapted(core.adapters.list())


class LentLink:
    """Another's link, for a while: whoever borrows it cannot close it."""

    def __init__(self, link: Link):
        self._link = link
        self.info = link.info
        self.send, self.receive, self.wake = link.send, link.receive, link.wake

    @property
    def heard(self) -> float:
        return self._link.heard

    def close(self, *, force: bool = False) -> None:
        """Nothing: the engine stays its owner's."""


class LocalLink:
    """The engine in this process; the caller's receive() is what makes it step."""

    def __init__(self, core: EngineCore, info: EngineInfo):
        self.core = core
        self.info = info
        self.heard = time.monotonic()
        self._replies: deque[ToClient] = deque()
        self._woken = threading.Event()

    def send(self, *messages: ToEngine) -> None:
        with uninterrupted():
            for message in messages:
                self._replies.extend(handle(self.core, message))
                if self.core.scheduler.first_batch_waits and (events := self.core.step()):
                    self._replies.append(Events(events))
            self.core.settle()

    def receive(self, timeout: float | None) -> list[ToClient]:
        if not self._replies and not self.core.busy:
            if timeout is None:
                raise EngineDeadError("the engine is idle and nothing is under way: what is waited for was lost")
            self._woken.wait(timeout)
        self._woken.clear()
        with uninterrupted():
            if self.core.busy and (events := self.core.step()):
                self._replies.append(Events(events))
            self.core.settle()  # who has all answers may not ask again for long
        self.heard = time.monotonic()
        replies, self._replies = list(self._replies), deque()
        return replies

    def wake(self) -> None:
        self._woken.set()

    def close(self, *, force: bool = False) -> None:
        self.core.close()


class ProcessLink(PairLink):
    """The engine in a process of its own. `stop`, once set, ends a start that is under way. Without options it is a
    spare: a process that has imported all that engines need, and waits to be told to `start` one. `holder`: of weights
    that outlast it."""

    def __init__(
        self,
        options: EngineOptions | None,
        stop: threading.Event | None = None,
        holder: WeightHolder | None = None,
        name: str = "",
    ):
        self._directory = Path(tempfile.mkdtemp(prefix="quire-"))  # mode 0700
        super().__init__(self._directory / "engine.sock")
        self._death = -1
        self._spare = options is None
        try:
            self._process = _start_process(self.address, holder)
        except OSError as error:  # for want of memory, processes or descriptors
            self._release()
            raise EngineDeadError(f"no engine process could be started: {error}") from error
        self.pid = self._process.pid
        self._death = process_descriptor(self.pid)
        if self._death >= 0:
            self._watch(self._death)
        self.heard = time.monotonic()
        if options is not None:
            self.start(options, stop, name)

    @property
    def running(self) -> bool:
        """Whether its process is there."""
        return self._process.poll() is None

    def start(self, options: EngineOptions, stop: threading.Event | None = None, name: str = "") -> None:
        """Returns when the engine is ready. `name`: what its model is called, for the log; empty: there is one."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # one that is gone is found to be, below
            self._process.stdin.write(json.dumps(options.flat() | {SERVED_NAME: name}).encode())
            self._process.stdin.close()
        self.heard = time.monotonic()
        self.info = self._await_ready(stop)
        shutil.rmtree(self._directory, ignore_errors=True)

    def _await_ready(self, stop: threading.Event | None) -> EngineInfo:
        try:
            started = time.monotonic()
            while time.monotonic() - started < START_TIMEOUT_S:
                if stop is not None and stop.is_set():
                    self._process.kill()
                    raise EngineDeadError("the engine was told to stop before it was ready")
                for message in self.receive(POLL_INTERVAL_S):
                    if isinstance(message, Ready):
                        return message.info
                if self._spare and self.heard <= started and time.monotonic() - started > SPARE_TIMEOUT_S:
                    raise EngineDeadError(f"the spare process did not take its options within {SPARE_TIMEOUT_S:g} s")
            raise EngineDeadError(f"the engine process was not ready within {START_TIMEOUT_S:.0f} s")
        except BaseException:
            self.close()
            raise

    def _ended(self) -> str:
        ended = self._process.poll()
        return "" if ended is None else f"the engine process ended with {exit_reason(ended)}"

    def close(self, *, force: bool = False) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()  # a spare ends with it
        if self.running:
            try:
                if force:
                    raise EngineDeadError("it would not listen")
                self.send(Shutdown())
                self._process.wait(CLOSE_TIMEOUT_S)
            except (EngineDeadError, subprocess.TimeoutExpired):
                self._process.kill()
                self._process.wait()
        self._release()

    def _release(self) -> None:
        super()._release()
        if self._death >= 0:
            os.close(self._death)
        shutil.rmtree(self._directory, ignore_errors=True)


def _start_process(address: str, holder: WeightHolder | None) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-P", "-m", "quire.engine.engine_process", address, str(os.getpid())]
    if holder is None:
        return subprocess.Popen(command, stdin=subprocess.PIPE)
    with holder.connect() as weights:
        command += ["", str(weights.fileno())]
        return subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[weights.fileno()])


def process_descriptor(pid: int) -> int:
    """Readable once a child has ended; -1 where the system has none such, and it is looked for now and then."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return -1


def open_link(
    options: EngineOptions,
    *,
    process: bool,
    progress: bool = False,
    stop: threading.Event | None = None,
    holder: WeightHolder | None = None,
    name: str = "",
) -> Link:
    """An engine in this process, or in one of its own."""
    if process:
        return ProcessLink(options, stop, holder, name)
    from quire.engine.build import build_engine

    return LocalLink(*build_engine(options, progress=progress))
