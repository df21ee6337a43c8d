"""A replica that loads its weights again for longer than the watchdog waits, on a clock of the test's own."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable

import pytest
from fake_replicas import FakeReplica, ask
from test_failover import Host, Reader, until

from quire.cluster import cluster_client, engine_replica, replica_handle
from quire.cluster.cluster_client import ClusterClient
from quire.cluster.engine_replica import EngineReplica
from quire.cluster.routers import make_router
from quire.engine import engine_process
from quire.engine.client import RestartPolicy

HANG_TIMEOUT_S = 60.0
STAGES = 4  # of the load, each shorter than that; together they are longer


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class SlowLoad:
    """Stands in for `wake`: takes a stage of it at a time, when it is let."""

    def __init__(self, clock: Clock):
        self._clock = clock
        self.reached, self.may_go_on = threading.Semaphore(0), threading.Semaphore(0)

    def __call__(self, on_progress: Callable[[], object]) -> None:
        for _ in range(STAGES):
            self._clock.now += 0.7 * HANG_TIMEOUT_S
            on_progress()
            self.reached.release()
            assert self.may_go_on.acquire(timeout=30)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    for module in (engine_process, cluster_client, replica_handle, engine_replica):
        monkeypatch.setattr(module, "time", found)
    monkeypatch.setattr(cluster_client, "WATCH_INTERVAL_S", 0.005)
    monkeypatch.setattr(engine_process, "ORPHAN_TIMEOUT_S", float("inf"))  # the hub speaks on a clock of its own
    return found


class Actor(EngineReplica):
    """Hears the heartbeats of a process that it did not start."""

    def __init__(self, heartbeats: int, heard: float):
        self._hang_timeout = HANG_TIMEOUT_S
        self._heartbeats, self._heard = heartbeats, heard

    def hear(self) -> None:
        if os.read(self._heartbeats, 4096):
            self._heard = engine_replica.time.monotonic()


async def test_a_wake_that_takes_longer_than_the_hang_timeout_is_no_hang(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither for the client nor for Ray, which asks the actor; without a word for so long, it is one."""
    heartbeats, theirs = os.pipe()
    client = ClusterClient(1, make_router("round-robin", 1), RestartPolicy(hang_timeout=HANG_TIMEOUT_S, max_restarts=1))
    replica, load = FakeReplica(client, heartbeat_fd=theirs), SlowLoad(clock)
    monkeypatch.setattr(replica.executor, "wake", load)
    try:
        await client.ready(Host())
        actor, handle = Actor(heartbeats, clock.now), client._replicas[0]
        await client.power(asleep=True, level=2)
        reader = Reader(client, ask("r", [1, 2]))  # wakes it
        for _ in range(STAGES):
            assert await asyncio.to_thread(load.reached.acquire, timeout=30)
            await until(lambda: handle.silence == 0)
            actor.hear()
            actor.check_health()
            load.may_go_on.release()
        (await asyncio.wait_for(reader.task, 20)).check()
        assert not handle.lost and handle.is_ready and not replica.ended.is_set()
        replica.executor.gate = threading.Semaphore(0)  # it does not step any more, and says nothing
        stuck = Reader(client, ask("s", [1, 2]))
        await until(lambda: bool(replica.core.busy))
        clock.now += 1.1 * HANG_TIMEOUT_S
        await until(lambda: "no sign of life for 66 s" in handle.lost)
        with pytest.raises(RuntimeError, match="no sign of life for 66 s"):
            actor.check_health()
        stuck.task.cancel()
    finally:
        replica.kill()
        await client.close()
        os.close(heartbeats)
        os.close(theirs)
