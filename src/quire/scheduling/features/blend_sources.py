"""Where chunks of prompts were computed: behind which tokens, under which names of pages.

Refuses to know: what is still cached, requests.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from quire.memory.manager import KVManager, PageTable

MAX_KNOWN_CHUNKS = 8192
MAX_KNOWN_TOKENS = 1 << 20  # that stand before them, all together: some 40 MB
MAX_SOURCES = 4  # of each


@dataclass(frozen=True)
class Source:
    """A chunk behind other tokens, and the names of the pages that it fills, some of them beginning before it."""

    before: list[int]
    names: list[bytes]
    start: int  # of the first of these pages
    later: bool  # whether another chunk is among what comes before


class Sources:
    """Those of each chunk, used last first."""

    def __init__(self, memory: KVManager):
        self._memory = memory
        self._known: OrderedDict[tuple[int, bytes], list[Source]] = OrderedDict()  # by length and name of the chunk
        self._tokens = 0  # before all of them

    def of(self, salt: str, chunk: list[int]) -> list[Source]:
        key = self._key(salt, chunk)
        if key in self._known:
            self._known.move_to_end(key)
        return self._known.get(key, [])

    def add(self, salt: str, before: list[int], chunk: list[int], *, later: bool) -> Source:
        """The chunk is about to be computed there."""
        size, key = self._memory.layout.alignment, self._key(salt, chunk)
        first = len(before) // size
        added = Source(before, self._names(salt, before + chunk)[first:], first * size, later)
        known = self._known.pop(key, [])
        kept = self._known[key] = [added, *(source for source in known if source.before != before)][:MAX_SOURCES]
        self._tokens += _tokens_before(kept) - _tokens_before(known)
        while len(self._known) > MAX_KNOWN_CHUNKS or (self._tokens > MAX_KNOWN_TOKENS and len(self._known) > 1):
            _, oldest = self._known.popitem(last=False)
            self._tokens -= _tokens_before(oldest)
        return added

    def _key(self, salt: str, chunk: list[int]) -> tuple[int, bytes]:
        padding = -len(chunk) % self._memory.layout.alignment
        return len(chunk), self._names(salt, chunk + [0] * padding)[-1]

    def _names(self, salt: str, tokens: list[int]) -> list[bytes]:
        """Of the pages that tokens fill."""
        table = PageTable(1)
        self._memory.hash_pages(table, tokens, salt)
        return table.hashes[0]


def _tokens_before(sources: list[Source]) -> int:
    return sum(len(source.before) for source in sources)
