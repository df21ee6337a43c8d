"""Which page leaves a full tier: policies side by side. Each is one score; the lowest goes first.

Refuses to know: where pages are, how they move.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from quire.types.transfer import Key


@dataclass(slots=True)
class Entry:
    uses: int = 0
    worth: float = 0.0  # seconds of recomputing its last use saved
    until: float = 0.0  # pinned until then
    score: tuple[float, float] = (0.0, 0.0)


def _lru(entry: Entry, clock: float, floor: float) -> tuple[float, float]:
    return clock, 0.0


def _lfu(entry: Entry, clock: float, floor: float) -> tuple[float, float]:
    return entry.uses, clock


def _cost(entry: Entry, clock: float, floor: float) -> tuple[float, float]:
    """Greedy-dual: what its uses saved, on top of what the last page to leave was worth, so that fame fades. Pages
    have equal bytes: seconds saved a page are seconds saved a byte."""
    return floor + (1 + entry.uses) * entry.worth, clock


POLICIES: dict[str, Callable[[Entry, float, float], tuple[float, float]]] = {"lru": _lru, "lfu": _lfu, "cost": _cost}


class Ranking:
    """Keys of one tier in the order in which they would leave."""

    def __init__(self, policy: str):
        self._score = POLICIES[policy]
        self._entries: dict[Key, Entry] = {}
        self._heap: list[tuple[tuple[float, float], Key]] = []  # with stale scores among them
        self._clock = 0.0
        self._floor = 0.0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[Key]:
        return iter(self._entries)

    def add(self, key: Key, worth: float = 0.0) -> None:
        entry = self._entries.setdefault(key, Entry())
        entry.worth = max(entry.worth, worth)
        self._rank(key, entry)

    def use(self, key: Key, worth: float) -> None:
        """The page served a request, which would else have computed for `worth` seconds."""
        entry = self._entries.get(key)
        if entry is not None:
            entry.uses += 1
            entry.worth = worth
            self._rank(key, entry)

    def uses(self, key: Key) -> int:
        entry = self._entries.get(key)
        return 0 if entry is None else entry.uses

    def pin(self, key: Key, until: float) -> None:
        if key in self._entries:
            self._entries[key].until = until

    def remove(self, key: Key) -> None:
        self._entries.pop(key, None)

    def pop(self, now: float) -> Key | None:
        """Remove and return the key that goes first; None if all are pinned."""
        pinned: list[tuple[tuple[float, float], Key]] = []
        found = None
        while self._heap and found is None:
            score, key = heapq.heappop(self._heap)
            entry = self._entries.get(key)
            if entry is None or entry.score != score:
                continue
            if entry.until > now:
                pinned.append((score, key))
                continue
            found = key
            self._floor = max(self._floor, score[0]) if self._score is _cost else 0.0
            del self._entries[key]
        for item in pinned:
            heapq.heappush(self._heap, item)
        return found

    def _rank(self, key: Key, entry: Entry) -> None:
        self._clock += 1
        entry.score = self._score(entry, self._clock, self._floor)
        heapq.heappush(self._heap, (entry.score, key))
        if len(self._heap) > 64 + 4 * len(self._entries):
            self._heap = [(e.score, k) for k, e in self._entries.items()]
            heapq.heapify(self._heap)
