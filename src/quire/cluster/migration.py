"""Live migration: a running request goes on on another replica, from its KV pages.

    source draws on ─────────────────────────────► (told to stop) ─┐
    target: gets the pages of all tokens known so far ─► ready ────┴─► goes on behind the tokens that the reader has

Pages go first, while the source still draws; then tokens, with which grammars, drafts and penalties are rebuilt. What
is not in a page that came, a few tokens, the target computes. Used by drains, rolling restarts and, where one replica
has many more requests than another, rebalancing. Refuses to know: how pages travel, routing policies.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterable, Sequence

from quire.cluster.active_request import Part
from quire.cluster.handovers import PREFILL, Handovers
from quire.cluster.replica_handle import Replica
from quire.types.handover import Handover

MAX_AT_ONCE = 8  # requests whose pages are copied together
MIN_GAP = 4  # requests that one replica has more than another before any is moved
MAX_SHARE = 1.5  # times as many
MIN_TOKENS = 16  # that an answer must be allowed to go on for

Resume = Callable[[Part, Replica], None]  # have a part go on on a replica, from what its reader has


class Migrations:
    def __init__(self, handovers: Handovers, replicas: Sequence[Replica], resume: Resume, timeout: float):
        """`timeout`: seconds without a page after which a target computes what is missing."""
        self._handovers = handovers
        self._replicas = replicas
        self._resume = resume
        self._timeout = timeout
        self._limit = asyncio.Semaphore(MAX_AT_ONCE)
        self._moving: set[Part] = set()
        self._rebalancing: asyncio.Future[list[bool | BaseException]] | None = None
        self.migrations = 0  # requests, or branches of one, that went on elsewhere from their pages

    async def evacuate(self, replica: Replica) -> None:
        """All that a replica draws tokens for goes on elsewhere, as far as that can be."""
        await asyncio.gather(*(self.move(part, replica) for part in list(replica.parts.values())))

    async def move(self, part: Part, source: Replica, target: Replica | None = None) -> bool:
        """Whether a part of a request went on elsewhere."""
        if part in self._moving:
            return False
        self._moving.add(part)
        try:
            async with self._limit:
                return await self._move(part, source, target)
        finally:
            self._moving.discard(part)

    async def _move(self, part: Part, source: Replica, target: Replica | None) -> bool:
        target = target or self._lightest(source)
        if target is None or not self._can(part, source):
            return False
        active = part.active
        tokens = [[*active.request.prompt, *active.outputs[branch]] for branch in sorted(part.branches)]
        copied = await asyncio.gather(*(self._copy(part, source, target, known) for known in tokens))
        if not all(copied) or not self._can(part, source) or not target.up:
            return False  # it is over, or one of the two replicas is
        self._resume(part, target)
        self.migrations += 1
        return True

    def _can(self, part: Part, source: Replica) -> bool:
        """Whether the source is drawing tokens for it, which can be gone on behind."""
        here = source.parts.get(part.request.id) is part and bool(source.connector)
        return here and part.started and part.request.beam is None and not part.request.pooling

    async def _copy(self, part: Part, source: Replica, target: Replica, tokens: list[int]) -> bool:
        """Whether the target has got what the source has of these tokens."""
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        handover = Handover(secrets.token_hex(16), source.connector, self._timeout, waits=False)

        def end(well: bool) -> None:
            if not done.done():
                done.set_result(well)

        internal = self._handovers.send(target, part.request, tokens, handover, 0, end)
        try:
            return await asyncio.wait_for(done, 2 * self._timeout)
        except TimeoutError:
            self._handovers.abort(internal)
            return False

    def _lightest(self, source: Replica) -> Replica | None:
        others = [one for one in self._replicas if one is not source and one.load.ready and one.connector]
        return min(others, key=lambda one: one.load.cost, default=None)

    # ---- rebalancing ----------------------------------------------------------------------------------------

    def rebalance(self) -> None:
        """Begin to move requests from the replica that has most to the one that has fewest, if that pays."""
        if self._rebalancing is not None and not self._rebalancing.done():
            return
        ready = [one for one in self._replicas if one.load.ready and one.connector and one.role != PREFILL]
        if len(ready) < 2:
            return
        least, most = min(ready, key=_requests), max(ready, key=_requests)
        gap = _requests(most) - _requests(least)
        if gap < MIN_GAP or _requests(most) < MAX_SHARE * _requests(least):
            return
        chosen = self._longest_to_go(most.parts.values())[: min(gap // 2, MAX_AT_ONCE)]
        moves = (self.move(part, most, least) for part in chosen)
        self._rebalancing = asyncio.gather(*moves, return_exceptions=True)

    def stop(self) -> None:
        if self._rebalancing is not None:
            self._rebalancing.cancel()

    def _longest_to_go(self, parts: Iterable[Part]) -> list[Part]:
        left = {part: _tokens_left(part) for part in parts if part.started and len(part.branches) == 1}
        return sorted((part for part, count in left.items() if count >= MIN_TOKENS), key=lambda part: -left[part])


def _requests(replica: Replica) -> int:
    return len(replica.parts)


def _tokens_left(part: Part) -> int:
    """That an answer may still have."""
    (branch,) = part.branches
    return (part.request.params.max_tokens or 1 << 20) - len(part.active.outputs[branch])
