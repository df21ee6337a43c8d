"""Admission and preemption when memory is short: no sequence is made to start over again and again.

Every preemption for want of pages raises those that must stay free when a sequence is admitted beside others; every end
lowers them a little. And one that was preempted `MAX_PREEMPTIONS` times comes back only if all such sequences fit at
their longest together; from then on they are not preempted, because they never need to be.
"""

from __future__ import annotations

from collections.abc import Iterable

from quire.memory.manager import Hit, KVManager
from quire.scheduling.feature import SchedulingFeature
from quire.scheduling.features.timeline_recorder import TimelineRecorder
from quire.scheduling.sequence import Sequence
from quire.types.request import FinishReason

MAX_PREEMPTIONS = 3
SPARE_DECAY = 0.9  # what an end leaves of the pages kept free


class PreemptionGuard(SchedulingFeature):
    def __init__(self, memory: KVManager, timeline: TimelineRecorder):
        self._memory = memory
        self._timeline = timeline
        self._least = max(1, memory.pool.total // 100)
        self._most = memory.pool.total // 4
        self._spare = float(self._least)
        self._times: dict[Sequence, int] = {}  # preempted
        self._reserved: dict[Sequence, int] = {}  # pages set aside in thought for those who may not be preempted again

    @property
    def spare(self) -> int:
        """Pages to leave free when a sequence is admitted beside others."""
        return int(self._spare)

    def victims(self, running: Iterable[Sequence]) -> list[Sequence]:
        """The running sequences that may be preempted, the highest rank first."""
        able = (seq for seq in running if seq not in self._reserved)
        return sorted(able, key=lambda seq: seq.rank, reverse=True)

    def short_of_pages(self) -> None:
        """A sequence is preempted for a page that another needs."""
        self._spare = min(self._most, self._spare * 2)

    def admits(self, seq: Sequence) -> bool:
        """Whether a sequence that was preempted often enough can now run to its end."""
        if self._times.get(seq, 0) < MAX_PREEMPTIONS:
            return True
        return sum(self._reserved.values()) + self._longest(seq) <= self._memory.pool.total or not self._reserved

    def admitted(self, seq: Sequence, hit: Hit | None) -> None:
        if self._times and self._times.get(seq, 0) >= MAX_PREEMPTIONS:
            self._reserved[seq] = self._longest(seq)

    def preempted(self, seq: Sequence) -> None:
        times = self._times[seq] = self._times.get(seq, 0) + 1
        self._reserved.pop(seq, None)
        stats = self._timeline.stats
        stats.preempted_most = max(stats.preempted_most, times)

    def finished(self, seq: Sequence, reason: FinishReason | None) -> None:
        self._times.pop(seq, None)
        self._reserved.pop(seq, None)
        self._spare = max(self._least, self._spare * SPARE_DECAY)

    def _longest(self, seq: Sequence) -> int:
        return self._memory.layout.pages_for(min(seq.limit, seq.peak))
