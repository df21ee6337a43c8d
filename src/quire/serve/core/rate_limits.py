"""Request admission: who may enter, at what price, and when to come back.

A request is let in twice. Before its body is read: is there a place in the queue, is the key within its
concurrency? Once its tokens are counted, before anything is allocated for it: may the queue hold that many, does
the key's budget cover them, could its deadline be met?

    enter ──► waiting ──charge──► queued tokens ──first token──► running ──► leave

The price of a request is what it may at most need: its prompt and all tokens it may draw. What it did not use goes
back to its key's budget. What a request would wait in its place in the queue, the engine knows, and refuses what may
not wait so long; before that, those who could not be served at all are turned away here. The queue drains at the rate
at which priced tokens leave it, measured only while something is queued; waits and `Retry-After` are computed from
that. While the engine has free slots, the queue drains as fast as prompts are computed; once all are taken, as fast
as requests finish, so the two are measured apart. And since batches tend to finish in waves, how much longer than
expected waits behind a full house turn out is learned.
Refuses to know: HTTP, engines.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from quire.serve.core.api_keys import Key
from quire.types.errors import OverloadedError, RateLimitError

DRAIN_HALF_LIFE_S = 10.0  # after which a measurement counts a half
CAUTION_HALF_LIFE_S = 30.0  # the same, for what was learned of waits behind a full house
MAX_CAUTION = 64.0
MIN_MEASURED_SHARE = 1 / 30  # of a wait: measured for less time, a rate refuses no request
DRAIN_RETRY = 5.0  # seconds after which another server, or this one again, should be there


@dataclass(eq=False)
class Permit:
    """The place of one request, from its arrival to its last byte."""

    key: Key
    entered: float
    price: int = 0
    used: int = 0
    sequences: int = 0
    charged: float = 0.0  # when
    expected: float = 0.0  # the wait it was let in with, if it found every slot taken
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


@dataclass
class DrainMeter:
    """Tokens that left the queue per second during which it held any; old measurements fade."""

    tokens: float = 0.0
    seconds: float = 0.0

    def note(self, tokens: float, seconds: float) -> None:
        fade = 0.5 ** (seconds / DRAIN_HALF_LIFE_S)
        self.tokens = self.tokens * fade + tokens
        self.seconds = self.seconds * fade + seconds

    @property
    def rate(self) -> float:
        """0 while nothing is known."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


@dataclass
class Caution:
    """By which factor waits behind a full house exceed the expected, nine times out of ten; it fades unless fed."""

    factor: float = 1.0
    _since: float = 0.0

    def at(self, now: float) -> float:
        self.factor = max(1.0, self.factor * 0.5 ** ((now - self._since) / CAUTION_HALF_LIFE_S))
        self._since = now
        return self.factor

    def learn(self, ratio: float, now: float) -> None:
        """One wait was `ratio` times the expected. Up by a half one time in nine, down a little the other eight."""
        change = 1.5 if ratio > self.at(now) else 0.95
        self.factor = min(MAX_CAUTION, max(1.0, self.factor * change))


