"""Targets of requests as deadlines: until when one can still meet its own, and which have just missed that moment.

Refuses to know: orders.
"""

from __future__ import annotations

from math import inf

from quire.scheduling.policies.sequence_heap import SequenceHeap
from quire.types.config import SchedulerOptions
from quire.types.policy import PolicyServices, SequenceId, SequenceView

STEP_MARGIN = 0.85  # of a target for each token, that steps are held to: some take longer than they should
RANGE_S = 0.005  # a target that is missed by less counts as met
RELAXED = 4.0  # times the tightest target under way that one must have left to give way to others
RELAXED_SHARE = 0.25  # of its own target, that it must have left besides


class Targets:
    def __init__(self, options: SchedulerOptions):
        self._options = options
        self._open: dict[SequenceId, float] = {}  # when it must have begun, of those without a first token
        self._lost_at = SequenceHeap()  # the same, of those that are not lost yet
        self._hurries = SequenceHeap()  # when one that is relaxed is so no more
        self.lost: dict[SequenceId, str] = {}  # too late for their first token, with the request each belongs to
        self._requests: dict[SequenceId, str] = {}  # of those that could be lost
        self._started: set[SequenceId] = set()  # ... and are being computed
        self._tpot = SequenceHeap()  # of those that run, and have their own
        self._ttft = SequenceHeap()  # of all
        self.relaxed: set[SequenceId] = set()  # have so much time left that others go first

    def arrived(self, seq: SequenceView, services: PolicyServices) -> None:
        if self.deadline(seq) < inf:
            self._requests[seq.id] = seq.request
            target = seq.ttft_target or self._options.slo_ttft or 0.0
            self._ttft.put(seq.id, target)
            self._watch(seq.id, self.deadline(seq) - services.prefill_seconds(seq.prompt))
            self._relax(seq.id, target, seq.arrival)

    def _watch(self, id: SequenceId, at: float) -> None:
        self._open[id] = at
        self._lost_at.put(id, at)

    def _relax(self, id: SequenceId, target: float, now: float) -> None:
        """Whether it has much more time than others have at all, and until when."""
        hurries = self._open[id] - max(RELAXED * self._ttft.least, RELAXED_SHARE * target)
        if now < hurries:
            self.relaxed.add(id)
            self._hurries.put(id, hurries)

    def others_hurry(self, id: SequenceId) -> bool:
        """Whether it is relaxed, and those that made it so are still there, or others like them."""
        return id in self.relaxed and RELAXED * self._ttft.least < self._ttft.get(id)

    def deadline(self, seq: SequenceView) -> float:
        """Of its first token, if it has none yet."""
        target = seq.ttft_target or self._options.slo_ttft
        return seq.arrival + target if target and not seq.drawn else inf

    def lost_at(self, id: SequenceId) -> float:
        """When it must have begun; `inf`: there is no hurry."""
        return self._open.get(id, inf)

    def admitted(self, seq: SequenceView) -> bool:
        """It has begun: as long as its deadline has not passed it may be in time. Whether that changes its place."""
        if seq.tpot_target:
            self._tpot.put(seq.id, seq.tpot_target)
        if seq.id not in self._open:
            return False
        self._started.add(seq.id)
        if seq.id not in self.lost:
            self._watch(seq.id, self.deadline(seq))
        return seq.id not in self.lost

    def preempted(self, seq: SequenceView, services: PolicyServices) -> None:
        """It must begin again."""
        self._tpot.drop(seq.id)
        self._started.discard(seq.id)
        if seq.id in self._open and seq.id not in self.lost:
            self._watch(seq.id, self.deadline(seq) - services.prefill_seconds(seq.prompt))

    def drew(self, id: SequenceId) -> bool:
        """It has its first token, or more; whether that is news."""
        self.lost.pop(id, None)
        self.relaxed.discard(id)
        self._requests.pop(id, None)
        self._started.discard(id)
        self._lost_at.drop(id)
        self._hurries.drop(id)
        return self._open.pop(id, None) is not None

    def finished(self, id: SequenceId) -> None:
        self.drew(id)
        self._tpot.drop(id)
        self._ttft.drop(id)

    def passed(self, now: float) -> list[SequenceId]:
        """Those that can no longer meet their target, or must hurry now to do so, since the last look."""
        lost = self._lost_at.take_below(now - RANGE_S)
        for id in lost:
            self.lost[id] = self._requests[id]
        hurry = self._hurries.take_below(now - RANGE_S)
        self.relaxed.difference_update(hurry)
        return lost + hurry

    def hopeless(self) -> list[str]:
        """Requests that are lost and have not begun."""
        return list(dict.fromkeys(request for id, request in self.lost.items() if id not in self._started))

    def latency(self) -> float | None:
        """What a step may take, so that those that run meet their targets for each token; None: any time."""
        target = min(self._options.slo_tpot or inf, self._tpot.least)
        return None if target == inf else STEP_MARGIN * target
