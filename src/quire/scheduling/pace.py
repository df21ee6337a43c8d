"""How many prompt tokens a step may take on while answers are being streamed, so that it ends in time.

A step takes about `base + rate * work`, learned from how long steps took lately. A prompt token is one unit of work
and more the further back it attends. Refuses to know: sequences, pages.
"""

from __future__ import annotations

from quire.types.plan import StepPlan

CONTEXT = 16384  # tokens behind a token that double its work
LEAST = 64  # prompt tokens of a step, however slow: prompts must get on too
MEMORY = 0.2  # weight of the latest step


class Pace:
    def __init__(self, target: float | None, most: int):
        """`target`: seconds; None: a step takes `most` prompt tokens whatever that lasts."""
        self._target = target
        self._most = most
        self._base = 0.0  # seconds of a step without prompt tokens
        self._rate = 0.0  # seconds of a unit of work
        self._last = 0.0  # when the step before ended

    def budget(self, *, flowing: bool) -> int:
        """Work for the next step; `flowing`: somebody is waiting for the token after the last."""
        if self._target is None or not flowing or not self._rate:
            return self._most
        return min(self._most, max(LEAST, int((self._target - self._base) / self._rate)))

    def fit(self, start: int, budget: int) -> int:
        """Prompt tokens from position `start` on that are within the budget."""
        return budget if self._target is None else max(int(budget / (1 + start / CONTEXT)), min(budget, 1))

    def cost(self, start: int, count: int) -> int:
        return count if self._target is None else int(count * (1 + start / CONTEXT))

    def ended(self, now: float, plan: StepPlan, *, alone: bool) -> None:
        """A step is over; `alone`: none was in flight when it was planned, so the time since the last tells nothing."""
        took, self._last = now - self._last, now
        if self._target is None or alone or not plan.rows or took <= 0:
            return
        work = sum(self.cost(row.start, row.count) for row in plan.rows if row.count > 1)
        if work < LEAST:
            self._base += MEMORY * (took - self._base)
        else:
            rate = max(took - self._base, 0.1 * took) / work
            self._rate += (MEMORY if self._rate else 1.0) * (rate - self._rate)
