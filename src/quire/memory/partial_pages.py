"""Prefix matches to the token: cached pages by what stands before them and the tokens they hold.

    (group, name of the page before) ──► [ (tokens, page), (tokens, page), ... ]      sorted by tokens

Of a sorted list, the entry that shares the longest beginning with given tokens is beside the place where these would
be put: one bisection finds it, however many prompts part at that page. Full pages have names in the index too; pages
that are filled in part, at the end of a prompt or an answer, are here only. Who goes on from within a page copies it.
Copies come before a step's rows, so that what the plan in the making computes is found from the next plan on.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence

MERGE_RATIO = 16  # times as many pages behind another, and new ones are put in their places one by one
NO_ENTRIES: list[tuple[bytes, int]] = []
TOKEN_BYTES = 8  # a simulator numbers tokens beyond 32 bits
Parent = tuple[int, bytes]  # group, name of the page before (of the first one: the root of its salt)
Entry = tuple[int, Parent, bytes]  # a page, what it stands behind, its tokens


def pack(tokens: Sequence[int]) -> bytes:
    return struct.pack(f"{len(tokens)}q", *tokens)


def _shared(one: bytes, other: bytes) -> int:
    """Tokens that both begin with."""
    size = min(len(one), len(other))
    if one[:TOKEN_BYTES] != other[:TOKEN_BYTES]:
        return 0
    different = int.from_bytes(one[:size], "little") ^ int.from_bytes(other[:size], "little")
    return ((different & -different).bit_length() - 1) // (8 * TOKEN_BYTES) if different else size // TOKEN_BYTES


def _longest(known: list[tuple[bytes, int]], tokens: bytes) -> tuple[int, int]:
    """(how many of the tokens, page) of the entry that begins with most of them."""
    best = 0, 0
    if known:
        at = bisect_left(known, (tokens,))
        for held, page in known[max(0, at - 1) : at + 1]:
            best = max(best, (_shared(tokens, held), page))
    return best


def _merge(known: list[tuple[bytes, int]], new: list[tuple[bytes, int]]) -> None:
    """Into one sorted list another one."""
    if len(new) * MERGE_RATIO < len(known):
        for entry in new:
            insort(known, entry)
    else:
        known += new
        known.sort()  # two sorted runs: merged, not sorted anew


class PartialPages:
    def __init__(self) -> None:
        self._after: dict[Parent, list[tuple[bytes, int]]] = {}
        self._of: dict[int, tuple[Parent, bytes]] = {}
        self._planned: dict[Parent, list[tuple[bytes, int]]] = {}  # entered since the last plan began
        self._tails: set[int] = set()  # pages that the index has no name for

    def enter(self, entries: Iterable[Entry]) -> None:
        """Pages that are not entered yet hold, or will after the plan in the making, these tokens."""
        of, by_parent = self._of, self._planned
        for page, parent, tokens in entries:
            of[page] = parent, tokens
            if (planned := by_parent.get(parent)) is None:
                by_parent[parent] = [(tokens, page)]
            else:
                insort(planned, (tokens, page))

    def enter_tail(self, entry: Entry) -> None:
        """As `enter`, a page that the index has no name for."""
        self.enter([entry])
        self._tails.add(entry[0])

    def settle(self) -> None:
        """A new plan begins: what was entered before may be copied in it."""
        planned, after = self._planned, self._after
        if not planned:
            return
        for parent in planned.keys() & after.keys():
            _merge(after[parent], planned.pop(parent))
        after.update(planned)
        planned.clear()

    def match(self, parent: Parent, tokens: bytes) -> tuple[int, int]:
        """(how many of the tokens, page) of the page behind `parent` that begins with most of them."""
        return _longest(self._after.get(parent, []), tokens)

    def planned(self, parent: Parent, tokens: bytes) -> int:
        """How many of the tokens a page begins with that the plan in the making computes."""
        return _longest(self._planned.get(parent, []), tokens)[0]

    def is_planned(self, page: int) -> bool:
        """Whether the plan in the making computes what the page holds."""
        parent, tokens = self._of.get(page, ((0, b""), b""))
        return (tokens, page) in self._planned.get(parent, ())

    def is_tail(self, page: int) -> bool:
        return page in self._tails

    def filled(self, page: int) -> int:
        """Of a page, how many tokens may be found in it."""
        return len(self._of[page][1]) // TOKEN_BYTES if page in self._of else 0

    def tails_after(self, parents: Iterable[Parent]) -> list[int]:
        """Pages that are filled in part, behind these."""
        return [page for parent in parents for _, page in self._after.get(parent, ()) if page in self._tails]

    def remove(self, page: int) -> None:
        """The page is about to hold something else, or more."""
        if (entry := self._of.pop(page, None)) is None:
            return
        self._tails.discard(page)
        parent, tokens = entry
        within, at = self._after, 0
        known = within.get(parent, NO_ENTRIES)
        if len(known) > 1:
            at = bisect_left(known, (tokens, page))
        if at == len(known) or known[at][1] != page:
            within, known = self._planned, self._planned[parent]
            at = known.index((tokens, page))
        if len(known) == 1:
            del within[parent]
        else:
            del known[at]

    def clear(self) -> None:
        self._after.clear()
        self._of.clear()
        self._planned.clear()
        self._tails.clear()

    def check(self) -> None:
        held = {
            page: (parent, tokens)
            for entries in (self._after, self._planned)
            for parent, known in entries.items()
            for tokens, page in known
        }
        assert held == self._of, "pages by their tokens disagree"
        assert all(self._after.values()) and all(self._planned.values()), "a list without pages was left"
        for known in (*self._after.values(), *self._planned.values()):
            assert known == sorted(known), "pages by their tokens are out of order"
        assert self._tails <= self._of.keys()
