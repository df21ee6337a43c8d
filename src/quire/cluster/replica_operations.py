"""What operators do to replicas one by one: drain, restart, give a role, and see how many there are.

Refuses to know: requests of callers, routing, Ray.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import abstractmethod
from contextlib import suppress

from quire.cluster.active_request import SubRequest
from quire.cluster.autoscaler import Autoscaler
from quire.cluster.handovers import Handovers
from quire.cluster.migration import Migrations
from quire.cluster.replica_handle import Replica, ReplicaState
from quire.cluster.replica_queries import ReplicaQueries
from quire.cluster.role_switching import RoleSwitcher
from quire.cluster.roles import PREFILL
from quire.types.autoscaling import AutoscalingView
from quire.types.errors import EngineDeadError, InputError, ReplicaNotFoundError
from quire.types.membership import ReplicaView
from quire.types.messages import Abort, Shutdown

log = logging.getLogger(__name__)

START_TIMEOUT_S = 600.0
STATS_TIMEOUT_S = 1.0  # that a drained replica has to say what it counted


class ReplicaOperations(ReplicaQueries):
    """Implements types.seams.ReplicaOperator."""

    autoscaler: Autoscaler | None
    handovers: Handovers
    migration: Migrations
    role_switcher: RoleSwitcher | None

    @abstractmethod
    def _move(self, sub_requests: list[SubRequest], *, lost: bool, on: Replica | None = None) -> None:
        """Have sub-requests go on elsewhere; `lost`: because their replica was."""

    async def replicas(self) -> list[ReplicaView]:
        return [replica.view() for replica in self._replicas if replica.state is not ReplicaState.STOPPED]

    def autoscaling(self) -> AutoscalingView | None:
        return None if self.autoscaler is None else self.autoscaler.view()

    async def drain(self, id: str, timeout: float) -> ReplicaView:
        """Send a replica nothing new; what it has not finished after `timeout` seconds goes on elsewhere."""
        replica = self._replica(id)
        if not any(one.is_ready for one in self._replicas if one is not replica):  # whatever its role: all can answer
            raise InputError(f"no other replica is ready to take over from {id}", param="id")
        if replica.state is ReplicaState.STARTING:
            raise InputError(f"{id} is starting: there is nothing to drain", param="id")
        log.info("draining %s: %d requests have %g s to finish there", id, len(replica.sub_requests), timeout)
        await self.drain_replica(replica, timeout)
        log.info("%s is %s", id, replica.state)
        return replica.view()

    async def drain_replica(self, replica: Replica, timeout: float) -> None:
        """Drain a replica, whether or not another is there to take over."""
        replica.state = ReplicaState.DRAINING
        self.handovers.route()
        with suppress(TimeoutError):  # wait_for would let a cancellation pass that comes when the last request ends
            async with asyncio.timeout(timeout):
                await replica.idle.wait()
        if replica.state is ReplicaState.DRAINING:
            await self.migration.migrate_all(replica)
        if replica.state is ReplicaState.DRAINING:  # neither lost nor activated meanwhile
            for request in (*replica.sub_requests, *replica.internal):
                self.hub.send(replica.identity, Abort(request))
            self._move(replica.remove_all(), lost=False)
            replica.state = ReplicaState.DRAINED
            with suppress(TimeoutError, EngineDeadError):  # what it has counted, in case it is ended now
                async with asyncio.timeout(STATS_TIMEOUT_S):
                    await self.stats_of(replica)

    def shut_down(self, replica: Replica) -> None:
        """Have its process end, if there is one."""
        if replica.identity:
            self.hub.send(replica.identity, Shutdown())

    def activate(self, id: str) -> ReplicaView:
        """Route to a replica again that drains, or is drained."""
        replica = self._replica(id)
        if replica.state not in (ReplicaState.DRAINING, ReplicaState.DRAINED) or not replica.wanted:
            raise InputError(f"{id} is {replica.state}: only a replica that was drained is activated", param="id")
        replica.state = ReplicaState.READY
        self.handovers.route()
        log.info("%s is routed to again", id)
        return replica.view()

    @property
    def migrations(self) -> int:
        return self.migration.migrations

    async def set_role(self, id: str, role: str) -> ReplicaView:
        """Give a replica a role, which it keeps; what it draws tokens for goes on elsewhere if it is to compute prompts
        only."""
        replica = self._replica(id)
        self.handovers.check_role(replica, role)
        replica.role_fixed = True
        await self._change_role(replica, role)
        return replica.view()

    @property
    def role_switches(self) -> int:
        return self.role_switcher.switches if self.role_switcher is not None else 0

    async def _change_role(self, replica: Replica, role: str) -> None:
        before, id = replica.role, replica.id
        self.handovers.set_role(replica, role)
        log.info("%s has the role %s, after %s", id, role, before)
        if role == PREFILL and replica.sub_requests:
            left = len(replica.sub_requests)
            await self.migration.migrate_all(replica)
            log.info("%s: %d of %d requests go on elsewhere", id, left - len(replica.sub_requests), left)

    async def restart(self, id: str, timeout: float) -> ReplicaView:
        """Drain a replica and have its host start it anew; one that starts does so anyway."""
        replica, began = self._replica(id), time.monotonic()
        process = replica.process
        log.info("restarting %s", id)
        if replica.state is not ReplicaState.STARTING:
            try:
                await self.drain(id, timeout)
            except InputError as error:
                log.info("%s is not restarted: %s", id, error)
                raise
        if replica.is_ready:
            raise InputError(f"{id} was activated while it was drained: it is not restarted", param="id")
        if replica.state is ReplicaState.DRAINED:
            replica.joined.clear()
            self.hub.send(replica.identity, Shutdown(restart=True))
        await asyncio.wait_for(replica.joined.wait(), START_TIMEOUT_S)
        if process and replica.process == process:  # its connection was lost before it heard
            return await self.restart(id, timeout)
        log.info("%s was restarted in %.1f s", id, time.monotonic() - began)
        return replica.view()

    async def rolling_restart(self, timeout: float) -> list[ReplicaView]:
        """Replace all replicas, one after the other."""
        replicas = [replica for replica in self._replicas if replica.wanted]
        log.info("a rolling restart of %d replicas begins", len(replicas))
        views = [await self.restart(replica.id, timeout) for replica in replicas if replica.wanted]
        log.info("the rolling restart is done")
        return views

    def _replica(self, id: str) -> Replica:
        for replica in self._replicas:
            if replica.id == id and replica.state is not ReplicaState.STOPPED:
                return replica
        raise ReplicaNotFoundError(f"there is no replica {id!r}")
