"""What requests felt and what the engine says of itself, counted.

Recording is plain arithmetic on the event loop's thread (no locks, no label look-ups), one update per arrival of
tokens; names, labels and buckets are made only at a scrape (`exposition`).

Refuses to know: engines, HTTP, who scrapes.
"""

from __future__ import annotations

from collections.abc import Iterable
from time import perf_counter

import msgspec

from quire.observe.energy import Energy
from quire.observe.window import Glance, Window
from quire.types.events import EngineStats
from quire.types.histogram import LATENCY, TOKENS, Histogram
from quire.types.messages import EngineInfo
from quire.types.outputs import Delta
from quire.types.request import FinishReason

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


HISTOGRAMS = (
    *("ttft", "gap", "tpot", "e2e"),
    *("prompt_size", "output_size", "longest_output", "branches", "max_tokens", "prefill_size"),
)
COUNTERS = ("prompt_tokens", "computed_tokens", "cached_tokens", "output_tokens")


class Counted(msgspec.Struct):
    """What one process of a server counted since it last told another."""

    histograms: dict[str, Histogram]
    counters: dict[str, int]
    finished: dict[str, int]
    glance: Glance


class Reading(msgspec.Struct):
    """What the meter of a request shows."""

    started: float
    first: float
    ended: float
    cached: int
    tokens: int
    reasons: list[str]


class Metrics:
    """All metrics of one server. Feed it with `request` and `engine`; read it with `exposition.render`."""

    def __init__(self, model: str, energy: Energy | None = None, info: EngineInfo | None = None):
        self.model = model
        self.energy = energy
        self.info = info
        self.window = Window()
        self._begin()
        self.stats: EngineStats | None = None
        self.workers_memory = 0  # bytes of other processes that answer for this server
        self.engine_up: bool | None = False  # None: there is to be no engine

    def _begin(self) -> None:
        self.ttft = Histogram(LATENCY)
        self.gap = Histogram(LATENCY)
        self.tpot = Histogram(LATENCY)
        self.e2e = Histogram(LATENCY)
        self.prompt_size = Histogram(TOKENS)
        self.output_size = Histogram(TOKENS)
        self.longest_output = Histogram(TOKENS)
        self.branches = Histogram(TOKENS)
        self.max_tokens = Histogram(TOKENS)
        self.prefill_size = Histogram(TOKENS)
        self.prompt_tokens = 0
        self.computed_tokens = 0  # of prompts, by their first tokens
        self.cached_tokens = 0
        self.output_tokens = 0
        self.finished: dict[str, int] = {reason.value: 0 for reason in FinishReason}

    def take(self) -> Counted:
        """Everything since the last take; all of it begins anew here."""
        told = Counted(
            {name: getattr(self, name) for name in HISTOGRAMS},
            {name: getattr(self, name) for name in COUNTERS},
            self.finished,
            self.window.take(),
        )
        self._begin()
        return told

    def add(self, told: Counted) -> None:
        """What another process of this server took."""
        for name in HISTOGRAMS:
            getattr(self, name).add(told.histograms[name])
        for name in COUNTERS:
            setattr(self, name, getattr(self, name) + told.counters[name])
        for reason, count in told.finished.items():
            self.finished[reason] += count
        self.window.add(told.glance)

    def request(self, prompt_tokens: int, arrived: float | None = None, max_tokens: int | None = None) -> RequestMeter:
        """Start measuring one request; `arrived` is its `perf_counter` time if that lies in the past, `max_tokens` what
        it asks for (None: to the end of the context)."""
        self.prompt_tokens += prompt_tokens
        self.prompt_size.observe(prompt_tokens)
        room = max(0, self.info.max_model_len - prompt_tokens) if self.info is not None else None
        if (most := room if max_tokens is None else max_tokens) is not None:
            self.max_tokens.observe(most)
        return RequestMeter(self, perf_counter() if arrived is None else arrived, prompt_tokens)

    def engine(self, stats: EngineStats | None) -> None:
        """The engine's latest numbers; None when it did not answer (counters then keep their last value)."""
        self.engine_up = stats is not None
        if stats is not None:
            self.stats = stats

    def unloaded(self) -> None:
        """There is no engine now, nor anything that one would say."""
        self.engine_up, self.stats = None, None


