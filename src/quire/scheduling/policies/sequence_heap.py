"""A number for each of some sequences, the least first: moments that are to come, targets that are under way.

Numbers that were changed or taken back are left in the heap until they come up or outnumber the others. Refuses to
know: what they mean.
"""

from __future__ import annotations

import heapq
from math import inf

from quire.types.policy import SequenceId

MOST_STALE = 64  # entries kept that are void, beside as many as there are of the others


class SequenceHeap:
    def __init__(self) -> None:
        self._numbers: dict[SequenceId, float] = {}
        self._heap: list[tuple[float, SequenceId]] = []

    def __len__(self) -> int:
        return len(self._numbers)

    def __contains__(self, id: SequenceId) -> bool:
        return id in self._numbers

    def get(self, id: SequenceId) -> float:
        """`inf`: it has none."""
        return self._numbers.get(id, inf)

    def put(self, id: SequenceId, number: float) -> None:
        """In place of the one it had."""
        self._numbers[id] = number
        heapq.heappush(self._heap, (number, id))
        if len(self._heap) > 2 * len(self._numbers) + MOST_STALE:
            self._heap = sorted((number, id) for id, number in self._numbers.items())

    def drop(self, id: SequenceId) -> bool:
        """Whether it had one."""
        return self._numbers.pop(id, None) is not None

    @property
    def least(self) -> float:
        """`inf`: there is none."""
        heap = self._heap
        while heap and self._numbers.get(heap[0][1]) != heap[0][0]:
            heapq.heappop(heap)
        return heap[0][0] if heap else inf

    def take_below(self, bound: float) -> list[SequenceId]:
        """Those whose number is below, which they have no more."""
        found = []
        while self.least < bound:
            _, id = heapq.heappop(self._heap)
            del self._numbers[id]
            found.append(id)
        return found
