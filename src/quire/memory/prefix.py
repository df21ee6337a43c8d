"""The prefix index: which page holds which content.

    key = (group, page hash)  ◄──►  page

Pages are entered when their content is certain (prompt pages when planned, generated ones when committed) and
leave when the pool takes them for something else. `promised` lists content that a running sequence is about to
compute, so that others with the same prefix wait for it instead of computing it again. Pages are known by their tokens
too (`partial_pages.py`), those that are filled in part by these alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from itertools import islice, repeat
from math import inf
from typing import Any, NamedTuple

from quire.memory.cache_events import PageListener
from quire.memory.partial_pages import TOKEN_BYTES, Parent, PartialPages
from quire.types.clock import Clock
from quire.types.transfer import Key

LOOKUP_BATCH = 64  # names looked up together
MAX_EVICTED_NAMES = 65_536  # names of evicted pages kept, to tell a page that is gone from one that never was


class Eviction(NamedTuple):
    """When content made room for other content, and for whose."""

    at: float
    taker: str  # a request; empty: not told


class PrefixIndex:
    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or Clock()
        self._page: dict[Key, int] = {}
        self._key: dict[int, Key] = {}
        self._parent: dict[Key, bytes] = {}
        self._evicted: OrderedDict[Key, Eviction] = OrderedDict()
        self._promised: dict[Key, Hashable] = {}
        self.partial = PartialPages()
        self.listeners: list[PageListener] = []  # to changes of the first group's pages

    def __len__(self) -> int:
        return len(self._page)

    def run(self, group: int, names: Iterable[bytes]) -> list[int]:
        """Pages of consecutive names, up to the first that is not held."""
        pages: list[int] = []
        held: Callable[[Key], Any] = self._page.get
        keys = zip(repeat(group), names, strict=False)
        while found := list(map(held, islice(keys, LOOKUP_BATCH))):
            if None in found:
                return pages + found[: found.index(None)]
            pages += found
        return pages

    def holds(self, key: Key) -> bool:
        return key in self._page

    def key_of(self, page: int) -> Key | None:
        return self._key.get(page)

    def knows(self, page: int) -> bool:
        """Whether what the page holds may be found."""
        return page in self._key or self.partial.is_tail(page)

    def filled(self, page: int) -> float:
        """How many tokens of a page may be found: they must stay as they are."""
        return inf if page in self._key else self.partial.filled(page)

    def publish(self, key: Key, page: int, parent: bytes = b"", tokens: bytes = b"") -> None:
        """Enter a page, the name of the one before it and, to be found by them, its tokens. If another page holds the
        content, that stays the entry."""
        if self._promised:
            self._promised.pop(key, None)
        if self.partial.is_tail(page):
            self.partial.remove(page)
        if key in self._page or page in self._key:
            return
        self._page[key] = page
        self._key[page] = key
        self._parent[key] = parent
        if self._evicted:
            self._evicted.pop(key, None)
        if tokens:
            self.partial.enter(page, (key[0], parent), tokens)
        if self.listeners and not key[0]:
            for listener in self.listeners:
                listener.published(key[1], parent, tokens)

    def publish_tail(self, parent: Parent, page: int, tokens: bytes) -> None:
        """Enter a page that is filled in part, unless another begins with as much."""
        count = len(tokens) // TOKEN_BYTES
        if max(self.partial.match(parent, tokens)[0], self.partial.planned(parent, tokens)) < count:
            self.partial.remove(page)
            self.partial.enter(page, parent, tokens, tail=True)

    def remove(self, page: int, taker: str = "") -> None:
        """The page is about to hold something else."""
        self.partial.remove(page)
        key = self._key.pop(page, None)
        if key is not None:
            del self._page[key], self._parent[key]
            if not key[0]:
                for listener in self.listeners:
                    listener.removed(key[1])
            self._evicted[key] = Eviction(self._clock.now, taker)
            if len(self._evicted) > MAX_EVICTED_NAMES:
                self._evicted.popitem(last=False)

    def evicted(self, key: Key) -> Eviction | None:
        """Whether the content was here and made room for other content."""
        return self._evicted.get(key)

    def entries(self, group: int) -> Iterable[tuple[bytes, bytes, int]]:
        """(name, name of the page before it, page) of a group's pages."""
        return ((key[1], self._parent[key], page) for key, page in self._page.items() if key[0] == group)

    def promise(self, keys: Iterable[Key], owner: Hashable) -> list[Key]:
        """Announce content `owner` will compute; returns the keys that were not already held or promised."""
        fresh = [k for k in keys if k not in self._page and k not in self._promised]
        for key in fresh:
            self._promised[key] = owner
        return fresh

    def withdraw(self, keys: Iterable[Key], owner: Hashable) -> None:
        for key in keys:
            if self._promised.get(key) == owner:
                del self._promised[key]

    @property
    def promises(self) -> int:
        return len(self._promised)

    def promiser(self, key: Key) -> Hashable | None:
        return self._promised.get(key)

    def clear(self) -> None:
        self._page.clear()
        self._key.clear()
        self._parent.clear()
        self._evicted.clear()
        self.partial.clear()
        for listener in self.listeners:
            listener.cleared()

    def check(self) -> None:
        assert {p: k for k, p in self._page.items()} == self._key, "prefix index maps disagree"
        assert self._parent.keys() == self._page.keys(), "a page in the index has no parent, or the other way round"
        self.partial.check()
        assert not self._promised.keys() & self._page.keys(), "content is both promised and present"
