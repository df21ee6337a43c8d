"""Sessions: pages of conversations that pause (a tool runs) stay where they are for a while.

A held session keeps references to its pages on the device, within a quota per tenant. When memory is short, or the
quota is, the oldest let go first: their pages then leave like any others, down to the next tier, and are pinned there
until the session's time is up. Refuses to know: requests that run, how bytes move.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from quire.memory.manager import KVManager, PageTable
from quire.memory.tiers import Directory
from quire.scheduling.feature import SchedulingFeature
from quire.scheduling.plan_builder import PlanBuilder
from quire.scheduling.sequence import Sequence
from quire.types.cache_control import SessionView
from quire.types.clock import Clock
from quire.types.kv import NULL_PAGE
from quire.types.request import FinishReason, Status
from quire.types.transfer import Key


@dataclass
class Session:
    name: str
    salt: str
    until: float
    table: PageTable
    keys: list[Key]
    pages: int


class Sessions(SchedulingFeature):
    def __init__(self, memory: KVManager, directory: Directory, quota: float, clock: Clock):
        """`quota`: part of the device's pages that one tenant's sessions may hold."""
        self._memory = memory
        self._clock = clock
        self._directory = directory
        self._quota = int(memory.pool.total * quota)
        self._held: dict[tuple[str, str], Session] = {}  # by (salt, name), oldest first
        self._next_end = inf  # no session ends before

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
            self._memory.hold(pages)
        if (states := self._memory.states) is not None:
            size = self._memory.layout.groups[0].tokens_per_page
            states.hold(kept.state, table.hashes[0], len(kept.pages[0]) * size)
            if kept.state.since:
                keys += self._directory.state_keys(table.hashes[0][kept.state.since // size - 1])
        session = Session(name, salt, until, kept, keys, sum(len(pages) for pages in kept.pages))
        self.drop(name, salt)
        self._held[salt, name] = session
        self._next_end = min(self._next_end, until)
        self._directory.pin(keys, until)
        mine = [s for s in self._held.values() if s.salt == salt]
        while sum(s.pages for s in mine) > self._quota:
            self._let_go(mine.pop(0))
        return session.pages

    def finished(self, seq: Sequence, reason: FinishReason | None) -> None:
        """A request of a session ended well: its pages stay for a while."""
        request, well = seq.request, reason in (FinishReason.STOP, FinishReason.LENGTH)
        if request.session and well and seq.status is Status.RUNNING and not seq.evicted:
            self._memory.publish(seq.table, min(seq.computed, len(seq.tokens)), seq.tokens, request.salt)
            self.keep(request.session, request.salt, seq.table, self._clock.now + request.hold)

    def contribute(self, builder: PlanBuilder) -> None:
        self.expire(builder.now)

    def expire(self, now: float) -> None:
        """Sessions whose time is up let go."""
        if now >= self._next_end:
            for session in [s for s in self._held.values() if s.until <= now]:
                self._let_go(session)
            self._next_end = min((s.until for s in self._held.values()), default=inf)

    def reclaim(self, *, running: bool) -> bool:
        """The oldest session gives its pages up."""
        oldest = next(iter(self._held.values()), None)
        if oldest is not None:
            self._let_go(oldest)
        return oldest is not None

    def reset(self) -> None:
        while self.reclaim(running=True):
            pass

    step_failed = reset

    def drop(self, name: str, salt: str) -> None:
        if (salt, name) in self._held:
            self._let_go(self._held[salt, name])

    def _let_go(self, session: Session) -> None:
        del self._held[session.salt, session.name]
        if self._memory.states is not None:
            self._memory.states.drop(session.table.state)
        for pages in session.table.pages:
            self._memory.let_go(pages)

    def tables(self) -> list[PageTable]:
        return [session.table for session in self._held.values()]

    def view(self, now: float) -> list[SessionView]:
        return [SessionView(s.name, s.pages, max(0.0, s.until - now)) for s in self._held.values()]
