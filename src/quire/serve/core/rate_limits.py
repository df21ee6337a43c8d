"""Request admission: who may enter, at what price, and when to come back.

A request is let in twice. Before its body is read: is there a place in the queue, is the key within its
concurrency? Once its tokens are counted, before anything is allocated for it: may the queue hold that many, does
the key's budget cover them?

    enter ──► waiting ──charge──► queued tokens ──first token──► running ──► leave

The price of a request is what it may at most need: its prompt and all tokens it may draw. What it did not use goes
back to its key's budget. How long a request would wait in its place in the queue, the engine knows, which refuses what
may not wait so long; `Retry-After` is how long requests have waited lately.
Refuses to know: HTTP, engines.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from quire.serve.core.api_keys import Key
from quire.types.errors import OverloadedError, RateLimitError

EMA_WEIGHT = 0.1  # of the latest request, in how long they wait and stay
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


@dataclass
class Bucket:
    """Tokens a key may still spend; it fills up to one minute's worth. Large requests may overdraw it."""

    level: float
    filled: float

    def fill(self, per_minute: int, now: float) -> None:
        self.level = min(float(per_minute), self.level + (now - self.filled) * per_minute / 60)
        self.filled = now


@dataclass(eq=False)
class RequestAdmission:
    max_queue: int
    max_queue_tokens: int
    key_concurrency: int = 0
    key_tokens_per_minute: int = 0
    clock: Callable[[], float] = time.monotonic

    draining: bool = False
    waiting: int = 0  # requests without a first token
    queued: int = 0  # what those of them are worth whose price is known
    inflight: int = 0
    background: int = 0  # ... of which others do not wait for
    refused: Counter[str] = field(default_factory=Counter)  # by reason
    _by_key: Counter[str] = field(default_factory=Counter)
    _buckets: dict[str, Bucket] = field(default_factory=dict)
    _stay: float = 1.0  # how long requests stay, on average
    _waited: float = 0.0  # ... and wait for their first token
    _idle: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._idle.set()

    # ---- in and out ----------------------------------------------------------------------------------------

    def enter(self, key: Key, *, background: bool = False) -> Permit:
        """A place for a request whose body has not been read; raises OverloadedError or RateLimitError. One in the
        background counts for its key only, and has no place in the queue."""
        if self.draining:
            raise self._refusal("draining", "the server is shutting down; try another one", DRAIN_RETRY)
        limit = self.key_concurrency if key.concurrency is None else key.concurrency
        if limit and self._by_key[key.name] >= limit:
            message = f"key {key.name!r} has {limit} requests under way, as many as it may; wait for one to end"
            raise self._refusal("key_concurrency", message, self._stay / limit, RateLimitError)
        if not background:
            if self.waiting >= self.max_queue:
                message = f"{self.waiting} requests are waiting, as many as may; retry later"
                raise self._refusal("queue_full", message, self.wait())
            self.waiting += 1
        self.background += background
        self.inflight += 1
        self._by_key[key.name] += 1
        self._idle.clear()
        return Permit(key, self.clock(), started=background, background=background)

    def charge(self, permit: Permit, tokens: int) -> None:
        """The request will need up to `tokens`: queue it, or raise. A request larger than the queue may enter an
        empty one. A permit that was given back is charged nothing: the server itself goes on with the work."""
        if permit.released:
            return
        if not permit.background and self.queued and self.queued + tokens > self.max_queue_tokens:
            message = f"the queue holds {self.queued} tokens and has no room for {tokens} more; retry later"
            raise self._refusal("queue_tokens", message, self.wait())
        self._spend(permit.key, tokens)
        permit.charged = self.clock()
        permit.price += tokens
        if not permit.started:
            self.queued += tokens

    def start(self, permit: Permit) -> None:
        """The request got its first token: it waits no more."""
        if not permit.started and not permit.released:
            permit.started = True
            if permit.charged:
                self._waited += EMA_WEIGHT * (self.clock() - permit.charged - self._waited)
            self.waiting -= 1
            self.queued -= permit.price

    def leave(self, permit: Permit) -> None:
        """The request is over, however it ended; what it did not use goes back to its key."""
        if permit.released:
            return
        if not permit.started:
            self.waiting -= 1
            self.queued -= permit.price
        permit.released = True
        self.inflight -= 1
        self.background -= permit.background
        name = permit.key.name
        self._by_key[name] -= 1
        if not self._by_key[name]:
            del self._by_key[name]
        if (bucket := self._buckets.get(name)) is not None:
            bucket.level += max(0, permit.price - permit.used)
        if not permit.background:
            self._stay += EMA_WEIGHT * (self.clock() - permit.entered - self._stay)
        if not self.inflight:
            self._idle.set()

    # ---- waits ----------------------------------------------------------------------------------------------

    def wait(self) -> float:
        """Seconds that requests have waited for their first token lately."""
        return self._waited if self.waiting else 0.0

    async def idle(self) -> None:
        """Wait until no request is under way."""
        await self._idle.wait()

    def refused_later(self, refusal: OverloadedError) -> OverloadedError:
        """The engine refused what was let in here."""
        self.refused["engine"] += 1
        refusal.retry_after = max(refusal.retry_after, self.wait())
        return refusal

    def _spend(self, key: Key, tokens: int) -> None:
        limit = self.key_tokens_per_minute if key.tokens_per_minute is None else key.tokens_per_minute
        if not limit:
            return
        bucket = self._buckets.setdefault(key.name, Bucket(float(limit), self.clock()))
        bucket.fill(limit, self.clock())
        lacking = min(tokens, limit) - bucket.level
        if lacking > 0:
            message = f"key {key.name!r} may use {limit} tokens a minute; this request may need {tokens}; retry later"
            raise self._refusal("key_tokens", message, lacking * 60 / limit, RateLimitError)
        bucket.level -= tokens

    def _refusal(
        self, reason: str, message: str, retry: float, kind: type[OverloadedError] = OverloadedError
    ) -> OverloadedError:
        self.refused[reason] += 1
        return kind(message, retry_after=max(1.0, retry))
