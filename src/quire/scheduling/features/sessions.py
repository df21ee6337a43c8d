"""Sessions: pages of conversations that pause (a tool runs) stay where they are for a while.

A held session keeps references to its pages on the device, within a quota per tenant. When memory is short, or the
quota is, the oldest let go first: their pages then leave like any others, down to the next tier, and are pinned there
until the session's time is up. Refuses to know: requests that run, how bytes move.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.memory.manager import KVManager, PageTable
from quire.memory.tiers import Directory
from quire.types.cache_orders import SessionView
from quire.types.kv import NULL_PAGE
from quire.types.transfer import Key


@dataclass
class Session:
    name: str
    salt: str
    until: float
    table: PageTable
    keys: list[Key]
    pages: int


class Sessions:
    def __init__(self, memory: KVManager, directory: Directory, quota: float):
        """`quota`: part of the device's pages that one tenant's sessions may hold."""
        self._memory = memory
        self._directory = directory
        self._quota = int(memory.pool.total * quota)
        self._held: dict[tuple[str, str], Session] = {}  # by (salt, name), oldest first

    def keep(self, name: str, salt: str, table: PageTable, until: float) -> int:
        """Hold the named pages of a table until then; returns how many. A session of that name is replaced."""
        kept = PageTable(len(table.pages))
        keys: list[Key] = []
        left = self._quota
        for group, pages in enumerate(table.pages):
            named = pages[: min(table.published[group], left)]
            kept.pages[group] = list(named)
            left -= len(named)
            keys += [(group, table.hashes[group][i]) for i, page in enumerate(named) if page != NULL_PAGE]
        for pages in kept.pages:
            self._memory.pool.share(pages)
        session = Session(name, salt, until, kept, keys, sum(len(pages) for pages in kept.pages))
        self.drop(name, salt)
        self._held[salt, name] = session
        self._directory.pin(keys, until)
        mine = [s for s in self._held.values() if s.salt == salt]
        while sum(s.pages for s in mine) > self._quota:
            self._let_go(mine.pop(0))
        return session.pages

    def let_go(self) -> bool:
        """Memory is short: the oldest session gives its pages up. Whether there was one."""
        oldest = next(iter(self._held.values()), None)
        if oldest is not None:
            self._let_go(oldest)
        return oldest is not None

    def clear(self) -> None:
        while self.let_go():
            pass

    def expire(self, now: float) -> None:
        for session in [s for s in self._held.values() if s.until <= now]:
            self._let_go(session)

    def drop(self, name: str, salt: str) -> None:
        if (salt, name) in self._held:
            self._let_go(self._held[salt, name])

    def _let_go(self, session: Session) -> None:
        del self._held[session.salt, session.name]
        for pages in session.table.pages:
            self._memory.pool.release(pages[::-1])

    def tables(self) -> list[PageTable]:
        return [session.table for session in self._held.values()]

    def view(self, now: float) -> list[SessionView]:
        return [SessionView(s.name, s.pages, max(0.0, s.until - now)) for s in self._held.values()]
