"""What happened since somebody last looked: a sample of latencies small enough to send every second.

Refuses to know: who looks.
"""

from __future__ import annotations

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
    """At most KEPT of all values seen, each as likely as any other."""

    __slots__ = ("_random", "kept", "seen")

    def __init__(self, random: Random):
        self._random = random
        self.kept: list[T] = []
        self.seen = 0

    def add(self, value: T) -> None:
        self.seen += 1
        if len(self.kept) < KEPT:
            self.kept.append(value)
        elif (place := self._random.randrange(self.seen)) < KEPT:
            self.kept[place] = value


class Window:
    def __init__(self) -> None:
        self._random = Random(0)
        self._begin()

    def _begin(self) -> None:
        self.tokens = 0
        self.firsts: Sample[float] = Sample(self._random)
        self.gaps: Sample[float] = Sample(self._random)
        self.ended: Sample[tuple[float, float | None]] = Sample(self._random)

    def take(self) -> Glance:
        """Everything since the last take."""
        glance = Glance(self.tokens, self.ended.seen, self.firsts.kept, self.ended.kept, self.gaps.kept)
        self._begin()
        return glance
