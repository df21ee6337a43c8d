"""The prefix index: which page holds which content.

    key = (group, page hash)  ◄──►  page

Pages are entered when their content is certain (prompt pages when planned, generated ones when committed) and
leave when the pool takes them for something else. `promised` lists content that a running sequence is about to
compute, so that others with the same prefix wait for it instead of computing it again.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

Key = tuple[int, bytes]


class PrefixIndex:
    def __init__(self) -> None:
        self._page: dict[Key, int] = {}
        self._key: dict[int, Key] = {}
        self._promised: dict[Key, Hashable] = {}

    def __len__(self) -> int:
        return len(self._page)

    def run(self, group: int, names: Iterable[bytes]) -> list[int]:
        """Pages of consecutive names, up to the first that is not held."""
        held, pages = self._page, []
        for name in names:
            page = held.get((group, name))
            if page is None:
                break
            pages.append(page)
        return pages

    def key_of(self, page: int) -> Key | None:
        return self._key.get(page)

    def publish(self, key: Key, page: int) -> None:
        """Enter a page. If the content is already held by another page, that one stays the entry."""
        self._promised.pop(key, None)
        if key not in self._page and page not in self._key:
            self._page[key] = page
            self._key[page] = key

    def forget(self, page: int) -> None:
        """The page is about to hold something else."""
        key = self._key.pop(page, None)
        if key is not None:
            del self._page[key]

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

    def promiser(self, key: Key) -> Hashable | None:
        return self._promised.get(key)

    def clear(self) -> None:
        self._page.clear()
        self._key.clear()

    def check(self) -> None:
        assert {p: k for k, p in self._page.items()} == self._key, "prefix index maps disagree"
        assert not self._promised.keys() & self._page.keys(), "content is both promised and present"
