"""Replicas started and ended as the autoscaler says: samples of all of them in, slots filled and emptied out.

    GetStats of each ──► FleetSample ──► Autoscaler ──► fewer: drain the least loaded, then its host ends it
                                                   └──► more: take back what drains, then its host starts others

A replica that is drained sends what it has not finished elsewhere, so that no request is lost. Refuses to know: Ray,
how many replicas a load needs.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from quire.cluster.autoscaler import INTERVAL_S, Autoscaler, FleetMeter
from quire.cluster.replica_handle import Replica, ReplicaState
from quire.types.errors import EngineDeadError
from quire.types.events import EngineStats

log = logging.getLogger(__name__)

STATS_TIMEOUT_S = 5.0  # that a replica has to answer before it is left out of a sample
DRAIN_TIMEOUT_S = 60.0  # that requests have to finish on a replica that is not needed any more


class ReplicaHost(Protocol):
    """Whoever starts replicas, watches them and starts them again."""

    def start_replica(self, number: int) -> None: ...

    def stop_replica(self, number: int) -> None:
        """Returns when it is gone."""

    def stop(self) -> None: ...


class ScaledClient(Protocol):
    """What scaling needs of the cluster's client."""

    @property
    def pending(self) -> int:
        """Requests that wait for a replica while there is none."""

    async def stats_of(self, replica: Replica) -> EngineStats: ...

    async def drain_replica(self, replica: Replica, timeout: float) -> None:
        """Drain it: returns when it has nothing to do."""

    def shut_down(self, replica: Replica) -> None:
        """Have its process end, if there is one."""


class ReplicaScaler:
    def __init__(self, autoscaler: Autoscaler, replicas: Sequence[Replica], client: ScaledClient, host: ReplicaHost):
        self._autoscaler = autoscaler
        self._replicas = replicas
        self._client = client
        self._host = host
        self._meter = FleetMeter()
        self._ending: dict[Replica, asyncio.Task[None]] = {}
        self._starting: dict[Replica, asyncio.Task[None]] = {}
        self._start_calls: dict[Replica, asyncio.Future[None]] = {}  # the host, to start it; the latest time
        self._woken = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    def wake(self) -> None:
        """A request waits for a replica: if there is to be none, do not wait for the next look."""
        if self._autoscaler.target == 0:
            self._woken.set()

    async def close(self) -> None:
        tasks = [self._task, *self._ending.values(), *self._starting.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            with suppress(TimeoutError):  # wait_for would take a wake for an end that comes with it
                async with asyncio.timeout(INTERVAL_S):
                    await self._woken.wait()
            self._woken.clear()
            try:
                await self._tick()
            except Exception:
                log.exception("autoscaling failed; it goes on with the next look")

    async def _tick(self) -> None:
        asked = [replica for replica in self._replicas if replica.identity]
        answers = await asyncio.gather(*map(self._stats_of, asked))
        found = {one.process: stats for one, stats in zip(asked, answers, strict=True) if stats is not None}
        away = {one.process for one in self._replicas if one.process not in found}
        ready = sum(replica.load.accepts_requests for replica in self._replicas)
        before, scaler = self._autoscaler.target, self._autoscaler
        sample = self._meter.sample(found, ready, self._client.pending, away)
        target = scaler.decide(time.monotonic(), sample)
        if target != before:
            log.info("scaling from %d to %d replicas: %s", before, target, scaler.reason)
        self._reconcile(target)

    async def _stats_of(self, replica: Replica) -> EngineStats | None:
        with suppress(TimeoutError, EngineDeadError):
            async with asyncio.timeout(STATS_TIMEOUT_S):
                return await self._client.stats_of(replica)
        return None

    def _reconcile(self, target: int) -> None:
        wanted = [replica for replica in self._replicas if replica.wanted]
        for replica in sorted(wanted, key=_removal_order)[: max(0, len(wanted) - target)]:
            replica.wanted = False
            self._ending[replica] = asyncio.create_task(self._end(replica))
        missing = target - len(wanted)
        for replica in self._replicas if missing > 0 else ():
            if missing and not replica.wanted and self._bring_up(replica):
                missing -= 1

    def _bring_up(self, replica: Replica) -> bool:
        """Whether it is, or will be, there again."""
        if replica.state is ReplicaState.DRAINING:
            self._ending.pop(replica).cancel()
            replica.wanted = True
            replica.state = ReplicaState.READY
            log.info("%s stays", replica.id)
            return True
        if replica in self._ending:  # its host has not ended it yet
            return False
        replica.wanted = True
        replica.state = ReplicaState.STARTING
        self._starting[replica] = asyncio.create_task(self._start(replica))
        return True

    async def _start(self, replica: Replica) -> None:
        began = time.monotonic()
        call = self._start_calls[replica] = asyncio.ensure_future(
            asyncio.to_thread(self._host.start_replica, replica.number)
        )
        try:
            await asyncio.shield(call)
        except Exception as error:  # the host's own kind: it is tried again
            log.warning("%s could not be started: %s", replica.id, error)
            replica.wanted = False
            replica.state = ReplicaState.STOPPED
        else:
            await replica.joined.wait()
            log.info("%s took %.1f s to start", replica.id, time.monotonic() - began)
        del self._starting[replica]

    async def _end(self, replica: Replica) -> None:
        if (start := self._starting.pop(replica, None)) is not None:
            start.cancel()
        if replica.identity:
            await self._client.drain_replica(replica, DRAIN_TIMEOUT_S)
        else:
            replica.state = ReplicaState.STOPPED
        if (call := self._start_calls.pop(replica, None)) is not None:  # or the host would end it first, then start it
            await asyncio.wait([call])
        try:
            await asyncio.to_thread(self._host.stop_replica, replica.number)
        except Exception as error:  # the host's own kind
            log.warning("%s could not be ended by its host: %s", replica.id, error)
        self._client.shut_down(replica)
        await replica.gone.wait()
        del self._ending[replica]
        log.info("%s is ended", replica.id)


def _removal_order(replica: Replica) -> tuple[bool, int, int]:
    """Replicas that are the least loss come first: those that start, then those with the least to do."""
    return bool(replica.identity), len(replica.sub_requests), -replica.number
