"""The step loop. It fits on one screen and stays so.

plan ──► submit ──► (device works; the next plan is made) ──► result ──► commit ──► events
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from quire.engine.adapters import Adapters
from quire.engine.cache_orders import CacheOrders
from quire.engine.grammar_queue import GrammarQueue
from quire.scheduling import LengthPredictor, Scheduler, SchedulingFeature
from quire.types.cache_control import CacheOrder, CacheReport
from quire.types.config import EngineOptions
from quire.types.errors import ConfigError, EngineDeadError, InputError, OverloadedError, QuireError
from quire.types.events import EngineStats, TokenEvent
from quire.types.membership import PeerLink
from quire.types.memory_use import resident_bytes
from quire.types.plan import StepPlan
from quire.types.request import Request
from quire.types.seams import Closable, Executor, Ticket
from quire.types.timeline import Timeline
from quire.types.transfer import KVConnector
from quire.types.view import EngineView

log = logging.getLogger(__name__)

MAX_FAILURES = 3  # failed steps in a row before the engine gives up


class EngineCore:
    def __init__(
        self,
        options: EngineOptions,
        executor: Executor,
        *,
        clock: Callable[[], float] = time.monotonic,
        listeners: Iterable[SchedulingFeature] = (),
        predictor: LengthPredictor | None = None,
        streams: bool = True,
    ):
        """`clock`: seconds; `listeners`: scheduling features beside the scheduler's own; `predictor`: of answers'
        lengths, in place of the one that is asked for; `streams`: whether every token is told of, or first ones and
        ends alone."""
        self.executor = executor
        self._clock = clock
        self.capacity = executor.start()
        self.scheduler = Scheduler(
            options.scheduler,
            executor.layout,
            self.capacity,
            prefix_cache=options.cache.prefix_cache,
            kv_policy=options.cache.kv_policy,
            session_quota=options.cache.session_quota,
            listeners=listeners,
            predictor=predictor,
            streams=streams,
        )
        self._grammar_queue = GrammarQueue(options.scheduler.max_waiting)
        self.adapters = Adapters(options.adapters, executor)
        self._tickets: deque[tuple[StepPlan, Ticket]] = deque()
        self._failures = 0
        self.beside: list[Closable] = []  # what ends with the engine
        self.connector: KVConnector | None = None  # to engines that pages are handed over to, and from
        self._sleep_level = 0  # 0: awake
        self.on_progress: Callable[[], object] = lambda: None  # called while weights load again

    def connect(self, peers: PeerLink) -> str:
        """Hand KV pages over to peers, and take theirs; the address they reach this engine by, or '' where the executor
        cannot, or the model has states beside them."""
        memory = self.scheduler.memory
        self.connector = self.executor.connect(peers) if memory.prefix_cache and memory.states is None else None
        if self.connector is None:
            return ""
        self.scheduler.features.tiers.directory.connect()
        return self.connector.address

    def power(self, *, asleep: bool, level: int = 1) -> None:
        """Free the device's memory, or take it again. At level 1 weights and cached pages wait in host memory, where
        that is another; at level 2 nothing does."""
        self.settle()
        if asleep and level not in (1, 2):
            raise InputError(f"sleep has levels 1 and 2, not {level}", param="level")
        if asleep and self.busy:
            raise OverloadedError("requests are under way; the engine can sleep when they are done")
        if asleep and level == 2 and self.adapters.list():
            raise ConfigError("LoRA adapters are loaded, which would be lost: unload them, or sleep at level 1")
        began, before = self._clock(), self._sleep_level
        if self._sleep_level and (not asleep or level > self._sleep_level):
            self.executor.wake(self.on_progress)
            self._sleep_level = 0
        if asleep and not self._sleep_level:
            memory = self.scheduler.memory
            self.scheduler.features.sessions.reset()  # what they hold stays cached, and that is what is kept
            kept = memory.cached_pages(self.executor.room_asleep() if level == 1 else 0)
            self.executor.sleep(kept, level)
            if (dropped := memory.keep_cached(kept)) and kept:
                log.info("%d cached pages are kept while the engine sleeps, %d are dropped", len(kept), dropped)
            self._sleep_level = level
        if self._sleep_level != before:
            state = f"asleep at level {level}" if asleep else "awake"
            log.info("the engine is %s after %.2f s", state, self._clock() - began)

    def _rouse(self) -> None:
        if self._sleep_level:
            self.power(asleep=False)

    def _live(self) -> Iterator[Request]:
        """Requests that are not over."""
        yield from (group.request for group in self.scheduler.sequences.requests.values())
        yield from self._grammar_queue.requests

    def load_adapter(self, name: str, path: str) -> None:
        self._rouse()
        self.adapters.load(name, path, self._live())

    def unload_adapter(self, name: str) -> None:
        self._rouse()
        self.adapters.unload(name, self._live())

    def submit(self, request: Request) -> None:
        self._rouse()
        try:
            request = self.adapters.resolved(request)
            self._submit(request)
        except QuireError:
            self.scheduler.features.handover.on_request_over(request)  # whoever waits for its pages waits in vain
            raise

    def _submit(self, request: Request) -> None:
        if request.params.grammar is None:
            self.scheduler.submit(request, self._clock())
        else:
            ready = self.executor.prepare(request.params.grammar)
            self._grammar_queue.add(request, ready, self.scheduler.sequences.requests)

    def abort(self, request_id: str) -> list[TokenEvent]:
        return self._grammar_queue.abort(request_id) or self.scheduler.abort(request_id)

    def abort_all(self) -> int:
        """Nobody waits for any answer any more. How many requests that ends."""
        return len([self.abort(request.id) for request in list(self._live())])

    def finish_at(self, request_id: str, branch: int, tokens: int) -> list[TokenEvent]:
        return self.scheduler.finish_at(request_id, branch, tokens)

    @property
    def busy(self) -> bool:
        asked = self.connector is not None and self.connector.has_requests
        return asked or self.scheduler.busy or bool(self._tickets or self._grammar_queue)

    def step(self) -> list[TokenEvent]:
        """Submit the next plan; when enough steps are in flight, or none could be planned, take the oldest in."""
        now = self._clock()
        late = self.scheduler.expire(now)
        for wanted in self.connector.take_requests() if self.connector is not None else ():
            self._rouse()
            self.scheduler.features.handover.on_page_request(wanted)
        if self._grammar_queue:
            idle = not (self.scheduler.busy or self._tickets)
            if refused := self._grammar_queue.release(self.scheduler.submit, idle=idle):
                return late + refused
        try:
            plan = self.scheduler.plan(now)
            if plan is not None:
                self._tickets.append((plan, self.executor.submit(plan)))
            if self._tickets and (plan is None or len(self._tickets) >= self.capacity.depth):
                return late + self._land()
            return late
        except Exception as error:
            return late + self._recover(error)

    def _land(self) -> list[TokenEvent]:
        done, ticket = self._tickets.popleft()
        events = self.scheduler.commit(done, ticket.result(), self._clock())
        self._failures = 0
        return events

    def settle(self) -> None:
        """No client waits for an answer: steps that went on beyond the last are taken in now, for they hold pages, and
        when they ended could not be told later. So do sessions, whose time may be up."""
        self.executor.check()
        self.scheduler.features.sessions.expire(self._clock())
        self.adapters.release(self._live())
        try:
            while self._tickets and self._tickets[0][0].rows and not self.scheduler.sequences.requests:
                self._land()
        except Exception as error:
            self._recover(error)

    def idle(self, *, quiet: bool) -> bool:
        """Nothing came, either: whether the executor has more to do now. `quiet`: nothing has for a while."""
        return not self._sleep_level and self.executor.idle(quiet=quiet)

    def _recover(self, error: Exception) -> list[TokenEvent]:
        """End all requests with an error and start clean; give up when that does not help."""
        self._failures += 1
        log.exception("step failed (%d in a row)", self._failures)
        self._tickets.clear()
        if isinstance(error, EngineDeadError):
            raise error
        if self._failures >= MAX_FAILURES:
            raise EngineDeadError(f"{MAX_FAILURES} steps failed in a row; the last: {error}") from error
        return self.scheduler.fail(f"the step failed: {type(error).__name__}: {error}")

    def reset(self) -> None:
        self._rouse()  # what the tiers are to drop, the worker drops
        self.scheduler.reset()

    def stats(self) -> EngineStats:
        found, compiling = self.scheduler.snapshot(), len(self._grammar_queue)
        pages, resident = self.executor.rank_memory()
        found.kv_bytes, found.memory = found.kv_bytes + pages, resident_bytes() + resident
        found.sleep_level = self._sleep_level
        found.handovers = self.connector.stats if self.connector is not None else None
        found.waiting, found.deferred = found.waiting + compiling, found.deferred + compiling
        return found

    def view(self) -> EngineView:
        return self.scheduler.view()

    def timelines(self, request_id: str) -> list[Timeline]:
        return self.scheduler.timelines(request_id)

    def cache(self, order: CacheOrder) -> tuple[CacheReport, bytes]:
        if order.action != "look":
            self._rouse()
        return CacheOrders(self.scheduler, self.executor, self.flush, self._clock).carry_out(order)

    def flush(self) -> None:
        """Begin transfers that wait for the next plan now."""
        plan = StepPlan(step=0)
        self.scheduler.features.tiers.directory.hand_over(plan)
        if plan.transfers or plan.drops:
            self.executor.submit(plan)

    def close(self) -> None:
        self._tickets.clear()
        self.flush()  # pages that were about to go to a tier that outlives the engine still go there
        self.executor.close()
        for one in self.beside:
            one.close()
