"""The engine client: asyncio over a link. A thread owns the link; events cross into the loop once a step.

Implements types.seams.EngineClient for one engine, in this process or its own. It also keeps that engine alive: an
engine that ends, or gives no sign of life for too long, is replaced, a few times. Whatever was under way ends with an
error at once; nothing is resumed.

    serving ──(link broke, or silence)──► everything open fails ──► back-off ──► new link ──► serving
                                                                        └──► too often: lost
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from quire.engine.link import Link, open_link
from quire.types.cache_control import CacheOrder, CacheReport
from quire.types.config import EngineOptions
from quire.types.errors import EngineDeadError, QuireError, from_wire
from quire.types.events import EngineStats, TokenEvent
from quire.types.messages import (
    Abort,
    Cache,
    Cached,
    Events,
    FinishAt,
    GetStats,
    GetTimelines,
    GetView,
    Power,
    Powered,
    Reset,
    Stats,
    Submit,
    Timelines,
    ToClient,
    ToEngine,
    View,
)
from quire.types.request import Request
from quire.types.timeline import Timeline
from quire.types.view import EngineView

log = logging.getLogger(__name__)

WINDOW = 600.0  # seconds over which restarts are counted
BACKOFF = 0.25  # seconds before the first restart; each further one waits twice as long
LOOK = 0.5  # seconds between looks at the clock while the engine is silent

# What callers are told; why it happened is in the log.
STOPPED = "the engine stopped; what it was working on is lost, and new requests must wait for its restart"
CLOSED = "the server is shutting down; try again later"


@dataclass(frozen=True)
class Care:
    """How an engine is looked after: when its silence means trouble, when death, and how often it is replaced."""

    heartbeat: float = 5.0
    hang_timeout: float = 0.0  # 0: silence is never death
    max_restarts: int = 0


class _Stream:
    """Events of one request, coalesced while the reader lags."""

    def __init__(self, branches: int):
        self.open = branches
        self.events: list[TokenEvent] = []
        self.ready = asyncio.Event()
        self.error: QuireError | None = None


class AsyncClient:
    """`reopen` makes a new link where the old one broke; without it, a broken link is the end."""

    def __init__(self, link: Link, care: Care | None = None, reopen: Callable[[threading.Event], Link] | None = None):
        self.info = link.info
        self.care = care or Care()
        self.restarts = 0
        self._link = link
        self._reopen = reopen
        self._loop = asyncio.get_running_loop()
        self._outbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
        self._streams: dict[str, _Stream] = {}
        self._stats: list[asyncio.Future[EngineStats]] = []
        self._asked: list[asyncio.Future[Any]] = []  # views and timelines, which come back in the order asked
        self._closing = threading.Event()
        self._dead = ""  # why there is no engine now, in words for callers
        self._lost: asyncio.Future[QuireError] = self._loop.create_future()
        self._thread = threading.Thread(target=self._supervise, args=(link,), name="quire-link", daemon=True)
        self._thread.start()

    @classmethod
    async def open(
        cls, options: EngineOptions, *, process: bool = True, progress: bool = False, care: Care | None = None
    ) -> AsyncClient:
        def reopen(stop: threading.Event) -> Link:
            return open_link(options, process=process, progress=progress, stop=stop)

        stop = threading.Event()
        try:
            link = await asyncio.to_thread(reopen, stop)
        except asyncio.CancelledError:
            stop.set()
            raise
        return cls(link, care, reopen if process else None)

    @property
    def alive(self) -> bool:
        return not self._dead

    @property
    def pid(self) -> int | None:
        """The engine's process, where it has one of its own."""
        return getattr(self._link, "pid", None)

    def trouble(self) -> str | None:
        """Why the engine could not answer now; None if it could."""
        if not self.alive:
            return self._dead
        silent = time.monotonic() - self._link.heard
        return f"the engine gave no sign of life for {silent:.1f} s" if silent > self.care.heartbeat else None

    async def lost(self) -> QuireError:
        """Wait until the engine is gone for good; returns why."""
        return await asyncio.shield(self._lost)

    async def submit(self, request: Request) -> AsyncIterator[list[TokenEvent]]:
        """Events until every branch finished; leaving the iteration early aborts the request."""
        self._require_alive()
        stream = self._streams[request.id] = _Stream(request.params.n)
        self._send(Submit(request))
        try:
            while stream.open:
                await stream.ready.wait()
                if stream.error:
                    raise stream.error
                stream.ready.clear()
                events, stream.events = stream.events, []
                stream.open -= sum(e.finish is not None for e in events)
                yield events
        finally:
            del self._streams[request.id]
            if stream.open and stream.error is None and self.alive:
                self._send(Abort(request.id))

    def abort(self, request_id: str) -> None:
        if self.alive:
            self._send(Abort(request_id))

    def finish_at(self, request_id: str, branch: int, tokens: int) -> None:
        if self.alive:
            self._send(FinishAt(request_id, branch, tokens))

    async def stats(self) -> EngineStats:
        self._require_alive()
        future: asyncio.Future[EngineStats] = self._loop.create_future()
        self._stats.append(future)
        self._send(GetStats())
        return await future

    async def view(self) -> EngineView:
        reply: View = await self._ask(GetView())
        return reply.view

    async def timelines(self, request_id: str) -> list[Timeline]:
        reply: Timelines = await self._ask(GetTimelines(request_id))
        return reply.timelines

    async def power(self, *, asleep: bool) -> None:
        """Free the device's memory until a request comes, or take it again now."""
        reply: Powered = await self._ask(Power(asleep))
        if reply.error or reply.message:
            raise from_wire(reply.error, reply.message)

    async def cache(self, order: CacheOrder) -> tuple[CacheReport, bytes]:
        """Look at the KV cache, or change it; of an export, the bundle too."""
        reply: Cached = await self._ask(Cache(order))
        if reply.report is None:
            raise from_wire(reply.error, reply.message)
        return reply.report, reply.data

    async def _ask(self, message: GetView | GetTimelines | Power | Cache) -> Any:
        self._require_alive()
        future: asyncio.Future[Any] = self._loop.create_future()
        self._asked.append(future)
        self._send(message)
        return await future

    def reset(self) -> None:
        self._send(Reset())

    async def close(self) -> None:
        """End the engine; what is still open ends with an error first."""
        if not self._closing.is_set():
            self._closing.set()
            self._fail(CLOSED)
            self._link.wake()
        await asyncio.to_thread(self._thread.join)

    def _require_alive(self) -> None:
        if not self.alive:
            raise EngineDeadError(self._dead)

    def _send(self, message: ToEngine) -> None:
        self._outbox.put(message)
        self._link.wake()

    # ---- the link's thread ----------------------------------------------------------------------------------

    def _supervise(self, link: Link | None) -> None:
        """Run one link after the other until told to stop or there is no next one."""
        restarts: list[float] = []
        outbox = self._outbox
        while link is not None:
            error = self._pump(link, outbox)
            if error is None:
                link.close()
                return
            self._on_loop(self._fail, STOPPED)
            link.close(force=True)
            link = self._next(restarts, error)
            if link is None:
                self._on_loop(self._lose, error)
            else:
                outbox = queue.SimpleQueue()  # what the old engine did not take is void
                self._on_loop(self._revive, link, outbox)

    def _pump(self, link: Link, outbox: queue.SimpleQueue[ToEngine]) -> QuireError | None:
        """Carry messages both ways until told to stop (None) or the engine is dead (why)."""
        try:
            while not self._closing.is_set():
                while not outbox.empty():
                    link.send(outbox.get())
                if messages := link.receive(LOOK):
                    self._on_loop(self._deliver, messages)
                silent = time.monotonic() - link.heard
                if 0 < self.care.hang_timeout < silent:
                    return EngineDeadError(f"the engine gave no sign of life for {silent:.0f} s")
            return None
        except Exception as error:
            log.exception("the engine link broke")
            return error if isinstance(error, QuireError) else EngineDeadError(f"the engine link broke: {error}")

    def _next(self, restarts: list[float], error: QuireError) -> Link | None:
        """A new link, after a pause that grows; None if there were too many, or there is no need any more."""
        while self._reopen is not None and not self._closing.is_set():
            now = time.monotonic()
            restarts[:] = [then for then in restarts if now - then < WINDOW]
            if len(restarts) >= self.care.max_restarts:
                break
            restarts.append(now)
            if self._closing.wait(BACKOFF * 2 ** (len(restarts) - 1)):
                break
            log.warning("restarting the engine (%d of %d)", len(restarts), self.care.max_restarts)
            try:
                return self._reopen(self._closing)
            except Exception:
                log.exception("the engine did not start again")
        return None

    def _on_loop(self, call: Callable[..., None], *arguments: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call, *arguments)

    # ---- the event loop -------------------------------------------------------------------------------------

    def _deliver(self, messages: list[ToClient]) -> None:
        for message in messages:
            if isinstance(message, Events):
                for event in message.events:
                    stream = self._streams.get(event.request)
                    if stream is not None:
                        stream.events.append(event)
                        stream.ready.set()
            elif isinstance(message, Stats) and self._stats:
                future = self._stats.pop(0)
                if not future.done():
                    future.set_result(message.stats)
            elif isinstance(message, View | Timelines | Powered | Cached):
                asked = self._asked.pop(0)
                if not asked.done():
                    asked.set_result(message)

    def _fail(self, why: str) -> None:
        """The engine is gone: everything open ends now."""
        self._dead = why
        for stream in self._streams.values():
            stream.error = EngineDeadError(why)
            stream.ready.set()
        for future in (*self._stats, *self._asked):
            if not future.done():
                future.set_exception(EngineDeadError(why))
        self._stats.clear()
        self._asked.clear()

    def _revive(self, link: Link, outbox: queue.SimpleQueue[ToEngine]) -> None:
        self._link, self._outbox, self.info = link, outbox, link.info
        self.restarts += 1
        if not self._closing.is_set():
            self._dead = ""

    def _lose(self, error: QuireError) -> None:
        if not self._closing.is_set() and not self._lost.done():
            self._lost.set_result(error)
