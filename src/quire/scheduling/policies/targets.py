"""Targets of requests as deadlines: until when one can still meet its own, and which have just missed that moment.

Refuses to know: orders.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from math import inf

from quire.types.config import SchedulerOptions
from quire.types.policy import PolicyServices, SequenceId, SequenceView

STEP_MARGIN = 0.85  # of a target for each token, that steps are held to: some take longer than they should
RANGE_S = 0.005  # a target that is missed by less counts as met


class Targets:
    def __init__(self, options: SchedulerOptions):
        self._options = options
        self._heap: list[tuple[float, SequenceId]] = []  # by the moment at which it is lost
        self._lost_at: dict[SequenceId, float] = {}  # of those without a first token
        self.lost: dict[SequenceId, None] = {}  # too late for their first token
        self._tpot: dict[SequenceId, float] = {}  # own targets of those under way

    def arrived(self, seq: SequenceView, services: PolicyServices) -> None:
        if seq.tpot_target:
            self._tpot[seq.id] = seq.tpot_target
        if (deadline := self.deadline(seq)) < inf:
            at = deadline - services.prefill_seconds(seq.prompt - max(0, seq.cached))
            self._lost_at[seq.id] = at
            heapq.heappush(self._heap, (at, seq.id))

    def deadline(self, seq: SequenceView) -> float:
        """Of its first token."""
        target = seq.ttft_target or self._options.slo_ttft
        return seq.arrival + target if target else inf

    def lost_at(self, id: SequenceId) -> float:
        """When it must have begun; `inf`: there is no hurry."""
        return self._lost_at.get(id, inf)

    def drew(self, id: SequenceId) -> bool:
        """It has its first token, or more; whether that is news."""
        self.lost.pop(id, None)
        return self._lost_at.pop(id, None) is not None

    def finished(self, id: SequenceId) -> None:
        self.drew(id)
        self._tpot.pop(id, None)

    def passed(self, now: float) -> Iterable[SequenceId]:
        """Those that can no longer meet their target, since the last look."""
        found = []
        while self._heap and self._heap[0][0] < now - RANGE_S:
            at, id = heapq.heappop(self._heap)
            if self._lost_at.get(id) == at:
                self.lost[id] = None
                found.append(id)
        return found

    def latency(self) -> float | None:
        """What a step may take, so that those under way meet their targets for each token; None: any time."""
        own = min(self._tpot.values(), default=inf)
        target = min(own, self._options.slo_tpot or inf)
        return None if target == inf else STEP_MARGIN * target
