"""Replicas started and ended under requests as the autoscaler says: readers notice nothing, whatever comes between."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from fake_replicas import FakeReplica, ask
from msgspec.structs import replace
from test_failover import Reader, until

from quire.cluster import replica_scaling
from quire.cluster.autoscaler import Autoscaler, FleetMeter, FleetSample
from quire.cluster.cluster_client import ClusterClient
from quire.cluster.routers import make_router
from quire.engine.client import RestartPolicy
from quire.types.autoscaling import AutoscaleOptions
from quire.types.errors import DeadlineError, EngineDeadError
from quire.types.events import EngineStats


class Scripted(Autoscaler):
    """Wants what the test says."""

    def decide(self, now: float, sample: FleetSample) -> int:
        self.seen = sample
        return self.target


class FakeHost:
    """Starts replicas that are threads, when it is let."""

    def __init__(self, client: ClusterClient, *, gated: bool = False):
        self.client, self.gated = client, gated
        self.made: dict[int, FakeReplica] = {}
        self.started: list[int] = []
        self.ended: list[int] = []
        self.may_start = threading.Event()
        self.may_start.set()

    def start_replica(self, number: int) -> None:
        assert self.may_start.wait(20)
        self.started.append(number)
        self.made[number] = FakeReplica(self.client, gated=self.gated, number=number)

    def stop_replica(self, number: int) -> None:
        self.ended.append(number)

    def stop(self) -> None:
        pass


@asynccontextmanager
async def scaled(
    count: int, autoscaler: type[Autoscaler] = Scripted, *, gated: bool = False, wait: float = 20.0, **options: float
) -> AsyncIterator[tuple[ClusterClient, FakeHost, Autoscaler]]:
    scaler = autoscaler(AutoscaleOptions(min_replicas=0, max_replicas=3, **options), count)
    client = ClusterClient(
        count, make_router("least-load", 3), RestartPolicy(max_restarts=20), autoscaler=scaler, replica_wait=wait
    )
    host = FakeHost(client, gated=gated)
    for number in range(count):
        host.start_replica(number)
    try:
        await client.ready(host)
        yield client, host, scaler
    finally:
        host.may_start.set()
        for replica in host.made.values():
            replica.free()
        await client.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_scaling, "INTERVAL_S", 0.01)


def states(client: ClusterClient) -> list[str]:
    return [replica.state.value for replica in client._replicas]


def settled(client: ClusterClient, *wanted: str) -> Callable[[], bool]:
    return lambda: states(client) == list(wanted) and not client._scaler._ending  # type: ignore[union-attr]


async def test_up_and_down_under_streams() -> None:
    async with scaled(1) as (client, host, scaler):
        readers = [Reader(client, ask(f"a{i}", [i, 2], seed=i)) for i in range(8)]
        scaler.target = 3
        await until(settled(client, "ready", "ready", "ready"))
        readers += [Reader(client, ask(f"b{i}", [i, 3], seed=i)) for i in range(16)]
        scaler.target = 1
        await until(lambda: states(client).count("stopped") == 2)
        readers += [Reader(client, ask(f"c{i}", [i, 4], seed=i)) for i in range(8)]
        for reader in readers:
            (await asyncio.wait_for(reader.task, 30)).check()
        assert len(await client.replicas()) == 1
        assert sorted(host.started) == [0, 1, 2] and len(host.ended) == 2
        assert client.failovers == 0 and not client._losses, "a replica that is not needed is not lost"


async def test_scaling_up_again_is_no_restart() -> None:
    async with scaled(1) as (client, host, scaler):
        for target in (2, 1, 2):
            scaler.target = target
            there = ["ready"] * target + ["stopped"] * (3 - target)
            await until(settled(client, *there))
        assert [(one.restarts, one.lost) for one in await client.replicas()] == [(0, ""), (0, "")]
        assert client.restarts == 0
        host.made[1].kill()
        await until(lambda: not client._replicas[1].identity)
        host.start_replica(1)
        await until(settled(client, "ready", "ready", "stopped"))
        assert [one.restarts for one in await client.replicas()] == [0, 1] and client.restarts == 1


async def test_what_a_drained_replica_does_not_finish_goes_on_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_scaling, "DRAIN_TIMEOUT_S", 0.0)
    async with scaled(2, gated=True) as (client, host, scaler):
        readers = [Reader(client, ask(f"r{i}", [i, 2], seed=i)) for i in range(3)]  # two and one
        await until(lambda: len(client._replica_by_id) == 3)
        for replica in host.made.values():
            replica.steps(4)
        await until(lambda: all(reader.drawn >= 2 for reader in readers), stepping=host.made.values())
        client.stats_of = lambda replica: asyncio.sleep(0, EngineStats())  # type: ignore[method-assign, assignment]
        scaler.target = 1
        await until(lambda: "ready" in states(client) and len(host.ended) == 1)
        ended = host.ended[0]
        assert not client._replicas[ended].sub_requests, "the one with the least to do"
        for replica in host.made.values():
            replica.free()
        for reader in readers:
            (await asyncio.wait_for(reader.task, 30)).check()


async def one_drains(client, scaler):  # type: ignore[no-untyped-def]
    """Of two replicas with a request each, one is to go; who reads the answers."""
    readers = [Reader(client, ask(f"r{i}", [i, 2], seed=i)) for i in range(2)]
    await until(lambda: len(client._replica_by_id) == 2)
    client.stats_of = lambda replica: asyncio.sleep(0, EngineStats())
    scaler.target = 1
    await until(lambda: "draining" in states(client))
    return readers


async def test_one_that_drains_is_taken_back_when_it_is_needed_again() -> None:
    async with scaled(2, gated=True) as (client, host, scaler):
        readers = await one_drains(client, scaler)
        scaler.target = 2
        await until(lambda: states(client)[:2] == ["ready", "ready"])
        assert host.started == [0, 1] and not host.ended
        for replica in host.made.values():
            replica.free()
        for reader in readers:
            (await asyncio.wait_for(reader.task, 30)).check()


async def test_one_that_is_taken_back_as_its_last_request_ends_stays() -> None:
    async with scaled(2, gated=True) as (client, host, scaler):
        readers = await one_drains(client, scaler)
        back = next(one for one in client._replicas if one.state == "draining")
        await asyncio.sleep(0.05)  # the drain waits
        back.idle.set()
        scaler.target = 2
        assert client._scaler is not None and client._scaler._bring_up(back)
        await asyncio.sleep(0.05)  # ticks enough for its end, if it went on
        assert states(client)[:2] == ["ready", "ready"] and not host.ended
        for replica in host.made.values():
            replica.free()
        for reader in readers:
            (await asyncio.wait_for(reader.task, 30)).check()


async def test_one_that_starts_is_given_up_when_it_is_not_needed_any_more() -> None:
    async with scaled(1) as (client, host, scaler):
        host.may_start.clear()
        scaler.target = 2
        await until(lambda: states(client)[1] == "starting")
        scaler.target = 1
        await until(lambda: states(client)[1] == "stopped")
        await asyncio.sleep(0.05)  # looks enough for the host to be asked, if it were
        assert not host.ended, "the host is not asked to end what it is about to start"
        host.may_start.set()
        await until(settled(client, "ready", "stopped", "stopped"))
        assert (host.started, host.ended) == ([0, 1], [1])
        assert await asyncio.to_thread(host.made[1].ended.wait, 20), "it is sent away"


async def test_to_zero_and_back_by_the_policy_itself(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="quire.cluster")
    async with scaled(1, Autoscaler, downscale_delay=0.1) as (client, _, scaler):
        await until(settled(client, "stopped", "stopped", "stopped"))
        assert client.trouble() is None, "a request would be served"
        assert (await client.replicas()) == []
        readers = [Reader(client, ask(f"r{i}", [i, 2], seed=i)) for i in range(4)]
        for reader in readers:
            (await asyncio.wait_for(reader.task, 30)).check()
        await until(settled(client, "stopped", "stopped", "stopped"))
        assert scaler.scaled["up"] >= 1 and scaler.scaled["down"] >= 2
        stats = await client.stats()
        assert (stats.output_tokens, stats.running, stats.pages_total) == (4 * 24, 0, 0), "counters stay, gauges do not"
        await client.power(asleep=True)
        assert "scaling from 1 to 0 replicas: idle" in caplog.text
        assert "scaling from 0 to 1 replicas: a request waits and there is no replica" in caplog.text


async def test_a_request_waits_for_a_replica_only_so_long() -> None:
    async with scaled(1, wait=0.0) as (client, host, scaler):
        host.may_start.clear()
        scaler.target = 0
        await until(settled(client, "stopped", "stopped", "stopped"))
        with pytest.raises(EngineDeadError, match="no replica is ready"):
            await asyncio.wait_for(Reader(client, ask("r", [1])).task, 20)


async def test_a_deadline_holds_while_there_is_no_replica() -> None:
    async with scaled(1) as (client, host, scaler):
        host.may_start.clear()
        scaler.target = 0
        await until(settled(client, "stopped", "stopped", "stopped"))
        late = Reader(client, replace(ask("late", [1]), deadline=time.time() + 0.05))
        in_time = Reader(client, replace(ask("in time", [1]), deadline=time.time() + 600))
        with pytest.raises(DeadlineError):
            await asyncio.wait_for(late.task, 20)
        assert client.pending == 1 and not host.made[0]._thread.is_alive()
        scaler.target = 1
        host.may_start.set()
        (await asyncio.wait_for(in_time.task, 30)).check()
        assert client.pending == 0


async def test_a_request_whose_client_hung_up_waits_for_no_replica() -> None:
    async with scaled(1) as (client, _, scaler):
        scaler.target = 0
        await until(settled(client, "stopped", "stopped", "stopped"))
        reader = Reader(client, ask("r", [1]))
        await until(lambda: client.pending == scaler.seen.waiting == 1)
        reader.task.cancel()
        await asyncio.gather(reader.task, return_exceptions=True)
        assert client.pending == 0
        await until(lambda: scaler.seen.waiting == 0)


async def test_a_wake_that_comes_with_the_end_does_not_outlive_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async with scaled(1) as (client, _, scaler):
        scaler.target = 0
        await until(settled(client, "stopped", "stopped", "stopped"))
        monkeypatch.setattr(replica_scaling, "INTERVAL_S", 60.0)
        await asyncio.sleep(0.05)  # it waits for a wake now
        assert client._scaler is not None
        client._scaler.wake()
        await asyncio.wait_for(client._scaler.close(), 20)


async def test_a_host_that_cannot_start_one_is_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    async with scaled(1) as (client, host, scaler):
        start, failures = host.start_replica, iter([RuntimeError("no room"), RuntimeError("no room")])

        def fails(number: int) -> None:
            if (error := next(failures, None)) is not None:
                raise error
            start(number)

        host.start_replica = fails  # type: ignore[method-assign]
        scaler.target = 2
        await until(settled(client, "ready", "ready", "stopped"))
        assert caplog.text.count("replica-1 could not be started: no room") == 2


async def test_samples_are_what_happened_since_the_last() -> None:
    async with scaled(2) as (client, _, _):
        seen = []
        readers = [Reader(client, ask(f"r{i}", [i, 2], seed=i)) for i in range(6)]
        for reader in readers:
            await asyncio.wait_for(reader.task, 30)
        meter = FleetMeter()
        for _ in range(2):
            found = {r.identity: await client.stats_of(r) for r in client._replicas if r.identity}
            seen.append(meter.sample(found, 2, 3))
        assert seen[0].admitted == seen[0].met == 6
        assert seen[0].waiting == 3, "those that wait for a replica are counted"
        assert (seen[1].admitted, seen[1].met, seen[1].missed) == (0, 0, 0)


def test_an_engine_that_did_not_answer_once_is_counted_from_where_it_was() -> None:
    """Else all that it ever admitted would have come in the second after a slow step, or a new connection."""

    def counted(admitted: int) -> EngineStats:
        stats = EngineStats(met_slo=admitted)
        for _ in range(admitted):
            stats.queue_time.observe(3.0)
        return stats

    meter = FleetMeter()
    assert meter.sample({"p": counted(100)}, 1, 0).admitted == 100
    assert meter.sample({}, 1, 0, away=["p"]).admitted == 0
    assert meter.sample({"p": counted(102)}, 1, 0)[3:5] == ([*counted(2).queue_time.counts], 2)
    assert meter.sample({"p": counted(1)}, 1, 0).admitted == 1, "told to count anew"
    meter.sample({}, 1, 0)
    assert meter.sample({"p": counted(1)}, 1, 0).admitted == 1, "another engine"


async def test_replicas_are_counted_by_process_whichever_connection_it_has() -> None:
    async with scaled(1) as (client, host, _):
        assert client._scaler is not None
        meter = client._scaler._meter
        await until(lambda: list(meter._before) == [host.made[0].identity])
        assert client._replicas[0].process == host.made[0].identity
