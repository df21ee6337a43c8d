"""The prefix index: which page holds which content.

    key = (group, page hash)  ◄──►  page

Pages are entered when their content is certain (prompt pages when planned, generated ones when committed) and
leave when the pool takes them for something else. `promised` lists content that a running sequence is about to
compute, so that others with the same prefix wait for it instead of computing it again. Pages are known by their tokens
too (`partial_pages.py`), those that are filled in part by these alone.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import islice
from math import inf
from typing import Any

from quire.memory.cache_events import PageListener
from quire.memory.partial_pages import TOKEN_BYTES, Entry, Parent, PartialPages
from quire.types.clock import Clock
from quire.types.kv import NULL_PAGE
from quire.types.transfer import Key

LOOKUP_BATCH = 64  # names looked up together
Eviction = tuple[float, str]  # when content made room for other content, and for which request; empty: not told
MAX_EVICTED_NAMES = 65_536  # names of evicted pages kept, to tell a page that is gone from one that never was


class PrefixIndex:
    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or Clock()
        self._pages: defaultdict[int, dict[bytes, int]] = defaultdict(dict)  # by group and name
        self._key: dict[int, Key] = {}
        self._parent: dict[int, bytes] = {}  # by page
        self._evicted: OrderedDict[Key, Eviction] = OrderedDict()
        self._promised: dict[Key, Hashable] = {}
        self.partial = PartialPages()
        self.listeners: list[PageListener] = []  # to changes of the first group's pages

    def __len__(self) -> int:
        return len(self._key)

    def run(self, group: int, names: Iterable[bytes]) -> list[int]:
        """Pages of consecutive names, up to the first that is not held."""
        pages: list[int] = []
        held: Callable[[bytes], Any] = self._pages[group].get
        names = iter(names)
        while found := list(map(held, islice(names, LOOKUP_BATCH))):
            if None in found:
                return pages + found[: found.index(None)]
            pages += found
        return pages

    def holds(self, key: Key) -> bool:
        return key[1] in self._pages[key[0]]

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
        self.publish_run(key[0], [key[1]], [page], parent, tokens)

    def publish_run(
        self, group: int, names: Sequence[bytes], pages: Sequence[int], parent: bytes, tokens: bytes
    ) -> None:
        """Enter consecutive pages behind `parent`; null pages are passed over."""
        held, keys, parents, size = self._pages[group], self._key, self._parent, len(tokens) // len(names)
        is_tail, entered, start = self.partial.is_tail, [], 0
        for name, page in zip(names, pages, strict=True):
            if page != NULL_PAGE:
                key = group, name
                if self._promised:
                    self._promised.pop(key, None)
                if is_tail(page):
                    self.partial.remove(page)
                if name not in held and page not in keys:
                    held[name] = page
                    keys[page] = key
                    parents[page] = parent
                    entered.append((page, (group, parent), tokens[start : start + size]))
            parent = name
            start += size
        if tokens:
            self.partial.enter(entered)
        if self._evicted or self.listeners:
            self._tell_entered(entered)

    def _tell_entered(self, entered: list[Entry]) -> None:
        for page, (group, parent), tokens in entered:
            key = self._key[page]
            self._evicted.pop(key, None)
            for listener in self.listeners if group == 0 else ():
                listener.published(key[1], parent, tokens)

    def publish_tail(self, parent: Parent, page: int, tokens: bytes) -> None:
        """Enter a page that is filled in part, unless another begins with as much."""
        count = len(tokens) // TOKEN_BYTES
        if max(self.partial.match(parent, tokens)[0], self.partial.planned(parent, tokens)) < count:
            self.partial.remove(page)
            self.partial.enter_tail((page, parent, tokens))

    def remove(self, page: int, taker: str = "") -> None:
        """The page is about to hold something else."""
        self.partial.remove(page)
        key = self._key.pop(page, None)
        if key is not None:
            group, name = key
            del self._pages[group][name], self._parent[page]
            if not group:
                for listener in self.listeners:
                    listener.removed(name)
            self._evicted[key] = self._clock.now, taker
            if len(self._evicted) > MAX_EVICTED_NAMES:
                self._evicted.popitem(last=False)

    def evicted(self, key: Key) -> Eviction | None:
        """Whether the content was here and made room for other content."""
        return self._evicted.get(key)

    def entries(self, group: int) -> Iterable[tuple[bytes, bytes, int]]:
        """(name, name of the page before it, page) of a group's pages."""
        return ((name, self._parent[page], page) for name, page in self._pages[group].items())

    def promise(self, keys: Iterable[Key], owner: Hashable) -> list[Key]:
        """Announce content `owner` will compute; returns the keys that were not already held or promised."""
        fresh = [key for key in keys if not self.holds(key) and key not in self._promised]
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
        self._pages.clear()
        self._key.clear()
        self._parent.clear()
        self._evicted.clear()
        self.partial.clear()
        for listener in self.listeners:
            listener.cleared()

    def check(self) -> None:
        held = {page: (group, name) for group, pages in self._pages.items() for name, page in pages.items()}
        assert held == self._key, "prefix index maps disagree"
        assert self._parent.keys() == self._key.keys(), "a page in the index has no parent, or the other way round"
        self.partial.check()
        assert not self._promised.keys() & set(held.values()), "content is both promised and present"
