"""Targets of requests as deadlines: until when one can still meet its own, and which have just missed that moment.

Refuses to know: orders.
"""

from __future__ import annotations

import heapq
from math import inf

from quire.types.config import SchedulerOptions
from quire.types.policy import PolicyServices, SequenceId, SequenceView

STEP_MARGIN = 0.85  # of a target for each token, that steps are held to: some take longer than they should
RANGE_S = 0.005  # a target that is missed by less counts as met
RELAXED = 4.0  # times the tightest target under way that one must have left to give way to others
MOST_ENDED = 64  # targets kept of those that ended, beside as many as of those that did not
RELAXED_SHARE = 0.25  # of its own target, that it must have left besides


class Targets:
    def __init__(self, options: SchedulerOptions):
        self._options = options
        self._heap: list[tuple[float, SequenceId]] = []  # by the moment at which it is lost
        self._lost_at: dict[SequenceId, float] = {}  # of those without a first token
        self.lost: dict[SequenceId, str] = {}  # too late for their first token, with the request each belongs to
        self._requests: dict[SequenceId, str] = {}  # of those that could be lost
        self._started: set[SequenceId] = set()  # ... and are being computed
        self._tpot: dict[SequenceId, float] = {}  # own targets of those under way
        self._ttft: dict[SequenceId, float] = {}  # targets of those under way
        self._tightest: list[tuple[float, SequenceId]] = []  # a heap of them, and of some that ended
        self.relaxed: set[SequenceId] = set()  # have so much time left that others go first

    def arrived(self, seq: SequenceView, services: PolicyServices) -> None:
        if seq.tpot_target:
            self._tpot[seq.id] = seq.tpot_target
        if self.deadline(seq) < inf:
            self._requests[seq.id] = seq.request
            self._ttft[seq.id] = target = seq.ttft_target or self._options.slo_ttft or 0.0
            heapq.heappush(self._tightest, (target, seq.id))
            self._watch(seq.id, self.deadline(seq) - services.prefill_seconds(seq.prompt))
            self._relax(seq.id, target, seq.arrival)

    def _watch(self, id: SequenceId, at: float) -> None:
        self._lost_at[id] = at
        heapq.heappush(self._heap, (at, id))

    def _relax(self, id: SequenceId, target: float, now: float) -> None:
        """Whether it has much more time than others have at all, and until when."""
        while self._tightest[0][1] not in self._ttft:
            heapq.heappop(self._tightest)
        if len(self._tightest) > 2 * len(self._ttft) + MOST_ENDED:
            self._tightest = sorted((target, id) for id, target in self._ttft.items())
        hurries = self._lost_at[id] - max(RELAXED * self._tightest[0][0], RELAXED_SHARE * target)
        if now < hurries:
            self.relaxed.add(id)
            heapq.heappush(self._heap, (hurries, id))

    def deadline(self, seq: SequenceView) -> float:
        """Of its first token."""
        target = seq.ttft_target or self._options.slo_ttft
        return seq.arrival + target if target else inf

    def lost_at(self, id: SequenceId) -> float:
        """When it must have begun; `inf`: there is no hurry."""
        return self._lost_at.get(id, inf)

    def admitted(self, seq: SequenceView) -> bool:
        """It has begun: as long as its deadline has not passed it may be in time. Whether that changes its place."""
        if seq.id not in self._lost_at:
            return False
        self._started.add(seq.id)
        if seq.id not in self.lost:
            self._watch(seq.id, self.deadline(seq))
        return seq.id not in self.lost

    def preempted(self, seq: SequenceView, services: PolicyServices) -> None:
        """It must begin again."""
        self._started.discard(seq.id)
        if seq.id in self._lost_at and seq.id not in self.lost:
            self._watch(seq.id, self.deadline(seq) - services.prefill_seconds(seq.prompt))

    def drew(self, id: SequenceId) -> bool:
        """It has its first token, or more; whether that is news."""
        self.lost.pop(id, None)
        self.relaxed.discard(id)
        self._requests.pop(id, None)
        self._started.discard(id)
        return self._lost_at.pop(id, None) is not None

    def finished(self, id: SequenceId) -> None:
        self.drew(id)
        self._tpot.pop(id, None)
        self._ttft.pop(id, None)

    def passed(self, now: float) -> list[SequenceId]:
        """Those that can no longer meet their target, or must hurry now to do so, since the last look."""
        found: list[SequenceId] = []
        while self._heap and self._heap[0][0] < now - RANGE_S:
            at, id = heapq.heappop(self._heap)
            if self._lost_at.get(id) == at and id not in self.lost:
                self.lost[id] = self._requests[id]
                found.append(id)
            elif id in self.relaxed:
                self.relaxed.discard(id)
                found.append(id)
        return found

    def hopeless(self) -> list[str]:
        """Requests that are lost and have not begun."""
        return list(dict.fromkeys(request for id, request in self.lost.items() if id not in self._started))

    def latency(self) -> float | None:
        """What a step may take, so that those under way meet their targets for each token; None: any time."""
        target = self._options.slo_tpot or inf
        if self._tpot:
            target = min(target, *self._tpot.values())
        return None if target == inf else STEP_MARGIN * target
