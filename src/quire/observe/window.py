"""What happened since the last look: a sample of latencies small enough to send every second.

Refuses to know: who looks.
"""

from __future__ import annotations

import math
from random import Random
from typing import Generic, TypeVar

import msgspec

T = TypeVar("T")

KEPT = 256  # latencies of each kind; beyond, a fair sample


class Glance(msgspec.Struct):
    """`ended` has (time to first token, time per output token) of requests that ended well."""

    tokens: int
    finished: int
    firsts: list[float]  # times to first tokens that came
    ended: list[tuple[float, float | None]]
    gaps: list[float]


class Sample(Generic[T]):
    """At most KEPT of all values seen, each as likely as any other: a reservoir that draws how many to skip (Li's
    Algorithm L), so that most values cost a comparison."""

    __slots__ = ("_next", "_random", "_weight", "kept", "seen")

    def __init__(self, random: Random):
        self._random = random
        self._weight = 1.0
        self._next = 0  # the value that is to be kept next, once there are KEPT
        self.kept: list[T] = []
        self.seen = 0

    def add(self, value: T) -> None:
        self.seen += 1
        if self.seen <= KEPT:
            self.kept.append(value)
            if self.seen == KEPT:
                self._skip()
        elif self.seen >= self._next:
            self.kept[self._random.randrange(KEPT)] = value
            self._skip()

    def _skip(self) -> None:
        self._weight *= (1.0 - self._random.random()) ** (1 / KEPT)
        rest = min(self._weight, 1.0 - 1e-12)
        self._next = self.seen + 1 + int(math.log(1.0 - self._random.random()) / math.log1p(-rest))


class Window:
    def __init__(self) -> None:
        self._random = Random(0)
        self._begin()

    def _begin(self) -> None:
        self.tokens = 0
        self.firsts: Sample[float] = Sample(self._random)
        self.gaps: Sample[float] = Sample(self._random)
        self.ended: Sample[tuple[float, float | None]] = Sample(self._random)

    def add(self, glance: Glance) -> None:
        """What happened elsewhere."""
        self.tokens += glance.tokens
        for sample, values in ((self.firsts, glance.firsts), (self.gaps, glance.gaps)):
            for value in values:
                sample.add(value)
        for ended in glance.ended:
            self.ended.add(ended)
        self.ended.seen += glance.finished - len(glance.ended)

    def take(self) -> Glance:
        """Everything since the last take."""
        glance = Glance(self.tokens, self.ended.seen, self.firsts.kept, self.ended.kept, self.gaps.kept)
        self._begin()
        return glance