class RequestMeter:
    """Times of one request, branch by branch. Call `deltas` on each arrival and `close` at the end, come what may."""

    __slots__ = ("_branches", "_metrics", "_prompt", "cached", "ended", "started")

    def __init__(self, metrics: Metrics, started: float, prompt: int = 0):
        self._metrics = metrics
        self._prompt = prompt
        self._branches: dict[int, _Branch] = {}
        self.started = started
        self.ended = 0.0
        self.cached = 0

    @property
    def tokens(self) -> int:
        return sum(branch.tokens for branch in self._branches.values())

    @property
    def first(self) -> float:
        """When the first token came; 0 if none has."""
        return min((branch.first for branch in self._branches.values() if branch.tokens), default=0.0)

    @property
    def reasons(self) -> list[str]:
        return [branch.reason.value for branch in self._branches.values() if branch.reason is not None]

    def reading(self) -> Reading:
        return Reading(self.started, self.first, self.ended, self.cached, self.tokens, self.reasons)

    def deltas(self, deltas: Iterable[Delta], now: float | None = None) -> None:
        now = perf_counter() if now is None else now
        for delta in deltas:
            self.delta(delta, now)

    def delta(self, delta: Delta, now: float) -> None:
        metrics = self._metrics
        branch = self._branches.get(delta.branch)
        if branch is None:
            branch = self._branches[delta.branch] = _Branch()
        if count := len(delta.token_ids):
            if branch.tokens:
                gap = now - branch.last
                metrics.gap.observe(gap)
                metrics.window.gaps.add(gap)
            else:
                branch.first = now
                metrics.ttft.observe(now - self.started)
                metrics.window.firsts.add(now - self.started)
                if not any(other.tokens for other in self._branches.values()):
                    self._prefilled(delta.cached_tokens)
            branch.last = now
            branch.tokens += count
            metrics.output_tokens += count
            metrics.window.tokens += count
        if delta.finish_reason is not None and branch.reason is None:
            branch.reason = delta.finish_reason
            self._finish(branch, delta.finish_reason)

    def _prefilled(self, cached: int) -> None:
        """The first token is there, and with it how much of the prompt was cached."""
        metrics, self.cached = self._metrics, cached
        metrics.cached_tokens += cached
        metrics.computed_tokens += max(0, self._prompt - cached)
        metrics.prefill_size.observe(max(0, self._prompt - cached))

    def close(self, branches: int = 1) -> None:
        """The request is over; of its `branches`, those that never ended count as aborted."""
        metrics = self._metrics
        self.ended = perf_counter()
        done = sum(branch.reason is not None for branch in self._branches.values())
        metrics.branches.observe(branches)
        metrics.longest_output.observe(max((branch.tokens for branch in self._branches.values()), default=0))
        if done >= branches:
            self.ended = max(branch.last for branch in self._branches.values()) or self.ended
            metrics.e2e.observe(max(self.ended - self.started, 0.0))
        metrics.finished[FinishReason.ABORT.value] += max(branches - done, 0)

    def _finish(self, branch: _Branch, reason: FinishReason) -> None:
        metrics = self._metrics
        metrics.finished[reason.value] += 1
        metrics.output_size.observe(branch.tokens)
        tpot = (branch.last - branch.first) / (branch.tokens - 1) if branch.tokens > 1 else None
        if tpot is not None:
            metrics.tpot.observe(tpot)
        if branch.tokens:
            metrics.window.ended.add((branch.first - self.started, tpot))


class _Branch:
    __slots__ = ("first", "last", "reason", "tokens")

    def __init__(self) -> None:
        self.first = self.last = 0.0
        self.tokens = 0
        self.reason: FinishReason | None = None
