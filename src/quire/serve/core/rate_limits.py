"""Request admission: who may enter, at what price, and when to come back.

A request is let in twice. Before its body is read: is there a place in the queue, is the key within its
concurrency? Once its tokens are counted, before anything is allocated for it: may the queue hold that many, does
the key's budget cover them?

    enter ──► waiting ──charge──► queued tokens ──first token──► running ──► leave

The price of a request is what it may at most need: its prompt and all tokens it may draw. What it did not use goes
back to its key's budget. How long a request would wait in its place in the queue, the engine knows, which refuses what
may not wait so long; `Retry-After` is how long requests have waited lately.
Where a server has several API processes, all of them count in one place (`shared_counts`).
Refuses to know: HTTP, engines.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from quire.serve.core.api_keys import Key
from quire.serve.core.shared_counts import REFUSED, SharedCounts
from quire.types.errors import OverloadedError, RateLimitError

EMA_WEIGHT = 0.1  # of the latest request, in how long they wait and stay
IDLE_POLL_S = 0.05  # between looks whether other processes have requests under way
DRAIN_RETRY = 5.0  # seconds after which another server, or this one again, should be there


@dataclass(eq=False)
class Permit:
    """The place of one request, from its arrival to its last byte."""

    key: Key
    entered: float
    price: int = 0
    used: int = 0
    charged: float = 0.0  # when
    started: bool = False
    released: bool = False
    background: bool = False  # others do not wait for it, nor it for them: whoever starts it sees to that


@dataclass(eq=False)
class RequestAdmission:
    """`counts`: those of the whole server, whichever of its processes a request came to."""

    max_queue: int
    max_queue_tokens: int
    key_concurrency: int = 0
    key_tokens_per_minute: int = 0
    clock: Callable[[], float] = time.monotonic
    counts: SharedCounts = field(default_factory=SharedCounts)
    _own: int = 0  # requests under way in this process
    _idle: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._idle.set()
        if not self.counts.whole("stay"):
            self.counts.set_whole("stay", 1.0)

    @property
    def draining(self) -> bool:
        return bool(self.counts.whole("draining"))

    @draining.setter
    def draining(self, draining: bool) -> None:
        self.counts.set_whole("draining", draining)

    @property
    def waiting(self) -> int:
        """Requests without a first token."""
        return self.counts.total("waiting")

    @property
    def queued(self) -> int:
        """What those of them are worth whose price is known."""
        return self.counts.total("queued")

    @property
    def inflight(self) -> int:
        return self.counts.total("inflight")

    @property
    def background(self) -> int:
        """Requests under way that others do not wait for."""
        return self.counts.total("background")

    @property
    def refused(self) -> Counter[str]:
        """By reason."""
        return Counter({reason: count for reason in REFUSED if (count := self.counts.total(reason))})

    # ---- in and out ----------------------------------------------------------------------------------------

    def enter(self, key: Key, *, background: bool = False) -> Permit:
        """A place for a request whose body has not been read; raises OverloadedError or RateLimitError. One in the
        background counts for its key only, and has no place in the queue."""
        if self.draining:
            raise self._refusal("draining", "the server is shutting down; try another one", DRAIN_RETRY)
        limit, counts = self.key_concurrency if key.concurrency is None else key.concurrency, self.counts
        with counts.deciding():
            if limit and counts.requests_of(key.name) >= limit:
                message = f"key {key.name!r} has {limit} requests under way, as many as it may; wait for one to end"
                raise self._refusal("key_concurrency", message, counts.whole("stay") / limit, RateLimitError)
            if not background:
                if (waiting := self.waiting) >= self.max_queue:
                    message = f"{waiting} requests are waiting, as many as may; retry later"
                    raise self._refusal("queue_full", message, self.wait())
                counts.add("waiting", 1)
            counts.add("background", background)
            counts.add("inflight", 1)
            counts.add_request(key.name, 1)
        self._own += 1
        self._idle.clear()
        return Permit(key, self.clock(), started=background, background=background)

    def charge(self, permit: Permit, tokens: int) -> None:
        """The request will need up to `tokens`: queue it, or raise. A request larger than the queue may enter an
        empty one. A permit that was given back is charged nothing: the server itself goes on with the work."""
        if permit.released:
            return
        with self.counts.deciding():
            if not permit.background and (queued := self.queued) and queued + tokens > self.max_queue_tokens:
                message = f"the queue holds {queued} tokens and has no room for {tokens} more; retry later"
                raise self._refusal("queue_tokens", message, self.wait())
            self._spend(permit.key, tokens)
            if not permit.started:
                self.counts.add("queued", tokens)
        permit.charged = self.clock()
        permit.price += tokens

    def start(self, permit: Permit) -> None:
        """The request got its first token: it waits no more."""
        if not permit.started and not permit.released:
            permit.started = True
            if permit.charged:
                self._average("waited", self.clock() - permit.charged)
            self._waits_no_more(permit)

    def leave(self, permit: Permit) -> None:
        """The request is over, however it ended; what it did not use goes back to its key."""
        if permit.released:
            return
        if not permit.started:
            self._waits_no_more(permit)
        permit.released = True
        counts, name = self.counts, permit.key.name
        counts.add("inflight", -1)
        counts.add("background", -permit.background)
        counts.add_request(name, -1)
        if permit.price > permit.used and counts.budget(name) is not None:
            with counts.deciding():
                counts.give_back(name, permit.price - permit.used)
        if not permit.background:
            self._average("stay", self.clock() - permit.entered)
        self._own -= 1
        if not self._own:
            self._idle.set()

    def _waits_no_more(self, permit: Permit) -> None:
        self.counts.add("waiting", -1)
        self.counts.add("queued", -permit.price)

    def _average(self, name: str, seconds: float) -> None:
        known = self.counts.whole(name)
        self.counts.set_whole(name, known + EMA_WEIGHT * (seconds - known))

    # ---- waits ----------------------------------------------------------------------------------------------

    def wait(self) -> float:
        """Seconds that requests have waited for their first token lately."""
        return self.counts.whole("waited") if self.waiting else 0.0

    async def idle(self) -> None:
        """Wait until no request is under way."""
        await self._idle.wait()
        while self.inflight:  # in other processes
            await asyncio.sleep(IDLE_POLL_S)

    def refused_later(self, refusal: OverloadedError) -> OverloadedError:
        """The engine refused what was let in here."""
        self.counts.add("engine", 1)
        refusal.retry_after = max(refusal.retry_after, self.wait())
        return refusal

    def _spend(self, key: Key, tokens: int) -> None:
        limit = self.key_tokens_per_minute if key.tokens_per_minute is None else key.tokens_per_minute
        if not limit:
            return
        now, budget = self.clock(), self.counts.budget(key.name)
        level = float(limit)  # a minute's worth, which is what there is at first and at most
        if budget is not None:
            level = min(level, budget[0] + (now - budget[1]) * limit / 60)
        lacking = min(tokens, limit) - level
        self.counts.set_budget(key.name, level if lacking > 0 else level - tokens, now)
        if lacking > 0:
            message = f"key {key.name!r} may use {limit} tokens a minute; this request may need {tokens}; retry later"
            raise self._refusal("key_tokens", message, lacking * 60 / limit, RateLimitError)

    def _refusal(
        self, reason: str, message: str, retry: float, kind: type[OverloadedError] = OverloadedError
    ) -> OverloadedError:
        self.counts.add(reason, 1)
        return kind(message, retry_after=max(1.0, retry))
