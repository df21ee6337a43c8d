"""How long a request will wait for its first token, predicted when it is queued and checked against what came true.

List scheduling, simulated over the cost model that steps are budgeted by: those that run end after as many steps as
their answers are expected to take, those ahead in the policy's order take their slots and pages, and prompts are
computed one behind the other:

    slot and pages come free ──► prompts ahead ──► its own prompt ──► first token

What this leaves out (who comes later and goes first, who is displaced) is learned as a correction: the median of real
waits over those simulated, for each of a few regimes. Where whoever is too late goes last, it is learned who will be
(`lateness.py`): such a request waits at least until all others have begun, if nobody came any more, and at most about
`max_wait`, if they keep coming; the geometric mean of both is predicted. Refuses to know: who refuses whom for it.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import exp, log, sqrt

from quire.memory.manager import KVManager
from quire.scheduling.feature import SchedulingFeature
from quire.scheduling.features.lateness import LatenessModel
from quire.scheduling.features.timeline_recorder import TimelineRecorder
from quire.scheduling.plan_builder import PlanBuilder
from quire.scheduling.prefill_budget import PrefillLimiter
from quire.scheduling.sequence import Sequence
from quire.scheduling.sequence_table import SequenceTable
from quire.types.clock import Clock
from quire.types.request import FinishReason

MAX_SCANNED = 64  # sequences ahead that are gone through one by one; those behind them count as their mean
MAX_CORRECTION = 64.0
MIN_CHECKED = 16  # predictions that came true before any is relied on
LEARNING_RATE = 0.05  # of the logarithm of a correction, for each wait
OUTPUT_WEIGHT = 0.05  # of the latest answer in the mean length, where no lengths are predicted
RESIDUAL_SHARE = 0.25  # of the expected length, that is still to come of an answer that is longer than expected

Regime = tuple[object, ...]


@dataclass
class WaitCorrection:
    """The median of real over predicted, learned one by one."""

    logarithm: float = 0.0
    seen: int = 0

    def learn(self, ratio: float) -> None:
        self.seen += 1
        rate = max(LEARNING_RATE, 1 / self.seen)
        self.logarithm += rate if log(ratio) > self.logarithm else -rate
        self.logarithm = max(-log(MAX_CORRECTION), min(log(MAX_CORRECTION), self.logarithm))


@dataclass(frozen=True)
class Running:
    """Those that run, as of one step: when each ends and the pages it then gives back, the earliest first."""

    ends: list[tuple[float, int]]
    prompts: list[Sequence]  # ... of them, in the midst of their prompts


@dataclass
class Prediction:
    made: float  # when
    seconds: float  # without the correction
    regime: Regime
    target: float  # beyond which it goes last; 0: none
    late: bool  # expected to be
    ratio: float = 0.0  # of the real wait to the seconds; 0: not known
    over: bool = False


@dataclass
class SimulatedDevice:
    """Slots, pages and the time of the device, simulated."""

    slots: float
    pages: int
    ends: list[tuple[float, int]]
    busy: float  # until when prompts ahead are computed
    waited: bool = field(default=False)

    def reach(self, pages: int) -> int:
        """Until there is a slot, and so many pages. How many run then."""
        while self.ends and (self.ends[0][0] <= self.busy or self.slots < 1 or self.pages < pages):
            end, freed = heapq.heappop(self.ends)
            if end > self.busy:
                self.busy, self.waited = end, True
            self.slots += 1
            self.pages += freed
        return len(self.ends)

    def start(self, pages: int, prefill: float, decode: float) -> None:
        """One more takes a slot and pages."""
        self.slots -= 1
        self.pages -= pages
        self.busy += prefill
        heapq.heappush(self.ends, (self.busy + decode, pages))


class WaitPrediction(SchedulingFeature):
    def __init__(
        self,
        table: SequenceTable,
        memory: KVManager,
        limiter: PrefillLimiter,
        timeline: TimelineRecorder,
        clock: Clock,
        *,
        lengths: bool,
        late_last: bool,
        slo_ttft: float | None,
        max_wait: float,
    ):
        """`lengths`: those of answers are predicted; `late_last`: whoever is too late goes last, until it has waited
        `max_wait` seconds; `slo_ttft`: of requests without a target of their own."""
        self._table = table
        self._memory = memory
        self._limiter = limiter
        self._timeline = timeline
        self._clock = clock
        self._lengths = lengths
        self._lateness = LatenessModel() if late_last else None
        self._max_wait = max_wait
        self._slo_ttft = slo_ttft or 0.0
        self._ended = 0  # answers
        self._mean_outputs = 256.0  # of them; at first a guess
        self._corrections: dict[Regime, WaitCorrection] = {}
        self._predictions: dict[Sequence, Prediction] = {}  # of those without a first token
        self._late: deque[Prediction] = deque()  # those expected to be, as they came, from the first without one on
        self._running: tuple[int, Running] | None = None  # as of so many steps
        self._queue: tuple[int, SimulatedDevice] | None = None  # ... behind the first of a long queue

    def queued(self, seq: Sequence, in_flight: Iterable[PlanBuilder]) -> float:
        """Predict the wait of a sequence that has just been queued; returns what of it is due to others, 0 if there are
        none or too little is known yet: however slow the device seems, one that is idle takes whatever comes. For what
        runs in the background nobody waits."""
        if not seq.draws or seq.request.background or not self._limiter.knows:
            return 0.0
        busy = sum(self._limiter.step_seconds(step.plan) for step in in_flight) + self._limiter.recovery
        seconds, waited = self._simulate_wait(seq, busy, last=False)
        target = (seq.request.slo_ttft or self._slo_ttft) if self._lateness is not None else 0.0
        late = self._expects_late(seq, target, seconds)
        if late:
            seconds, waited = self._simulate_wait(seq, busy, last=True)
            seconds = sqrt(seconds * max(seconds, self._max_wait))
        first = not self._table.waiting.before(seq)
        regime = (seq.rank[0], waited, first, late, round(log(target, 2)) if target else None)
        made = self._predictions[seq] = Prediction(self._clock.now, seconds, regime, target, late)
        if late:
            self._late.append(made)
        correction = self._corrections.get(regime)
        predicted = seconds * (exp(correction.logarithm) if correction else 1.0)
        if target and not late:
            predicted = min(predicted, max(seconds, target))
        seq.log.predicted_wait = predicted
        alone = not (self._table.running or len(self._table.waiting) > 1)
        checked = sum(correction.seen for correction in self._corrections.values())
        if alone or checked < MIN_CHECKED:
            return 0.0
        return max(0.0, predicted - self._prefill(seq, len(self._table.running)))

    def refused(self, seq: Sequence) -> None:
        """It does not wait, for what was predicted: nothing can come true of that, so what was learned counts for less.
        Else a correction that is wrong once would refuse all who could put it right."""
        made = self._predictions.get(seq)
        if made is not None and (correction := self._corrections.get(made.regime)) is not None:
            correction.logarithm *= 1 - LEARNING_RATE

    def _expects_late(self, seq: Sequence, target: float, seconds: float) -> bool:
        """Whether it will go last, because it can no longer be in time."""
        if self._lateness is None or not target:
            return False
        ahead, prefill = self._table.waiting.before(seq), self._prefill(seq, len(self._table.running))
        return self._lateness.expects(seq.id, self._clock.now, target, seconds=seconds, prefill=prefill, ahead=ahead)

    def _simulate_wait(self, seq: Sequence, busy: float, *, last: bool) -> tuple[float, bool]:
        """Seconds, and whether a slot or pages had to come free; `last`: all that wait go before it."""
        limiter, waiting = self._limiter, self._table.waiting
        running = self._as_of_now()
        scanned = [one for one in waiting.first(MAX_SCANNED) if one is not seq]
        ahead = scanned if last else [one for one in scanned if one.rank < seq.rank]
        unscanned = max(0, (len(waiting) - 1 if last else waiting.before(seq)) - len(ahead))
        rows = len(running.ends)
        busy += sum(self._prefill(one, rows) for one in running.prompts if last or one.rank < seq.rank)
        device = self._after_those_ahead(ahead, running, busy)
        if unscanned and ahead:
            device.busy *= 1 + unscanned / len(ahead)
        pages = self._memory.layout.pages_for(seq.known)
        rows = device.reach(pages)
        device.start(pages, max(self._prefill(seq, rows), limiter.decode_seconds(rows)), 0.0)
        behind = sum(self._prefill(one, rows) for one in (*running.prompts, *scanned) if one.rank > seq.rank)
        longest = limiter.longest_step(rows, decoding=rows > 0)  # others fill the step that its own prompt ends in
        return device.busy + min(behind, longest - device.busy % longest), device.waited

    def _after_those_ahead(self, ahead: list[Sequence], running: Running, busy: float) -> SimulatedDevice:
        """The device once all ahead have begun; as many as are gone through, once a step: a burst of requests costs no
        more than its first few."""
        steps, many = self._timeline.stats.steps, len(ahead) >= MAX_SCANNED - 1
        if many and self._queue is not None and self._queue[0] == steps:
            return replace(self._queue[1], ends=list(self._queue[1].ends))
        free = min(len(self._table.slots), self._limiter.room(len(self._table.running)))
        device = SimulatedDevice(free, self._memory.pool.available, list(running.ends), busy)
        for one in ahead:
            pages = self._memory.layout.pages_for(one.known)
            rows = device.reach(pages)
            device.start(pages, self._prefill(one, rows), self._decode(one, self._limiter.pace_of(rows + 1)))
        if many:
            self._queue = steps, replace(device, ends=list(device.ends))
        return device

    def _as_of_now(self) -> Running:
        steps = self._timeline.stats.steps
        if self._running is None or self._running[0] != steps:
            decode, pace = self._decode, self._limiter.pace_of(len(self._table.running))
            ends = [(decode(one, pace), sum(map(len, one.table.pages))) for one in self._table.running]
            heapq.heapify(ends)
            prompts = [one for one in self._table.running if len(one.tokens) + one.pending - one.computed > 1]
            self._running = steps, Running(ends, prompts)
        return self._running[1]

    def _prefill(self, seq: Sequence, rows: int) -> float:
        """Seconds that the rest of a prompt takes while so many others run."""
        count = max(1, seq.known - seq.computed)
        return self._limiter.prompt_seconds(seq.computed, count, decoding=rows > 0, rows=rows)

    def _decode(self, seq: Sequence, pace: float) -> float:
        """Seconds that the rest of an answer takes, a token each so many."""
        likely = seq.expected.likely if self._lengths else min(self._mean_outputs, seq.limit - seq.prompt_len)
        left, least = likely - (len(seq.tokens) - seq.prompt_len), RESIDUAL_SHARE * likely
        return (left if left > least else least) * pace

    def drew(self, seq: Sequence, drafted: int, accepted: int, forced: int) -> None:
        made = self._predictions.pop(seq, None)
        if made is None:
            return
        real = max(self._clock.now - made.made, 1e-6)
        self._timeline.stats.wait_ratios.observe(real / seq.log.predicted_wait)
        if self._lateness is not None:
            self._lateness.served(seq.id, self._clock.now)
        late = 0 < made.target < real
        self._over(made, real / made.seconds if late is made.late else 0.0)

    def _over(self, made: Prediction, ratio: float) -> None:
        """The correction is learned, from those who are in time or late as expected; from the late in the order in
        which they came: the first that are served say little about how long the others wait."""
        made.ratio, made.over = ratio, True
        learned = [] if made.late else [made]
        while self._late and self._late[0].over:
            learned.append(self._late.popleft())
        for one in learned:
            if one.ratio:
                self._corrections.setdefault(one.regime, WaitCorrection()).learn(one.ratio)

    def finished(self, seq: Sequence, reason: FinishReason | None) -> None:
        if (made := self._predictions.pop(seq, None)) is not None:
            self._over(made, 0.0)
            if self._lateness is not None:
                self._lateness.dropped(seq.id)
        if not self._lengths and reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._ended += 1
            self._mean_outputs += max(OUTPUT_WEIGHT, 1 / self._ended) * (seq.outputs - self._mean_outputs)
