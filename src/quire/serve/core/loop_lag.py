"""Event-loop lag: how much later than asked a sleeping task wakes up. What users feel when the loop is held up.

Refuses to know: what holds it up.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import deque
from time import perf_counter

PERIOD = 0.02
KEPT = 3000  # samples, about a minute
BOUNDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)


class LagMonitor:
    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)
        self.total = 0.0
        self.recent: deque[float] = deque(maxlen=KEPT)

    async def run(self) -> None:
        """Measure until cancelled."""
        while True:
            due = perf_counter() + PERIOD  # the loop's own clock may be no finer than a millisecond
            await asyncio.sleep(PERIOD)
            self.note(max(0.0, perf_counter() - due))

    def note(self, lag: float) -> None:
        self.counts[bisect_left(BOUNDS, lag)] += 1
        self.total += lag
        self.recent.append(lag)

    def take(self) -> tuple[list[int], float]:
        """What was counted since the last take, which begins anew."""
        told, self.counts, self.total = (self.counts, self.total), [0] * (len(BOUNDS) + 1), 0.0
        return told

    def add(self, counts: list[int], total: float) -> None:
        """What another process took."""
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, counts, strict=True)]
        self.total += total

    def percentile(self, share: float) -> float:
        """Of the last minute, roughly; 0 while nothing was measured."""
        ordered = sorted(self.recent)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound, samples up to it), as Prometheus wants buckets."""
        rows: list[tuple[str, float]] = []
        seen = 0
        for bound, count in zip((*map(str, BOUNDS), "+Inf"), self.counts, strict=True):
            seen += count
            rows.append((bound, seen))
        return rows
