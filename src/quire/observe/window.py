"""What happened since somebody last looked: a sample of latencies small enough to send every second.

Refuses to know: who looks.
"""

from __future__ import annotations

from random import Random

import msgspec

KEPT = 256  # latencies of each kind; beyond, a fair sample


class Glance(msgspec.Struct):
    """`ended` has (time to first token, time per output token) of requests that ended well."""

    tokens: int
    finished: int
    ended: list[tuple[float, float | None]]
    gaps: list[float]


class Window:
    def __init__(self) -> None:
        self._random = Random(0)
        self._begin()

    def _begin(self) -> None:
        self.tokens = self._finished = self._gap_count = 0
        self._ended: list[tuple[float, float | None]] = []
        self._gaps: list[float] = []

    def gap(self, seconds: float) -> None:
        self._gap_count += 1
        if len(self._gaps) < KEPT:
            self._gaps.append(seconds)
        elif (place := self._random.randrange(self._gap_count)) < KEPT:
            self._gaps[place] = seconds

    def end(self, ttft: float, tpot: float | None) -> None:
        self._finished += 1
        if len(self._ended) < KEPT:
            self._ended.append((ttft, tpot))
        elif (place := self._random.randrange(self._finished)) < KEPT:
            self._ended[place] = (ttft, tpot)

    def take(self) -> Glance:
        """Everything since the last take."""
        glance = Glance(self.tokens, self._finished, self._ended, self._gaps)
        self._begin()
        return glance
