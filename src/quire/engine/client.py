"""The engine client: asyncio over a link. A thread owns the link; events cross into the loop once a step.

Implements types.seams.EngineClient for one engine, in this process or its own.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncIterator
from typing import Any

from quire.engine.link import Link, open_link
from quire.types.config import EngineOptions
from quire.types.errors import EngineDeadError, QuireError
from quire.types.events import EngineStats, TokenEvent
from quire.types.request import Request
from quire.types.timeline import Timeline
from quire.types.view import EngineView
from quire.types.wire import (
    Abort,
    Events,
    FinishAt,
    GetStats,
    GetTimelines,
    GetView,
    Reset,
    Stats,
    Submit,
    Timelines,
    ToClient,
    ToEngine,
    View,
)

log = logging.getLogger(__name__)


class _Stream:
    """Events of one request, coalesced while the reader lags."""

    def __init__(self, branches: int):
        self.open = branches
        self.events: list[TokenEvent] = []
        self.ready = asyncio.Event()
        self.error: QuireError | None = None


class AsyncClient:
    def __init__(self, link: Link):
        self.info = link.info
        self._link = link
        self._loop = asyncio.get_running_loop()
        self._outbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
        self._streams: dict[str, _Stream] = {}
        self._stats: list[asyncio.Future[EngineStats]] = []
        self._asked: list[asyncio.Future[Any]] = []  # views and timelines, which come back in the order asked
        self._closing = threading.Event()
        self._dead: QuireError | None = None
        self._lost: asyncio.Future[QuireError] = self._loop.create_future()
        self._thread = threading.Thread(target=self._pump, name="quire-link", daemon=True)
        self._thread.start()

    @classmethod
    async def open(cls, options: EngineOptions, *, process: bool = True, progress: bool = False) -> AsyncClient:
        link = await asyncio.to_thread(open_link, options, process=process, progress=progress)
        return cls(link)

    @property
    def alive(self) -> bool:
        return self._dead is None and not self._closing.is_set()

    def trouble(self) -> str | None:
        """Why the engine could not answer now; None if it could."""
        return None if self.alive else str(self._dead or "the engine was closed")

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
            if stream.open and self.alive:
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

    async def _ask(self, message: GetView | GetTimelines) -> Any:
        self._require_alive()
        future: asyncio.Future[Any] = self._loop.create_future()
        self._asked.append(future)
        self._send(message)
        return await future

    def reset(self) -> None:
        self._send(Reset())

    async def close(self) -> None:
        if self._closing.is_set():
            return
        self._closing.set()
        self._link.wake()
        await asyncio.to_thread(self._thread.join)
        self._fail(EngineDeadError("the engine was closed"))

    def _require_alive(self) -> None:
        if self._dead or self._closing.is_set():
            raise self._dead or EngineDeadError("the engine was closed")

    def _send(self, message: ToEngine) -> None:
        self._outbox.put(message)
        self._link.wake()

    # ---- the link's thread ----------------------------------------------------------------------------------

    def _pump(self) -> None:
        try:
            while not self._closing.is_set():
                while not self._outbox.empty():
                    self._link.send(self._outbox.get())
                messages = self._link.receive(None)
                if messages:
                    self._loop.call_soon_threadsafe(self._deliver, messages)
        except Exception as error:
            log.exception("the engine link broke")
            dead = error if isinstance(error, QuireError) else EngineDeadError(f"the engine link broke: {error}")
            self._loop.call_soon_threadsafe(self._fail, dead)
        finally:
            self._link.close()

    # ---- the event loop -------------------------------------------------------------------------------------

    def _deliver(self, messages: list[ToClient]) -> None:
        for message in messages:
            if isinstance(message, Events):
                for event in message.events:
                    stream = self._streams.get(event.request)
                    if stream is not None:
                        stream.events.append(event)
                        stream.ready.set()
            elif isinstance(message, Stats):
                future = self._stats.pop(0)
                if not future.done():
                    future.set_result(message.stats)
            elif isinstance(message, View | Timelines):
                asked = self._asked.pop(0)
                if not asked.done():
                    asked.set_result(message)

    def _fail(self, error: QuireError) -> None:
        """The engine is gone: everything open ends now."""
        self._dead = self._dead or error
        if not self._closing.is_set() and not self._lost.done():
            self._lost.set_result(error)
        for stream in self._streams.values():
            stream.error = error
            stream.ready.set()
        for future in (*self._stats, *self._asked):
            if not future.done():
                future.set_exception(error)
        self._stats.clear()
        self._asked.clear()