@dataclass(eq=False)
class RequestAdmission:
    max_queue: int
    max_queue_tokens: int
    max_queue_wait: float
    key_concurrency: int = 0
    key_tokens_per_minute: int = 0
    slots: int = 0  # sequences that run at once; 0: not known
    clock: Callable[[], float] = time.monotonic

    draining: bool = False
    waiting: int = 0  # requests without a first token
    queued: int = 0  # what those of them are worth whose price is known
    inflight: int = 0
    background: int = 0  # ... of which others do not wait for
    sequences: int = 0  # of requests under way
    refused: Counter[str] = field(default_factory=Counter)  # by reason
    drains: tuple[DrainMeter, DrainMeter] = field(default_factory=lambda: (DrainMeter(), DrainMeter()))
    caution: Caution = field(default_factory=Caution)
    _by_key: Counter[str] = field(default_factory=Counter)
    _buckets: dict[str, Bucket] = field(default_factory=dict)
    _since: float = 0.0  # when the queue was last looked at
    _stay: float = 1.0  # how long requests stay, on average
    _price: float = 0.0  # what they cost, on average
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
            self._check_wait(self.max_queue_wait, "queue_wait", "longer than this server lets anybody wait")
            self.waiting += 1
        self.background += background
        self.inflight += 1
        self._by_key[key.name] += 1
        self._idle.clear()
        return Permit(key, self.clock(), started=background, background=background)

    def charge(self, permit: Permit, tokens: int, sequences: int = 1, time_left: float = math.inf) -> None:
        """The request will need up to `tokens`: queue it, or raise. A request larger than the queue may enter an
        empty one. A permit that was given back is charged nothing: the server itself goes on with the work."""
        if permit.released:
            return
        if not permit.background:
            if self.queued and self.queued + tokens > self.max_queue_tokens:
                message = f"the queue holds {self.queued} tokens and has no room for {tokens} more; retry later"
                raise self._refusal("queue_tokens", message, self.wait())
            self._check_wait(time_left, "deadline", "longer than its deadline allows")
        self._spend(permit.key, tokens)
        self._price += 0.1 * (tokens - self._price) if self._price else tokens
        permit.charged = self._measure(0)
        permit.expected = self._turn() if self.full else 0.0
        permit.price += tokens
        permit.sequences += sequences
        self.sequences += sequences
        if not permit.started:
            self.queued += tokens

    def start(self, permit: Permit) -> None:
        """The request got its first token: it waits no more."""
        if not permit.started and not permit.released:
            permit.started = True
            now = self._measure(permit.price)
            if permit.expected:
                self.caution.learn((now - permit.charged) / permit.expected, now)
            self.waiting -= 1
            self.queued -= permit.price

    def leave(self, permit: Permit) -> None:
        """The request is over, however it ended; what it did not use goes back to its key."""
        if permit.released:
            return
        self._measure(0)
        if not permit.started:
            self.waiting -= 1
            self.queued -= permit.price
        permit.released = True
        self.inflight -= 1
        self.background -= permit.background
        self.sequences -= permit.sequences
        name = permit.key.name
        self._by_key[name] -= 1
        if not self._by_key[name]:
            del self._by_key[name]
        if (bucket := self._buckets.get(name)) is not None:
            bucket.level += max(0, permit.price - permit.used)
        if not permit.background:
            self._stay += 0.1 * (self.clock() - permit.entered - self._stay)
        if not self.inflight:
            self._idle.set()

    # ---- waits ----------------------------------------------------------------------------------------------

    @property
    def full(self) -> bool:
        """Whether every slot of the engine is taken or spoken for."""
        return 0 < self.slots <= self.sequences

    @property
    def drain(self) -> DrainMeter:
        """How fast the queue drains as things stand."""
        return self.drains[self.full]

    def wait(self) -> float:
        """Seconds a newcomer would wait, by the measured rate; 0 while nothing is known."""
        if self.full:
            return self._turn() * self.caution.at(self.clock())
        return self.queued / self.drain.rate if self.drain.rate else 0.0

    def _turn(self) -> float:
        """Seconds until one more request than is queued now will have left the queue."""
        return (self.queued + self._price) / self.drain.rate if self.drain.rate else 0.0

    async def idle(self) -> None:
        """Wait until no request is under way."""
        await self._idle.wait()

    def _measure(self, left: int) -> float:
        """Note what leaves the queue, and the time since the last look if there was a queue; returns now."""
        now = self.clock()
        if self.queued:
            self.drain.note(left, now - self._since)
        self._since = now
        return now

    def _check_wait(self, longest: float, reason: str, why: str) -> None:
        expected = self.wait()
        if expected > longest and self.drain.seconds > longest * MIN_MEASURED_SHARE:
            message = f"a first token would take about {expected:.1f} s, {why}; retry later"
            raise self._refusal(reason, message, expected - longest / 2)

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
