"""Pages with reference counts.

A page is in exactly one of three places:

    blank    unreferenced, content worthless        taken first, last returned first
    idle     unreferenced, content in the index     evicted least recently used first
    in use   one or more references

`PagePool` hands out any pages; `ContiguousPool` has the same face but hands out one unbroken run per call, as
engines without paging do (the measured baseline).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence, Set

from quire.memory.prefix import Key, PrefixIndex
from quire.types.kv import NULL_PAGE


class PagePool:
    def __init__(self, pages: int, index: PrefixIndex):
        """`pages` counts the null page, which is never handed out."""
        self.total = pages - 1
        self.index = index
        self.peak = 0
        self.leaving: Callable[[Key, int], None] | None = None  # told of content that is about to be lost
        self._refs = [0] * pages
        self._blank = list(range(pages - 1, NULL_PAGE, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        return len(self._blank) + len(self._idle)

    @property
    def used(self) -> int:
        return self.total - self.available

    @property
    def cached(self) -> int:
        return len(self._idle)

    def cached_pages(self) -> list[int]:
        """Unreferenced pages whose content is known, the least recently used first."""
        return list(self._idle)

    def refs(self, page: int) -> int:
        return self._refs[page]

    def take(self, count: int, taker: str = "") -> list[int] | None:
        """`count` pages with one reference each, or None (and nothing changes) if there are not so many. `taker`: the
        request they are for, to be told to those who miss what was in them."""
        if count > self.available:
            return None
        pages = [self._blank.pop() if self._blank else self._evict(taker) for _ in range(count)]
        for page in pages:
            self._refs[page] = 1
        self.peak = max(self.peak, self.used)
        return pages

    def idle(self, pages: Sequence[int]) -> int:
        """How many of them are unreferenced. Null pages are passed over."""
        return list(map(self._refs.__getitem__, pages)).count(0) - pages.count(NULL_PAGE)

    def share(self, pages: Iterable[int]) -> None:
        """One more reference each; revives idle pages. Null pages are passed over."""
        refs = self._refs
        for page in pages:
            if page != NULL_PAGE:
                if not refs[page]:
                    del self._idle[page]
                refs[page] += 1
        self.peak = max(self.peak, self.used)

    def release(self, pages: Iterable[int]) -> list[int]:
        """One reference less each; the pages whose last it was. Null pages are passed over."""
        refs, last = self._refs, []
        for page in pages:
            if page != NULL_PAGE:
                count = refs[page] = refs[page] - 1
                assert count >= 0, f"page {page} released more often than taken"
                if not count:
                    last.append(page)
                    if self.index.knows(page):
                        self._idle[page] = None
                    else:
                        self._blank.append(page)
        return last

    def drop_keys(self, keys: Iterable[Key]) -> int:
        """Drop this content, and what pages behind it hold in part, where it is not referenced; how many pages that
        frees."""
        keys = list(keys)
        found = [page for group, name in keys for page in self.index.run(group, [name])]
        return self._drop([page for page in (*found, *self.index.partial.tails_after(keys)) if page in self._idle])

    def drop_others(self, pages: Set[int]) -> int:
        """Drop cached content that is in none of these pages; how many that frees."""
        return self._drop([page for page in self._idle if page not in pages])

    def _drop(self, idle: list[int]) -> int:
        for page in idle:
            del self._idle[page]
            self.index.remove(page)
            self._blank.append(page)
        return len(idle)

    def drop_idle(self) -> int:
        """Drop all cached content, and say how many pages; those in use stay valid for their holders."""
        count = len(self._idle)
        self._blank.extend(self._idle)
        self._idle.clear()
        self.index.clear()
        return count

    def _evict(self, taker: str) -> int:
        page, _ = self._idle.popitem(last=False)
        if self.leaving is not None and (key := self.index.key_of(page)) is not None:
            self.leaving(key, page)
        self.index.remove(page, taker)
        return page

    def check(self) -> None:
        self.index.check()
        free = {*self._blank, *self._idle}
        assert len(free) == self.available, "a page is free twice"
        assert NULL_PAGE not in free and self._refs[NULL_PAGE] == 0, "the null page was handed out"
        for page in range(1, self.total + 1):
            assert (page in free) == (self._refs[page] == 0), f"page {page}: {self._refs[page]} references"
        assert not any(map(self.index.knows, self._blank)), "a blank page is in the index"
        assert all(map(self.index.knows, self._idle)), "an idle page has no content"


class ContiguousPool(PagePool):
    """First-fit runs of adjacent pages."""

    def take(self, count: int, taker: str = "") -> list[int] | None:
        free = sorted(self._blank)
        run: list[int] = []
        for page in free:
            run = [*run, page] if run and page == run[-1] + 1 else [page]
            if len(run) == count:
                break
        else:
            if len(run) != count:
                return None
        taken = set(run)
        self._blank = [p for p in self._blank if p not in taken]
        for page in run:
            self._refs[page] = 1
        self.peak = max(self.peak, self.used)
        return run
