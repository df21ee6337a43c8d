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
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from quire.engine.event_queue import EventQueue
from quire.engine.link import Link, open_link
from quire.engine.spare_process import SpareProcess
from quire.engine.weight_holder import WeightHolder
from quire.types import messages
from quire.types.cache_control import CacheOrder, CacheReport
from quire.types.config import EngineOptions
from quire.types.errors import EngineDeadError, QuireError, from_wire
from quire.types.events import EngineStats
from quire.types.membership import ReplicaView
from quire.types.request import Request
from quire.types.timeline import Timeline
from quire.types.view import EngineView

log = logging.getLogger(__name__)

Kind = TypeVar("Kind", bound=messages.Answer)

RESTART_WINDOW_S = 600.0  # over which restarts are counted
FIRST_BACKOFF_S = 0.25  # before the first restart; each further one waits twice as long
POLL_INTERVAL_S = 0.5  # between looks at the clock while the engine is silent
STATS_TIMEOUT_S = 2.0  # that an engine has to say how much it has to do, when it is listed

# What callers are told; why it happened is in the log.
STOPPED = "the engine stopped; what it was working on is lost, and new requests must wait for its restart"
CLOSED = "the server is shutting down; try again later"


@dataclass(frozen=True)
class RestartPolicy:
    """When an engine's silence means trouble, when death, and how often it is replaced."""

    heartbeat: float = 5.0
    hang_timeout: float = 0.0  # 0: silence is never death
    max_restarts: int = 0


