"""First come, first served: by arrival; the latest arrival is preempted first."""

from __future__ import annotations

from quire.scheduling.policies.base import Policy
from quire.types.policy import SequenceView


class FCFS(Policy):
    starves = False

    def key(self, seq: SequenceView) -> tuple[float, ...]:
        return (seq.arrival,)
