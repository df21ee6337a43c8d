"""Admission and preemption when memory is short: nobody is made to start over again and again.

Every preemption raises the pages that must stay free when somebody is let in; every end lowers them a little. And
whoever was preempted `MOST` times comes back only if all such sequences fit at their longest together; from then on
they are nobody's victims, because they never need to be.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.memory.manager import KVManager
from quire.scheduling.sequence import Sequence as Seq

MOST = 3
EASE = 0.9  # what an end leaves of the pages kept free


class PreemptionGuard:
    def __init__(self, memory: KVManager):
        self._memory = memory
        self._least = max(1, memory.pool.total // 100)
        self._most = memory.pool.total // 4
        self._spare = float(self._least)
        self._reserved: dict[Seq, int] = {}  # pages set aside in thought for those who may not be preempted again

    @property
    def spare(self) -> int:
        """Pages to leave free when a sequence is let in beside others."""
        return int(self._spare)

    def victims(self, running: Sequence[Seq]) -> list[Seq]:
        """Those who may be preempted; all, if there is no other way."""
        return [seq for seq in running if seq not in self._reserved] or list(running)

    def admits(self, seq: Seq) -> bool:
        """Whether a sequence that gave way often enough can now run to its end."""
        if seq.preempted < MOST:
            return True
        return sum(self._reserved.values()) + self._longest(seq) <= self._memory.pool.total or not self._reserved

    def started(self, seq: Seq) -> None:
        if seq.preempted >= MOST:
            self._reserved[seq] = self._longest(seq)

    def preempted(self, seq: Seq) -> None:
        seq.preempted += 1
        self._reserved.pop(seq, None)
        self._spare = min(self._most, self._spare * 2)

    def ended(self, seq: Seq) -> None:
        self._reserved.pop(seq, None)
        self._spare = max(self._least, self._spare * EASE)

    def _longest(self, seq: Seq) -> int:
        return self._memory.layout.pages_for(min(seq.limit, seq.peak))
