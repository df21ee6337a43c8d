"""Counts by bucket, with their sum: small enough to keep per engine and to send with its numbers."""

from __future__ import annotations

from bisect import bisect_left

import msgspec

LATENCY = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
TOKENS = tuple(float(1 << power) for power in range(18))  # 1 to 131072


class Histogram(msgspec.Struct):
    bounds: tuple[float, ...]
    counts: list[int] = []
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def add(self, other: Histogram) -> None:
        """What another counted, in the same buckets."""
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        self.total += other.total

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound, observations up to it), as Prometheus wants buckets."""
        rows: list[tuple[str, float]] = []
        seen = 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            seen += count
            rows.append((bound, seen))
        return rows
