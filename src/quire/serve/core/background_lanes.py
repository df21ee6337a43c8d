"""Whose batch is worked off when, and how many of its requests are under way: each key has one batch at a time,
whichever API ordered it, and all of them run behind what callers wait for.

Refuses to know: what is worked off.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from quire.serve.core.rate_limits import RequestAdmission
from quire.types.messages import EngineInfo

AT_ONCE = 64  # requests of batches in the engine together


class Lanes:
    def __init__(self, admission: RequestAdmission, info: EngineInfo):
        self._admission = admission
        self._info = info
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # by key
        self._working: set[str] = set()  # keys whose batch is under way

    @asynccontextmanager
    async def turn(self, owner: str) -> AsyncIterator[None]:
        """While it is this batch's, among those of its key."""
        async with self._turns[owner]:
            self._working.add(owner)
            try:
                yield
            finally:
                self._working.discard(owner)

    def at_once(self) -> int:
        """Requests of one batch that may be under way. Where the scheduler knows priorities it keeps them behind what
        callers wait for; elsewhere they have half the engine's slots less what callers use, one where those wait."""
        room = min(AT_ONCE, self._info.slots or AT_ONCE)
        if not self._info.priorities:
            room = 1 if self._admission.waiting else min(room, (self._info.slots or AT_ONCE) // 2)
            room -= self._admission.inflight - self._admission.background
        return max(1, room // max(1, len(self._working)))
