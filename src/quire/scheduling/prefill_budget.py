"""How many prompt tokens a step may take on while answers are being streamed, so that it ends in time.

A step takes about `base + rate * work`, learned from how long steps took lately. A prompt token is one unit of work
and more the further back it attends. Refuses to know: sequences, pages.
"""

from __future__ import annotations

from math import inf, log
from typing import NamedTuple

from quire.types.plan import StepPlan

WORK_DOUBLING_CONTEXT = 16384  # tokens of context that double a token's work
MIN_PREFILL_TOKENS = 64  # prompt tokens of a step, however slow: prompts must get on too
EMA_WEIGHT = 0.2  # weight of the latest step
LATE = 1.15  # times the target, from which on steps are late however little of them is prompts
PACE_WEIGHT = 0.1  # the same, in how long steps take that draw tokens


def _work(start: int, count: int) -> float:
    """Of so many tokens from position `start` on."""
    return count * (1 + start / WORK_DOUBLING_CONTEXT)


def _plan_work(plan: StepPlan) -> float:
    return sum([_work(row.start - row.shift, row.count) for row in plan.rows if row.count > 1])


class Budget(NamedTuple):
    """What is left for prompts in a step: so many tokens, and so much work; and what is set aside of both."""

    tokens: int
    work: float = inf
    begun: bool = False
    aside: tuple[int, float] = (0, 0.0)

    def fit(self, start: int) -> int:
        """Tokens from position `start` on that are within it; of a whole budget one at least."""
        return max(int(min(self.tokens, self.work / _work(start, 1))), 0 if self.begun else 1)

    def less(self, start: int, count: int) -> Budget:
        return Budget(self.tokens - count, self.work - _work(start, count), self.begun or count > 0, self.aside)

    def part(self, share: float) -> Budget:
        """A part of it; the rest is set aside."""
        tokens, work = int(self.tokens * share), self.work * share
        aside = self.tokens - tokens, self.work - work if self.work < inf else 0.0
        return Budget(tokens, work, self.begun, aside)

    def whole(self) -> Budget:
        """With what was set aside."""
        tokens, work = self.aside
        return Budget(self.tokens + tokens, self.work + work, self.begun)


class PrefillLimiter:
    def __init__(self, target: float, most: int):
        """`target`: seconds a step may last unless a policy says otherwise; 0: a step takes `most` prompt tokens
        whatever that lasts."""
        self._default = self._target = target
        self._most = most
        self._base = 0.0  # seconds of a step without prompt tokens
        self._seconds = 0.0  # beyond that, of the latest steps with some, and their work
        self._work = 0.0
        self._last = 0.0  # when the step before ended
        self._pace = 0.0  # seconds of the latest steps that drew tokens
        self._asked = False  # whether a policy set the target

    def budget(self, *, decoding: bool, target: float | None = None) -> Budget:
        """For the next step; `decoding`: a running sequence is waiting for its next token."""
        self._target, self._asked = (self._default, False) if target is None else (target, True)
        if not self._target or not decoding or not self._work:
            return Budget(self._most)
        return Budget(self._most, max(MIN_PREFILL_TOKENS, self._fitting))

    @property
    def behind(self) -> bool:
        """Whether steps take longer than the target that a policy set, and would without prompts too or do so by much:
        one more sequence would make all of them slower. Steps that prompts fill up to the target are not late."""
        return self._asked and (self._base > self._target or self._pace > LATE * self._target)

    def seconds(self, start: int, count: int) -> float:
        """About how long so many prompt tokens take from `start` on, as the latest steps say; 0: nothing is known."""
        return _work(start, count) * self._seconds / self._work if self._work else 0.0

    def step_seconds(self, plan: StepPlan) -> float:
        """About how long a step takes."""
        return self._base + _plan_work(plan) * self._seconds / self._work if self._work else self._base

    def prompt_seconds(self, start: int, count: int, *, decoding: bool) -> float:
        """About how long so many prompt tokens take from `start` on, among others: their part of steps that draw
        tokens included."""
        return self.seconds(start, count) + self._base * _work(start, count) / self._most_work(decoding)

    def _most_work(self, decoding: bool) -> float:
        """Of prompts, in a step of now."""
        if not (decoding and self._target and self._work):
            return float(self._most)
        return min(self._most, max(MIN_PREFILL_TOKENS, self._fitting))

    def longest_step(self, *, decoding: bool) -> float:
        """About how long a step takes that is full of prompts."""
        return self._base + self._most_work(decoding) * self._seconds / self._work if self._work else self._base

    @property
    def step(self) -> float:
        """Seconds of a step without prompts; 0: nothing is known."""
        return self._base

    @property
    def pace(self) -> float:
        """Seconds of the latest steps that drew tokens."""
        return self._pace

    def room(self, running: int) -> float:
        """How many sequences more would keep to the target that a policy set; below 0: so many are too many."""
        return running * (self._target / self._base - 1) if self._asked and self._base else inf

    @property
    def recovery(self) -> float:
        """Seconds until steps without prompts have brought the pace back to the target."""
        if not self.behind or self._base >= self._target:
            return 0.0
        return self._base * log((self._pace - self._base) / (self._target - self._base)) / -log(1 - PACE_WEIGHT)

    @property
    def _fitting(self) -> float:
        """Work that ends in time."""
        return (self._target - self._base) * self._work / self._seconds

    def ended(self, now: float, plan: StepPlan, *, began: float | None) -> None:
        """A step is over; `began`: when it was planned, if none was in flight. Others begin when the last ends."""
        took, self._last = now - (self._last if began is None else began), now
        if not plan.rows or plan.probes or took <= 0:
            return
        counts = [row.count for row in plan.rows]
        if 1 in counts:
            self._pace += PACE_WEIGHT * (took - self._pace)
        work = _plan_work(plan) if max(counts) > 1 else 0
        if work <= MIN_PREFILL_TOKENS:  # as little as there may be: the base is what keeps it so
            self._base += EMA_WEIGHT * (took - self._base)
            if (
                work and self._work and 0 < self._fitting <= MIN_PREFILL_TOKENS
            ):  # or the rate, of which nothing is learned here:
                self._seconds *= 1 - EMA_WEIGHT  # better by and by, until more is tried
        else:  # those with much work tell more
            self._seconds += max(took - self._base, 0.1 * took) - EMA_WEIGHT * self._seconds
            self._work += work - EMA_WEIGHT * self._work