class AsyncClient:
    """`reopen` makes a new link where the old one broke; without it, a broken link is the end."""

    def __init__(
        self,
        link: Link,
        policy: RestartPolicy | None = None,
        reopen: Callable[[threading.Event], Link] | None = None,
        name: str = "",
    ):
        self.info = link.info
        self.policy = policy or RestartPolicy()
        self.restarts = 0
        self.adapters = list(link.info.adapters)
        self.on_change: Callable[[], None] = lambda: None  # its engine is lost, or another, or has other adapters
        self._link = link
        self._reopen = reopen
        self._extra = {"fields": {"model": name} if name else {}}  # of lines in the log
        self.loop = asyncio.get_running_loop()
        self._outbox: queue.SimpleQueue[messages.ToEngine] = queue.SimpleQueue()
        self._queues: dict[str, EventQueue] = {}  # by request
        self._asked: dict[int, asyncio.Future[messages.Answer]] = {}  # queries under way, by their ids
        self._closing = threading.Event()
        self._dead = ""  # why there is no engine now, in words for callers
        self._lost: asyncio.Future[QuireError] = self.loop.create_future()
        self._thread = threading.Thread(target=self._supervise, args=(link,), name="quire-link", daemon=True)
        self._thread.start()

    @classmethod
    async def open(
        cls,
        options: EngineOptions,
        *,
        name: str = "",
        process: bool = True,
        progress: bool = False,
        policy: RestartPolicy | None = None,
        spare: SpareProcess | None = None,
        holder: WeightHolder | None = None,
    ) -> AsyncClient:
        """`spare`: where there may be a process that only needs to load the model, at first and after a loss. `holder`:
        of weights, which then are mapped. `name`: what the log calls the model, of several."""

        def reopen(stop: threading.Event) -> Link:
            if spare is None or (link := spare.take()) is None:
                return open_link(options, process=process, progress=progress, stop=stop, holder=holder, name=name)
            link.start(options, stop, name)
            return link

        stop = threading.Event()
        try:
            link = await asyncio.to_thread(reopen, stop)
        except asyncio.CancelledError:
            stop.set()
            raise
        return cls(link, policy, reopen if process else None, name)

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
        return f"the engine gave no sign of life for {silent:.1f} s" if silent > self.policy.heartbeat else None

    async def lost(self) -> QuireError:
        """Wait until the engine is gone for good; returns why."""
        return await asyncio.shield(self._lost)

    def submit(self, request: Request) -> EventQueue:
        """Events until every branch finished; leaving the iteration early, by `aclose`, aborts the request."""
        return EventQueue(self, request)

    def attach(self, events: EventQueue, request: Request) -> None:
        """Submit a request whose events go to that queue."""
        self._require_alive()
        self._queues[request.id] = events
        self._send(messages.Submit(request))

    def detach(self, events: EventQueue) -> bool:
        """Whether the queue was followed until now."""
        return self._queues.get(events.id) is events and self._queues.pop(events.id) is events

    def abort(self, request_id: str) -> None:
        if self.alive:
            self._send(messages.Abort(request_id))

    def finish_at(self, request_id: str, branch: int, tokens: int) -> None:
        if self.alive:
            self._send(messages.FinishAt(request_id, branch, tokens))

    async def stats(self) -> EngineStats:
        return (await self._ask(messages.GetStats(), messages.Stats)).stats

    async def replicas(self) -> list[ReplicaView]:
        """This one engine, listed whether it answers or not."""
        stats, trouble = EngineStats(), self.trouble()
        if trouble is None:
            with suppress(TimeoutError, EngineDeadError):
                async with asyncio.timeout(STATS_TIMEOUT_S):
                    stats = await self.stats()
            trouble = self.trouble()
        state = "ready" if trouble is None else "unresponsive" if self.alive else "starting"
        return [
            ReplicaView(
                id="replica-0", pid=self.pid or os.getpid(), host=socket.gethostname(), role="both", state=state,
                running=stats.running, waiting=stats.waiting, restarts=self.restarts, lost=trouble or "",
            )
        ]  # fmt: skip

    async def view(self) -> EngineView:
        return (await self._ask(messages.GetView(), messages.View)).view

    async def timelines(self, request_id: str) -> list[Timeline]:
        return (await self._ask(messages.GetTimelines(request_id), messages.Timelines)).timelines

    async def power(self, *, asleep: bool, level: int = 1) -> None:
        """Free the device's memory until a request comes, or take it again now."""
        await self._ask(messages.Power(asleep, level), messages.Powered)

    async def cache(self, order: CacheOrder) -> tuple[CacheReport, bytes]:
        """Look at the KV cache, or change it; of an export, the bundle too."""
        reply = await self._ask(messages.Cache(order), messages.Cached)
        return reply.report, reply.data

    async def load_adapter(self, name: str, path: str) -> None:
        """Load a LoRA adapter by this name; an engine that replaces this one has it too."""
        self.adapters = (await self._ask(messages.LoadAdapter(name, path), messages.Adapted)).adapters
        self.on_change()

    async def unload_adapter(self, name: str) -> None:
        """No new request may name it; those that have it finish with it."""
        self.adapters = (await self._ask(messages.UnloadAdapter(name), messages.Adapted)).adapters
        self.on_change()

    def attach_client(self, name: str, path: Path) -> None:
        """Have this engine, until it ends, answer another client too, which listens there."""
        if self.alive:
            self._send(messages.Attach(name, f"ipc://{path}"))

    def detach_client(self, name: str) -> None:
        """That one is gone; what it asked for ends."""
        if self.alive:
            self._send(messages.Detach(name))

    async def _ask(self, question: messages.Question, kind: type[Kind]) -> Kind:
        self._require_alive()
        query = messages.Query(question)
        future = self._asked[query.id] = self.loop.create_future()
        self._send(query)
        try:
            answer = await future
        finally:
            self._asked.pop(query.id, None)
        if isinstance(answer, messages.Refused):
            raise from_wire(answer.error, answer.message)
        assert isinstance(answer, kind)
        return answer

    def reset(self) -> None:
        self._send(messages.Reset())

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

    def _send(self, message: messages.ToEngine) -> None:
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
            lost = time.monotonic()
            self._on_loop(self._fail, STOPPED)
            link.close(force=True)
            link = self._next(restarts, error)
            if link is None:
                self._on_loop(self._lose, error)
            else:
                log.info("the engine is ready again after %.1f s", time.monotonic() - lost, extra=self._extra)
                outbox = queue.SimpleQueue()  # what the old engine did not take is void
                self._on_loop(self._revive, link, outbox)

    def _pump(self, link: Link, outbox: queue.SimpleQueue[messages.ToEngine]) -> QuireError | None:
        """Carry messages both ways until told to stop (None) or the engine is dead (why)."""
        unresponsive = False
        try:
            while not self._closing.is_set():
                while not outbox.empty():
                    link.send(outbox.get())
                if received := link.receive(POLL_INTERVAL_S):
                    self._on_loop(self._deliver, received)
                silent = time.monotonic() - link.heard
                if 0 < self.policy.hang_timeout < silent:
                    raise EngineDeadError(f"the engine gave no sign of life for {silent:.0f} s")
                unresponsive = self._note_silence(silent, unresponsive)
            return None
        except QuireError as error:
            log.error("the engine is lost, and %d requests with it: %s", len(self._queues), error, extra=self._extra)
            return error
        except Exception as error:
            log.exception("the engine link broke", extra=self._extra)
            return EngineDeadError(f"the engine link broke: {error}")

    def _note_silence(self, silent: float, unresponsive: bool) -> bool:
        """Whether the engine is unresponsive now, in the log when that changes."""
        if unresponsive == (silent > self.policy.heartbeat):
            return unresponsive
        if unresponsive:
            log.warning("the engine gives signs of life again", extra=self._extra)
        else:
            log.warning("the engine is not ready: no sign of life for %.1f s", silent, extra=self._extra)
        return not unresponsive

    def _next(self, restarts: list[float], error: QuireError) -> Link | None:
        """A new link, after a pause that grows; None if there were too many, or there is no need any more."""
        while self._reopen is not None and not self._closing.is_set():
            now = time.monotonic()
            restarts[:] = [then for then in restarts if now - then < RESTART_WINDOW_S]
            if len(restarts) >= self.policy.max_restarts:
                if restarts:
                    minutes, most = RESTART_WINDOW_S / 60, self.policy.max_restarts
                    log.error(
                        "no more restarts: %d within %.0f minutes (max_restarts)", most, minutes, extra=self._extra
                    )
                break
            restarts.append(now)
            if self._closing.wait(FIRST_BACKOFF_S * 2 ** (len(restarts) - 1)):
                break
            most = self.policy.max_restarts
            log.warning("restarting the engine (%d of %d)", len(restarts), most, extra=self._extra)
            try:
                return self._reopen(self._closing)
            except Exception:
                if not self._closing.is_set():  # else it was told to stop
                    log.exception("the engine did not start again", extra=self._extra)
        return None

    def _on_loop(self, call: Callable[..., None], *arguments: object) -> None:
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(call, *arguments)

    # ---- the event loop -------------------------------------------------------------------------------------

    def _deliver(self, received: list[messages.ToClient]) -> None:
        for message in received:
            if isinstance(message, messages.Events):
                queues = self._queues
                for event in message.events:
                    if (events := queues.get(event.request)) is not None:
                        events.put(event)
            elif isinstance(message, messages.Reply):
                future = self._asked.get(message.id)
                if future is not None and not future.done():
                    future.set_result(message.answer)
                elif isinstance(message.answer, messages.Refused):  # of what a new engine was told to have
                    log.warning("the engine refused: %s", message.answer.message, extra=self._extra)

    def _fail(self, why: str) -> None:
        """The engine is gone: everything open ends now."""
        self._dead = why
        for events in self._queues.values():
            events.fail(EngineDeadError(why))
        for future in self._asked.values():
            if not future.done():
                future.set_exception(EngineDeadError(why))
        self._asked.clear()
        self.on_change()

    def _revive(self, link: Link, outbox: queue.SimpleQueue[messages.ToEngine]) -> None:
        self._link, self._outbox, self.info = link, outbox, link.info
        self.restarts += 1
        self._adapt_again()
        if not self._closing.is_set():
            self._dead = ""
        self.on_change()

    def _adapt_again(self) -> None:
        """A new engine has the adapters named at start: bring it to what the old one had, before any request."""
        there = set(self.info.adapters)
        for one in there - set(self.adapters):
            self._send(messages.Query(messages.UnloadAdapter(one.name)))
        for one in (one for one in self.adapters if one not in there):
            self._send(messages.Query(messages.LoadAdapter(one.name, one.path)))

    def _lose(self, error: QuireError) -> None:
        if not self._closing.is_set() and not self._lost.done():
            self._lost.set_result(error)
