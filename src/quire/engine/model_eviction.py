"""Which loaded models go when another needs their room: GreedyDual-Size (Cao and Irani, 1997).

A model's credit is what loading it takes, by size, on top of the credit of the last one that went. So the cheap and
the long unused go first; with equal costs and sizes it is LRU. Refuses to know: engines, who asks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count
from typing import NamedTuple


class Candidate(NamedTuple):
    """A loaded model that may go."""

    name: str
    size: int  # bytes
    idle: bool
    draining: bool = False  # it gets no new requests, because it is to go


class GreedyDual:
    def __init__(self) -> None:
        self._inflation = 0.0  # credit of the last one that went
        self._credit: dict[str, tuple[float, int]] = {}  # by name; the second: when it was used, in order
        self._uses = count()

    def used(self, name: str, cost: float, size: float = 1.0) -> None:
        """`cost`: seconds that loading it takes; `size`: in units that are the same for all."""
        self._credit[name] = self._inflation + cost / size, next(self._uses)

    def evicted(self, name: str) -> None:
        """It went because others needed room."""
        self._inflation = max(self._inflation, self._credit.pop(name, (0.0, 0))[0])

    def in_order(self, candidates: Iterable[Candidate]) -> list[Candidate]:
        """Those that go first first: idle ones before all others, then those that are to go already."""

        def key(one: Candidate) -> tuple[bool, bool, tuple[float, int]]:
            return not one.idle, not one.draining, self._credit.get(one.name, (0.0, -1))

        return sorted(candidates, key=key)


def victims(candidates: Sequence[Candidate], models: int, size: int) -> list[Candidate] | None:
    """Of candidates in order, the first that free the room of so many `models` and of `size` bytes, less those that are
    not needed for it then; None: all of them would not do."""
    chosen: list[Candidate] = []
    for one in candidates:
        if len(chosen) >= models and sum(other.size for other in chosen) >= size:
            break
        chosen.append(one)
    if len(chosen) < models or sum(one.size for one in chosen) < size:
        return None
    for one in reversed(chosen[:]):
        rest = [other for other in chosen if other is not one]
        if len(rest) >= models and sum(other.size for other in rest) >= size:
            chosen = rest
    return chosen
