"""Priority with ageing: lower number first; every `ageing` seconds of waiting are worth one level, so that no request
starves. Two requests age alike, so their order never changes and the key needs no clock."""

from __future__ import annotations

from quire.scheduling.policies.base import Policy
from quire.types.policy import SequenceView


class Priority(Policy):
    uses_priority = True
    starves = False

    def key(self, seq: SequenceView) -> tuple[float, ...]:
        return (seq.priority + seq.arrival / self.options.ageing,)

    def passes(self, blocked: SequenceView, behind: SequenceView) -> bool:
        """Only one that is as important: a lesser one would take the pages that the first waits for."""
        return behind.priority <= blocked.priority
