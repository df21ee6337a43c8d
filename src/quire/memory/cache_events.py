"""What changed in the prefix index since last asked, for a router that keeps its own picture of it.

Of the chain of a prompt's pages only every so many are told: a router's blocks are longer than pages. Refuses to know:
who asks, how pages are named.
"""

from __future__ import annotations

from itertools import islice
from typing import Protocol

from quire.types.hashing import Root

MAX_CHANGES = 1 << 16  # told at a time


class PageListener(Protocol):
    """Hears of changes of a prefix index."""

    def published(self, name: bytes, parent: bytes, tokens: bytes) -> None:
        """`parent`: the page before it, or the root that a prompt's first page comes after; `tokens`: packed."""
        ...

    def removed(self, name: bytes) -> None: ...

    def cleared(self) -> None: ...


class CacheEventRecorder:
    def __init__(self, every: int):
        """Tells of each page whose place in its chain is a multiple of `every`."""
        self._every = every
        self._place: dict[bytes, int] = {}  # of the pages held: 1 is the first of a prompt, 0 not known
        self._changes: dict[bytes, bool] = {}  # whether it is held now, in the order of the changes
        self._cleared = False

    def published(self, name: bytes, parent: bytes, tokens: bytes) -> None:
        before = 0 if isinstance(parent, Root) else self._place.get(parent, -1)
        place = self._place[name] = before + 1 if before >= 0 else 0
        if place and place % self._every == 0:
            self._changes[name] = True

    def removed(self, name: bytes) -> None:
        place = self._place.pop(name, 0)
        if place and place % self._every == 0:
            self._changes[name] = False

    def cleared(self) -> None:
        self._place.clear()
        self._changes.clear()
        self._cleared = True

    def repeat(self) -> None:
        """Whoever takes changes knows nothing any more: all that is held is told again."""
        self._changes = {name: True for name, place in self._place.items() if place and place % self._every == 0}
        self._cleared = True

    def take(self) -> tuple[list[bytes], list[bytes], bool] | None:
        """(stored, removed, whether all was dropped before), if anything changed; of many changes, the first."""
        if not self._changes and not self._cleared:
            return None
        changes, cleared, self._cleared = self._changes, self._cleared, False
        self._changes = dict(islice(changes.items(), MAX_CHANGES, None))
        changes = dict(islice(changes.items(), MAX_CHANGES))
        stored = [name for name, held in changes.items() if held]
        return stored, [name for name, held in changes.items() if not held], cleared
