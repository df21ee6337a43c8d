"""What operators do to replicas one by one: drain, restart, give a role, and see how many there are.

Refuses to know: requests of callers, routing, Ray.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from contextlib import suppress

from quire.cluster.active_request import Part
from quire.cluster.autoscaler import Autoscaler
from quire.cluster.handovers import PREFILL, Handovers
from quire.cluster.migration import Migrations
from quire.cluster.replica_handle import Replica, ReplicaState
from quire.cluster.replica_queries import ReplicaQueries
from quire.types.autoscaling import AutoscalingView
from quire.types.errors import EngineDeadError, InputError, RequestNotFoundError
from quire.types.membership import ReplicaView
from quire.types.messages import Abort, Shutdown

START_TIMEOUT_S = 600.0
STATS_TIMEOUT_S = 1.0  # that a drained replica has to say what it counted


class ReplicaOperations(ReplicaQueries):
    """Implements types.seams.ReplicaOperator."""

    autoscaler: Autoscaler | None
    handovers: Handovers
    migration: Migrations
    _replicas: list[Replica]

    @abstractmethod
    def _move(self, parts: list[Part], *, lost: bool, on: Replica | None = None) -> None:
        """Have parts go on elsewhere; `lost`: because their replica was."""

    async def replicas(self) -> list[ReplicaView]:
        return [replica.view() for replica in self._replicas if replica.state is not ReplicaState.STOPPED]

    def autoscaling(self) -> AutoscalingView | None:
        return None if self.autoscaler is None else self.autoscaler.view()

    async def drain(self, id: str, timeout: float) -> ReplicaView:
        """Send a replica nothing new; what it has not finished after `timeout` seconds goes on elsewhere."""
        replica = self._replica(id)
        if not any(one.up for one in self._replicas if one is not replica):  # whatever its role: all can answer
            raise InputError(f"no other replica is ready to take over from {id}", param="id")
        if replica.state is ReplicaState.STARTING:
            raise InputError(f"{id} is starting: there is nothing to drain", param="id")
        await self.empty(replica, timeout)
        return replica.view()

    async def empty(self, replica: Replica, timeout: float) -> None:
        """Drain a replica, whether or not another is there to take over."""
        replica.state = ReplicaState.DRAINING
        self.handovers.route()
        with suppress(TimeoutError):
            await asyncio.wait_for(replica.idle.wait(), timeout)
        if replica.state is ReplicaState.DRAINING:
            await self.migration.evacuate(replica)
        if replica.state is ReplicaState.DRAINING:  # neither lost nor activated meanwhile
            for request in (*replica.parts, *replica.internal):
                self.hub.send(replica.identity, Abort(request))
            self._move(replica.give_up(), lost=False)
            replica.state = ReplicaState.DRAINED
            with suppress(TimeoutError, EngineDeadError):  # what it has counted, in case it is ended now
                await asyncio.wait_for(self.stats_of(replica), STATS_TIMEOUT_S)

    def end(self, replica: Replica) -> None:
        """Have its process end, if there is one."""
        if replica.identity:
            self.hub.send(replica.identity, Shutdown())

    def activate(self, id: str) -> ReplicaView:
        """Route to a drained replica again."""
        replica = self._replica(id)
        if replica.identity and replica.wanted:
            replica.state = ReplicaState.READY
            self.handovers.route()
        return replica.view()

    def handed_over(self) -> tuple[int, int]:
        return self.migration.migrations, self.handovers.remote_prefills

    async def assign(self, id: str, role: str) -> ReplicaView:
        """Give a replica another role; what it draws tokens for goes on elsewhere if it is to compute prompts only."""
        replica = self._replica(id)
        self.handovers.assign(replica, role)
        if role == PREFILL:
            await self.migration.evacuate(replica)
        return replica.view()

    async def restart(self, id: str, timeout: float) -> ReplicaView:
        """Drain a replica and have its host start it anew; one that starts does so anyway."""
        replica = self._replica(id)
        if replica.state is not ReplicaState.STARTING:
            await self.drain(id, timeout)
        if replica.state is ReplicaState.DRAINED:
            replica.joined.clear()
            self.hub.send(replica.identity, Shutdown())
        await asyncio.wait_for(replica.joined.wait(), START_TIMEOUT_S)
        return replica.view()

    async def rolling_restart(self, timeout: float) -> list[ReplicaView]:
        """Replace all replicas, one after the other."""
        return [await self.restart(replica.id, timeout) for replica in self._replicas if replica.wanted]

    def _replica(self, id: str) -> Replica:
        for replica in self._replicas:
            if replica.id == id and replica.state is not ReplicaState.STOPPED:
                return replica
        raise RequestNotFoundError(f"there is no replica {id!r}")
