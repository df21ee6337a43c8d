"""Who must begin soon to have its first token in time: those that have waited for most of what they may.

Whoever goes before shorter ones makes these wait for its prompt; so only those become urgent whose prompts take a small
part of what they may wait. Refuses to know: orders, who makes way for them.
"""

from __future__ import annotations

from quire.scheduling.policies.sequence_heap import SequenceHeap
from quire.types.policy import SequenceId, SequenceView

URGENT_SHARE = 0.25  # of the time that one may wait: when no more of it is left, it must begin soon
SHORT_SHARE = 0.05  # of that time, that its prompt may take


class Urgency:
    def __init__(self) -> None:
        self.urgent: set[SequenceId] = set()  # without a first token
        self._from = SequenceHeap()  # when others become so

    def arrived(self, seq: SequenceView, deadline: float, prefill: float) -> None:
        """`deadline`: of its first token; `prefill`: seconds that its prompt takes."""
        allowed = deadline - seq.arrival
        if prefill < SHORT_SHARE * allowed:
            self._from.put(seq.id, deadline - prefill - URGENT_SHARE * allowed)

    def drew(self, id: SequenceId) -> None:
        """It has its first token, is over, or can no longer have it in time."""
        self.urgent.discard(id)
        self._from.drop(id)

    def passed(self, now: float) -> list[SequenceId]:
        """Those that have become urgent since the last look."""
        found = self._from.take_below(now)
        self.urgent.update(found)
        return found
