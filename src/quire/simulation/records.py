"""What came of simulated requests: one row each, and gaps between tokens as a histogram.

Refuses to know: why the scheduler decided as it did.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable
from itertools import groupby
from math import exp, log

import msgspec

from quire.memory.manager import Hit
from quire.scheduling import SchedulingFeature
from quire.scheduling.plan_builder import PlanBuilder
from quire.scheduling.sequence import Sequence
from quire.simulation.traces import Arrival
from quire.types.clock import Clock
from quire.types.events import EngineStats
from quire.types.plan import StepResult
from quire.types.request import ENDED_WELL, FinishReason

GAP_RESOLUTION = 400  # buckets of gaps by a factor of e: percentiles are right to a quarter of a percent
COLUMNS = ("arrival", "ttft", "ttlt", "wait", "outputs", "prompt", "ttft_target", "tpot_target", "tenant", "background",
           "waited", "predicted")  # fmt: skip

Progress = tuple[float, int, int]  # when, of which request, and tokens it came to; 0: its first


class Gaps(msgspec.Struct):
    """Times between tokens of one answer, over all answers."""

    counts: dict[int, int] = {}
    total: float = 0.0

    def add(self, gap: float, times: int) -> None:
        self.total += gap * times
        bucket = round(log(gap) * GAP_RESOLUTION) if gap > 0 else -(1 << 30)
        self.counts[bucket] = self.counts.get(bucket, 0) + times

    def merge(self, other: Gaps) -> None:
        self.total += other.total
        for bucket, times in other.counts.items():
            self.counts[bucket] = self.counts.get(bucket, 0) + times

    def spread(self) -> dict[str, float | None]:
        count = sum(self.counts.values())
        if not count:
            return dict.fromkeys(("mean", "p50", "p90", "p99"))
        found: dict[str, float | None] = {"mean": self.total / count}
        for percent in (50, 90, 99):
            left = count * percent / 100
            for bucket in sorted(self.counts):
                left -= self.counts[bucket]
                if left <= 0:
                    found[f"p{percent}"] = exp(bucket / GAP_RESOLUTION) if bucket > -(1 << 30) else 0.0
                    break
        return found


class Result(msgspec.Struct):
    """Of one replica, or of several: columns of those that finished, and counters."""

    rows: dict[str, array[float]]
    tenants: list[str]
    gaps: Gaps
    refused: dict[str, int]
    lost: int = 0  # ended without an answer
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    busy: float = 0.0
    end: float = 0.0
    served: dict[str, int] = {}  # token rows by tenant
    replica_seconds: float = 0.0  # that replicas were there, of all together
    replicas_peak: int = 0
    prefill_peak: int = 0  # of them, those that computed prompts for the others
    role_switches: int = 0

    def packed(self) -> bytes:
        columns = {name: column.tobytes() for name, column in self.rows.items()}
        return msgspec.msgpack.encode({**msgspec.structs.asdict(self), "rows": columns})

    @classmethod
    def unpacked(cls, data: bytes) -> Result:
        fields = msgspec.msgpack.decode(data, strict=False)
        rows = {name: array("d", column) for name, column in fields.pop("rows").items()}
        gaps = msgspec.convert(fields.pop("gaps"), Gaps, strict=False)
        return cls(rows=rows, gaps=gaps, **fields)

    def merge(self, other: Result) -> None:
        names = {i: self._tenant(name) for i, name in enumerate(other.tenants)}
        for column, values in other.rows.items():
            mapped = array("d", (names[int(v)] for v in values)) if column == "tenant" else values
            self.rows[column].extend(mapped)
        self.gaps.merge(other.gaps)
        self.refused = dict(Counter(self.refused) + Counter(other.refused))
        self.served = dict(Counter(self.served) + Counter(other.served))
        for name in ("lost", "prompt_tokens", "cached_tokens", "output_tokens", "preemptions", "steps", "busy"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.end = max(self.end, other.end)

    def _tenant(self, name: str) -> int:
        if name not in self.tenants:
            self.tenants.append(name)
        return self.tenants.index(name)


class Recorder(SchedulingFeature):
    """Notes what becomes of requests, as the sequence table tells of it."""

    def __init__(self, clock: Clock, lengths: dict[str, int], *, observes: bool = False):
        """`observes`: first tokens and ends are told of as they come."""
        self._clock = clock
        self._lengths = lengths
        self._arrivals: dict[str, tuple[Arrival, float]] = {}  # and when the engine was told of it
        self._rows: dict[str, array[float]] = {name: array("d") for name in COLUMNS}
        self._tenants: dict[str, int] = {}
        self._gaps = Gaps()
        self._refused: Counter[str] = Counter()
        self._served: Counter[str] = Counter()
        self._drawing: list[Sequence] = []  # those that the latest step drew for
        self._drew_at = 0.0  # ... and when
        self._drew: dict[Sequence, float] = {}  # when others drew last
        self._needs: dict[str, int] = {}  # tokens to compute, of requests without a first token
        self.tokens = 0  # ... of all of them
        self._observes = observes
        self._progress: list[Progress] = []
        self._prefill_only: set[str] = set()  # requests whose pages others want
        self._handed_over: set[str] = set()  # ... whose pages came from others
        self._counted_twice = Counter[str]()  # tokens of prompts and answers, by the counter that another has too
        self._prefilled: list[str] = []  # prompts computed for others
        self._lost = 0
        self._end = 0.0
        self.ended: Callable[[], None] = lambda: None  # called when a request has ended, however

    def expect(
        self, request: str, one: Arrival, need: int, *, prefill_only: bool = False, handed_over: bool = False
    ) -> None:
        """`need`: tokens to be computed before its first one."""
        self._arrivals[request] = one, self._clock.now
        self._needs[request] = need
        self.tokens += need
        if prefill_only:
            self._prefill_only.add(request)
        if handed_over:
            self._handed_over.add(request)
            self._counted_twice["prompt_tokens"] += one.prompt

    def take_prefilled(self) -> list[str]:
        """Prompts computed for others since it was last called."""
        found, self._prefilled = self._prefilled, []
        return found

    def take_progress(self) -> list[Progress]:
        """First tokens and ends since it was last called."""
        found, self._progress = self._progress, []
        return found

    def _first_token(self, request: str, *, drawn: bool = True) -> None:
        """Of its answer, or none comes any more."""
        if (need := self._needs.pop(request, None)) is not None:
            self.tokens -= need
            if drawn and self._observes and request not in self._prefill_only:
                self._progress.append((self._clock.now, int(request), 0))

    def admitted(self, seq: Sequence, hit: Hit | None) -> None:
        if hit is not None and seq.request.id in self._handed_over:
            self._handed_over.discard(seq.request.id)
            self._counted_twice["cached_tokens"] += hit.tokens

    def refused(self, number: int, why: str) -> None:
        self._refused[why] += 1
        self.tokens -= self._needs.pop(str(number), 0)
        if self._observes:
            self._progress.append((self._clock.now, number, 1))
        self.ended()

    def prefill_refused(self, number: int) -> None:
        """It goes to who is to answer it, which refuses it too where it is too long."""
        name = str(number)
        self.tokens -= self._needs.pop(name, 0)
        self._arrivals.pop(name, None)
        self._prefill_only.discard(name)
        self._prefilled.append(name)

    def step_landed(self, step: PlanBuilder, result: StepResult) -> None:
        now, drew = self._clock.now, self._drew
        drawing = [seq for seq, epoch in step.samples if seq.epoch == epoch]
        if drawing and drawing == self._drawing:  # as in most steps
            self._gaps.add(now - self._drew_at, len(drawing))
        else:
            drew |= dict.fromkeys(self._drawing, self._drew_at)
            before = [drew.pop(seq, None) for seq in drawing]
            for seq, last in zip(drawing, before, strict=True):
                if last is None:
                    self._first_token(seq.request.id)
            for last, run in groupby(filter(None, before)):
                self._gaps.add(now - last, len(list(run)))
        self._drawing, self._drew_at = drawing, now

    def finished(self, seq: Sequence, reason: FinishReason | None) -> None:
        self._drew.pop(seq, None)
        if seq in self._drawing:
            self._drawing.remove(seq)
        self._first_token(seq.request.id, drawn=reason in ENDED_WELL)
        self._lengths.pop(seq.request.id, None)
        (one, queued), log_ = self._arrivals.pop(seq.request.id), seq.log
        self._end = max(self._end, self._clock.now)
        self._served[one.tenant] += seq.attained
        if seq.request.id in self._prefill_only:
            self._prefill_only.discard(seq.request.id)
            self._counted_twice["output_tokens"] += seq.outputs
            self._prefilled.append(seq.request.id)
            return
        if self._observes:
            self._progress.append((self._clock.now, int(seq.request.id), max(1, seq.outputs)))
        self.ended()
        if reason not in ENDED_WELL:
            self._lost += 1
            return
        tenant = self._tenants.setdefault(one.tenant, len(self._tenants))
        start = log_.arrival
        values = (one.at, log_.first_token - start, self._clock.now - start, log_.admitted - start, seq.outputs,
                  one.prompt, one.ttft, one.tpot, tenant, one.background, log_.first_token - queued,
                  log_.predicted_wait)  # fmt: skip
        for column, value in zip(self._rows.values(), values, strict=True):
            column.append(value)

    def result(self, stats: EngineStats, busy: float) -> Result:
        return Result(
            rows=self._rows,
            tenants=list(self._tenants),
            gaps=self._gaps,
            refused=dict(self._refused),
            lost=self._lost,
            prompt_tokens=stats.prompt_tokens - self._counted_twice["prompt_tokens"],
            cached_tokens=stats.cached_tokens - self._counted_twice["cached_tokens"],
            output_tokens=stats.output_tokens - self._counted_twice["output_tokens"],
            preemptions=stats.preemptions,
            steps=stats.steps,
            busy=busy,
            end=self._end,
            served=dict(self._served),
        )
