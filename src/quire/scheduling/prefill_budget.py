"""How many prompt tokens a step may take on while answers are being streamed, so that it ends in time.

What steps take is learned from the latest of them (`step_times.py`). Refuses to know: sequences, pages.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from math import inf, log
from typing import NamedTuple

from quire.scheduling.step_times import StepTimes, plan_work, work_of
from quire.types.plan import StepPlan

MIN_PREFILL_TOKENS = 64  # prompt tokens of a step, however slow: prompts must get on too
LATE = 1.15  # times the target, from which on steps are late however little of them is prompts
PACE_WEIGHT = 0.1  # of the latest step, in how long steps take that draw tokens


class Budget(NamedTuple):
    """What is left for prompts in a step: so many tokens, and so much work; and what is set aside of both."""

    tokens: int
    work: float = inf
    begun: bool = False
    aside: tuple[int, float] = (0, 0.0)

    def fit(self, start: int) -> int:
        """Tokens from position `start` on that are within it; of a whole budget one at least."""
        return max(int(min(self.tokens, self.work / work_of(start, 1))), 0 if self.begun else 1)

    def less(self, start: int, count: int) -> Budget:
        return Budget(self.tokens - count, self.work - work_of(start, count), self.begun or count > 0, self.aside)

    def part(self, share: float) -> Budget:
        """A part of it; the rest is set aside."""
        tokens, work = int(self.tokens * share), self.work * share
        aside = self.tokens - tokens, self.work - work if self.work < inf else 0.0
        return Budget(tokens, work, self.begun, aside)

    def own(self) -> Budget:
        """What was set aside, by itself, if there is so much work at all that a step may have; else with the rest."""
        tokens, work = self.aside
        return Budget(tokens, work, self.begun) if self.work < inf else self.whole()

    def whole(self) -> Budget:
        """With what was set aside."""
        tokens, work = self.aside
        return Budget(self.tokens + tokens, self.work + work, self.begun)


class PrefillLimiter:
    def __init__(self, target: float, most: int, captured: Sequence[tuple[int, int]] = ()):
        """`target`: seconds a step may last unless a policy says otherwise; 0: a step takes `most` prompt tokens
        whatever that lasts. `captured`: (tokens, rows) that steps are padded to."""
        self._default = self._target = target
        self._most = most
        self._sizes = sorted({tokens for tokens, _ in captured})
        self._times = StepTimes()
        self._rows = 1  # that draw tokens, in the step that was planned last
        self._last = 0.0  # when the step before ended
        self._pace = 0.0  # seconds of the latest steps that drew tokens
        self._asked = False  # whether a policy set the target

    def budget(self, *, decoding: bool, rows: int = 1, target: float | None = None) -> Budget:
        """For the next step, in which so many rows draw tokens; `decoding`: a running sequence is waiting for its next
        token, or one that starts beside a long prompt for its first."""
        self._target, self._asked = (self._default, False) if target is None else (target, True)
        self._rows = max(1, rows)
        if not self._target or not decoding or not self._times.rate:
            return Budget(self._most)
        work = max(MIN_PREFILL_TOKENS, self._fitting(self._rows))
        return Budget(self._unpadded(self._rows, work), work)

    @property
    def behind(self) -> bool:
        """Whether steps take longer than the target that a policy set, and would without prompts too or do so by much:
        one more sequence would make all of them slower. Steps that prompts fill up to the target are not late."""
        return self._asked and (self.step > self._target or self._pace > LATE * self._target)

    def seconds(self, start: int, count: int) -> float:
        """About how long so many prompt tokens take from `start` on, as the latest steps say; 0: nothing is known."""
        return work_of(start, count) * self._times.rate

    def step_seconds(self, plan: StepPlan) -> float:
        """About how long a step takes."""
        drawing = [row.count for row in plan.rows].count(1)
        return self._times.decode_seconds(drawing) + plan_work(plan) * self._times.rate

    def prompt_seconds(self, start: int, count: int, *, decoding: bool, rows: int) -> float:
        """About how long so many prompt tokens take from `start` on, among others: their part of steps in which so many
        rows draw tokens included."""
        share = work_of(start, count) / self._most_work(rows, decoding=decoding)
        return self.seconds(start, count) + self.decode_seconds(rows) * share

    def decode_seconds(self, rows: int) -> float:
        """About how long a step takes in which so many rows draw tokens and no prompt is computed; 0: nothing is
        known."""
        return self._times.decode_seconds(rows)

    def _most_work(self, rows: int, *, decoding: bool) -> float:
        """Of prompts, in a step of now."""
        if not (decoding and self._target and self._times.rate):
            return float(self._most)
        return self._unpadded(rows, max(MIN_PREFILL_TOKENS, self._fitting(rows)))

    def _unpadded(self, rows: int, work: float) -> int:
        """Prompt tokens of up to so much work that fill a captured size beside so many rows: the step would take as
        long with fewer, and the next size longer than it may."""
        at = bisect_right(self._sizes, rows + work)
        if 0 < at < len(self._sizes) and (tokens := self._sizes[at - 1] - rows) >= MIN_PREFILL_TOKENS:
            return min(self._most, tokens)
        return min(self._most, int(work))

    def longest_step(self, rows: int, *, decoding: bool) -> float:
        """About how long a step takes that is full of prompts."""
        return self.decode_seconds(rows) + self._most_work(rows, decoding=decoding) * self._times.rate

    @property
    def knows(self) -> bool:
        """Whether it has been seen how long prompts take."""
        return self._times.rate > 0

    @property
    def step(self) -> float:
        """Seconds of a step of now without prompts; 0: nothing is known."""
        return self._times.decode_seconds(self._rows)

    @property
    def pace(self) -> float:
        """Seconds of the latest steps that drew tokens."""
        return self._pace

    def pace_of(self, rows: int) -> float:
        """... as it is among so many rows: prompts beside them take what they take now."""
        return max(self._times.decode_seconds(rows), self._pace + self._times.decode_seconds(rows) - self.step)

    def room(self, running: int) -> float:
        """How many sequences more would keep to the target that a policy set; below 0: so many are too many."""
        return running * (self._target / self.step - 1) if self._asked and self.step else inf

    @property
    def recovery(self) -> float:
        """Seconds until steps without prompts have brought the pace back to the target."""
        if not self.behind or self.step >= self._target:
            return 0.0
        return self.step * log((self._pace - self.step) / (self._target - self.step)) / -log(1 - PACE_WEIGHT)

    def _fitting(self, rows: int) -> float:
        """Work that ends in time."""
        return (self._target - self._times.decode_seconds(rows)) / self._times.rate

    def ended(self, now: float, plan: StepPlan, *, began: float | None) -> None:
        """A step is over; `began`: when it was planned, if none was in flight. Others begin when the last ends."""
        took, self._last = now - (self._last if began is None else began), now
        if not plan.rows or plan.probes or took <= 0:
            return
        counts = [row.count for row in plan.rows]
        drawing = counts.count(1)
        if drawing:
            self._pace += PACE_WEIGHT * (took - self._pace)
        self._times.learn(took, drawing, plan_work(plan) if drawing < len(counts) else 0.0)
