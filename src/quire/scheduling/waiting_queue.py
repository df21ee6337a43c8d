"""Waiting sequences in the order of their rank, at a cost that does not grow with how many wait.

head    the best few, sorted: what a step looks at
rest    a heap; those removed from its middle are passed over when they come up
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import count
from typing import Any

from quire.scheduling.sequence import Sequence

MAX_HEAD = 4096  # sequences kept sorted

Entry = tuple[tuple[Any, ...], int, Sequence]  # rank, number of insertion, whom


class WaitingQueue:
    def __init__(self) -> None:
        self._head: list[Entry] = []
        self._rest: list[Entry] = []
        self._entries: dict[Sequence, Entry] = {}
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, seq: Sequence) -> bool:
        return seq in self._entries

    def __iter__(self) -> Iterator[Sequence]:
        """All of them, in no particular order."""
        return iter(self._entries)

    def add(self, seq: Sequence) -> None:
        entry = self._entries[seq] = seq.rank, next(self._numbers), seq
        if self._rest and not (self._head and entry < self._head[-1]):
            heapq.heappush(self._rest, entry)
            return
        insort(self._head, entry)
        if len(self._head) > MAX_HEAD:
            heapq.heappush(self._rest, self._head.pop())

    def remove(self, seq: Sequence) -> None:
        entry = self._entries.pop(seq)
        if self._head and entry <= self._head[-1]:
            del self._head[bisect_left(self._head, entry)]
        elif len(self._rest) > 64 + 2 * len(self._entries):  # most of the heap is gone
            self._rest = [e for e in self._rest if self._entries.get(e[2]) is e]
            heapq.heapify(self._rest)

    def first(self, most: int) -> list[Sequence]:
        """The best `most` sequences, best first."""
        while len(self._head) < most and self._rest:
            entry = heapq.heappop(self._rest)
            if self._entries.get(entry[2]) is entry:
                self._head.append(entry)
        return [seq for _, _, seq in self._head[:most]]

    def before(self, seq: Sequence) -> int:
        """How many are ahead of one that waits, or of its place among those kept in order."""
        entry = self._entries[seq]
        return bisect_left(self._head, entry) if self._head and entry <= self._head[-1] else len(self._entries) - 1
