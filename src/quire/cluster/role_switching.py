"""Replicas change their roles as the load's shape changes, one at a time and without dropping anything.

    loads of both pools ──► RoleBalancer ──► the least loaded replica of the one that gives ──► its requests move on

Refuses to know: when a change pays (`roles.py`), how a replica's requests go on elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from quire.cluster.replica_handle import Replica
from quire.cluster.roles import DECODE, PREFILL, PoolSample, RoleBalancer, RoleDecision
from quire.cluster.router_policy import REQUEST_TOKENS
from quire.types.errors import InputError

log = logging.getLogger(__name__)


class RoleSwitcher:
    """Changes roles of a cluster's replicas, one at a time."""

    def __init__(self, replicas: Sequence[Replica], change: Callable[[Replica, str], Awaitable[None]]):
        """`change` gives a replica a role and has its requests go on."""
        self._replicas = replicas
        self._change = change
        self._balancer = RoleBalancer()
        self._task: asyncio.Task[None] | None = None
        self.switches = 0

    def look(self, now: float) -> None:
        if self._task is not None and not self._task.done():
            return
        ready = [one for one in self._replicas if one.is_ready and one.connector]
        pools = {
            role: [one for one in ready if (one.role == PREFILL) == (role == PREFILL)] for role in (PREFILL, DECODE)
        }
        prefill_work = sum(one.load.tokens for one in pools[PREFILL])
        sample = PoolSample(
            len(pools[PREFILL]), len(pools[DECODE]), prefill_work, sum(_decode_work(one) for one in pools[DECODE])
        )
        decision = self._balancer.decide(now, sample)
        if decision is None:
            return
        giving = [one for one in pools[DECODE if decision.role == PREFILL else PREFILL] if not one.role_fixed]
        if giving:
            self._task = asyncio.create_task(self._switch(min(giving, key=_decode_work), decision))

    async def _switch(self, replica: Replica, decision: RoleDecision) -> None:
        log.info("%s changes its role to %s: %s", replica.id, decision.role, decision.why)
        try:
            await self._change(replica, decision.role)
            self.switches += 1
        except InputError as error:  # another replica was lost meanwhile
            log.info("%s keeps its role: %s", replica.id, error)

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()


def _decode_work(replica: Replica) -> int:
    """Requests whose prompt is computed elsewhere are work of that pool until they draw."""
    under_way = sum(one.started or not one.remote_prefill for one in replica.sub_requests.values())
    return replica.load.tokens + REQUEST_TOKENS * under_way
