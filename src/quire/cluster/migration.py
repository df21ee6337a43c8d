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

from quire.cluster.active_request import SubRequest
from quire.cluster.handovers import Handovers
from quire.cluster.replica_handle import Replica
from quire.cluster.roles import PREFILL
from quire.types.handover import Handover

MAX_AT_ONCE = 8  # requests whose pages are copied together
MIN_GAP = 4  # requests that one replica has more than another before any is moved
MAX_SHARE = 1.5  # times as many
MIN_TOKENS = 16  # that an answer must be allowed to go on for

Resume = Callable[[SubRequest, Replica], None]  # have it go on on a replica, from what its reader has


class Migrations:
    def __init__(self, handovers: Handovers, replicas: Sequence[Replica], resume: Resume, timeout: float):
        """`timeout`: seconds without a page after which a target computes what is missing."""
        self._handovers = handovers
        self._replicas = replicas
        self._resume = resume
        self._timeout = timeout
        self._limit = asyncio.Semaphore(MAX_AT_ONCE)
        self._moving: set[SubRequest] = set()
        self._rebalancing: asyncio.Future[list[bool | BaseException]] | None = None
        self.migrations = 0  # requests, or branches of one, that went on elsewhere from their pages

    async def migrate_all(self, replica: Replica) -> None:
        """All that a replica draws tokens for goes on elsewhere, as far as that can be."""
        await asyncio.gather(*(self.move(sub_request, replica) for sub_request in list(replica.sub_requests.values())))

    async def move(self, sub_request: SubRequest, source: Replica, target: Replica | None = None) -> bool:
        """Whether it went on elsewhere."""
        if sub_request in self._moving:
            return False
        self._moving.add(sub_request)
        try:
            async with self._limit:
                return await self._move(sub_request, source, target)
        finally:
            self._moving.discard(sub_request)

    async def _move(self, sub_request: SubRequest, source: Replica, target: Replica | None) -> bool:
        target = target or self._least_loaded(source)
        if target is None or not self._is_migratable(sub_request, source):
            return False
        active = sub_request.active
        tokens = [[*active.request.prompt, *active.outputs[branch]] for branch in sorted(sub_request.branches)]
        copied = await asyncio.gather(*(self._copy(sub_request, source, target, known) for known in tokens))
        if not all(copied) or not self._is_migratable(sub_request, source) or not target.is_ready:
            return False  # it is over, or one of the two replicas is
        self._resume(sub_request, target)
        self.migrations += 1
        return True

    def _is_migratable(self, sub_request: SubRequest, source: Replica) -> bool:
        """Whether the source is drawing tokens for it, which can be gone on behind."""
        here = source.sub_requests.get(sub_request.request.id) is sub_request and bool(source.connector)
        return here and sub_request.started and sub_request.request.beam is None and not sub_request.request.pooling

    async def _copy(self, sub_request: SubRequest, source: Replica, target: Replica, tokens: list[int]) -> bool:
        """Whether the target has got what the source has of these tokens."""
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        handover = Handover(secrets.token_hex(16), source.connector, self._timeout, waits=False)

        def end(well: bool) -> None:
            if not done.done():
                done.set_result(well)

        internal = self._handovers.send(target, sub_request.request, tokens, handover, 0, end)
        try:
            return await asyncio.wait_for(done, 2 * self._timeout)
        except TimeoutError:
            self._handovers.abort(internal)
            return False

    def _least_loaded(self, source: Replica) -> Replica | None:
        others = [one for one in self._replicas if one is not source and one.load.accepts_requests and one.connector]
        return min(others, key=lambda one: one.load.cost, default=None)

    # ---- rebalancing ----------------------------------------------------------------------------------------

    def rebalance(self) -> None:
        """Begin to move requests from the replica that has most to the one that has fewest, if that pays."""
        if self._rebalancing is not None and not self._rebalancing.done():
            return
        ready = [one for one in self._replicas if one.load.accepts_requests and one.connector and one.role != PREFILL]
        if len(ready) < 2:
            return
        least, most = min(ready, key=_requests), max(ready, key=_requests)
        gap = _requests(most) - _requests(least)
        if gap < MIN_GAP or _requests(most) < MAX_SHARE * _requests(least):
            return
        chosen = self._longest_to_go(most.sub_requests.values())[: min(gap // 2, MAX_AT_ONCE)]
        moves = (self.move(sub_request, most, least) for sub_request in chosen)
        self._rebalancing = asyncio.gather(*moves, return_exceptions=True)

    def stop(self) -> None:
        if self._rebalancing is not None:
            self._rebalancing.cancel()

    def _longest_to_go(self, sub_requests: Iterable[SubRequest]) -> list[SubRequest]:
        left = {one: _tokens_left(one) for one in sub_requests if one.started and len(one.branches) == 1}
        return sorted((one for one, count in left.items() if count >= MIN_TOKENS), key=lambda one: -left[one])


def _requests(replica: Replica) -> int:
    return len(replica.sub_requests)


def _tokens_left(sub_request: SubRequest) -> int:
    """That an answer may still have."""
    (branch,) = sub_request.branches
    return (sub_request.request.params.max_tokens or 1 << 20) - len(sub_request.active.outputs[branch])
