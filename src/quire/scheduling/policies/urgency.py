"""Who must begin soon to have its first token in time: those that have waited for most of what they may.

Whoever goes before shorter ones makes these wait for its prompt; so only those become urgent whose prompts take a small
part of what they may wait. Refuses to know: orders, who makes way for them.
"""

from __future__ import annotations

import heapq

from quire.types.policy import SequenceId, SequenceView

URGENT_SHARE = 0.25  # of the time that one may wait: when no more of it is left, it must begin soon
SHORT_SHARE = 0.05  # of that time, that its prompt may take


class Urgency:
    def __init__(self) -> None:
        self.urgent: set[SequenceId] = set()  # without a first token
        self._from: dict[SequenceId, float] = {}  # when each becomes so
        self._heap: list[tuple[float, SequenceId]] = []

    def arrived(self, seq: SequenceView, deadline: float, prefill: float) -> None:
        """`deadline`: of its first token; `prefill`: seconds that its prompt takes."""
        allowed = deadline - seq.arrival
        if prefill < SHORT_SHARE * allowed:
            at = self._from[seq.id] = deadline - prefill - URGENT_SHARE * allowed
            heapq.heappush(self._heap, (at, seq.id))

    def drew(self, id: SequenceId) -> None:
        """It has its first token, is over, or can no longer have it in time."""
        self.urgent.discard(id)
        self._from.pop(id, None)

    def passed(self, now: float) -> list[SequenceId]:
        """Those that have become urgent since the last look."""
        found = []
        while self._heap and self._heap[0][0] < now:
            at, id = heapq.heappop(self._heap)
            if self._from.get(id) == at:
                self.urgent.add(id)
                found.append(id)
        return found
