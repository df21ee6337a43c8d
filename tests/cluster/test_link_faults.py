"""Networks that fail between the API process and its replicas: every answer is the one of an undisturbed run, and a
replica that can be reached again is used again, by the process that it was."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from fake_replicas import FakeReplica, ask
from fault_proxy import FaultProxy
from test_failover import Host, Reader, until

from quire.cluster import cluster_client, request_router
from quire.cluster.cluster_client import ClusterClient
from quire.cluster.replica_hub import ReplicaHub
from quire.cluster.replica_losses import MAX_FAILOVERS
from quire.cluster.routers import make_router
from quire.engine import engine_process
from quire.engine.client import RestartPolicy
from quire.engine.engine_process import EngineProcess
from quire.types import membership
from quire.types.cache_control import CacheOrder
from quire.types.errors import EngineDeadError
from quire.types.messages import Events, Heartbeat


@pytest.fixture(autouse=True)
def short_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "LINK_HEARTBEAT_MS", 100)
    monkeypatch.setattr(membership, "LINK_TIMEOUT_MS", 600)
    monkeypatch.setattr(membership, "JOIN_TIMEOUT_MS", 600)
    monkeypatch.setattr(cluster_client, "SILENT_S", 0.6)


class Faulty:
    """A cluster with a proxy on each replica's link."""

    def __init__(self, client: ClusterClient):
        self.client = client
        self.proxies: list[FaultProxy] = []
        self.replicas: list[FakeReplica] = []

    def is_ready(self, number: int) -> bool:
        return self.client._replicas[number].is_ready


@asynccontextmanager
async def faulty_cluster(count: int, router: str = "round-robin", **options: Any) -> AsyncIterator[Faulty]:
    client = ClusterClient(count, make_router(router, count), RestartPolicy(max_restarts=2))
    faulty = Faulty(client)
    async with AsyncExitStack() as stack:
        try:
            for number in range(count):
                proxy = await stack.enter_async_context(FaultProxy(client.hub.address, seed=number))
                faulty.proxies.append(proxy)
                faulty.replicas.append(FakeReplica(client, number=number, hub=proxy.address, gated=True, **options))
            await client.ready(Host())
            yield faulty
        finally:
            for proxy in faulty.proxies:
                proxy.heal()
            for replica in faulty.replicas:
                replica.free()
            await client.close()


def cases(count: int) -> list:
    return [
        ask(f"r{i}", [i, i + 1, 3], seed=i, n=1 + i % 2, temperature=0.0 if i % 3 == 0 else 1.0, max_tokens=40)
        for i in range(1, count + 1)
    ]


async def begun(faulty: Faulty, count: int = 4) -> list[Reader]:
    """Requests of which each has some tokens and wants more."""
    readers = [Reader(faulty.client, request) for request in cases(count)]
    await until(lambda: len(faulty.client._replica_by_id) == count)
    for replica in faulty.replicas:
        replica.steps(6)
    await until(lambda: all(reader.drawn >= 4 for reader in readers), stepping=faulty.replicas)
    return readers


async def finished(faulty: Faulty, readers: list[Reader]) -> None:
    for replica in faulty.replicas:
        replica.free()
    async with asyncio.timeout(30):
        for reader in readers:
            (await reader.task).check()


async def used_again(faulty: Faulty, number: int) -> None:
    """The same process answers requests again."""
    await until(lambda: faulty.is_ready(number))
    assert not faulty.replicas[number].ended.is_set(), "its process goes on"
    count = 2 * len(faulty.replicas)
    before = faulty.replicas[number].core.stats().output_tokens
    await finished(faulty, [Reader(faulty.client, ask(f"later{i}", [i, 7], seed=i)) for i in range(count)])
    assert faulty.replicas[number].core.stats().output_tokens > before


FAULTS = {
    "reset": lambda proxy: proxy.reset(),
    "half open": lambda proxy: proxy.half_open(),
    "partition": lambda proxy: proxy.partition(),
    "nothing to the replica": lambda proxy: proxy.to_client.block(),
    "nothing from the replica": lambda proxy: proxy.to_target.block(),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_link_that_breaks_costs_nothing_and_comes_back(fault: str) -> None:
    async with faulty_cluster(2) as faulty:
        readers = await begun(faulty)
        FAULTS[fault](faulty.proxies[0])
        await until(lambda: bool(faulty.client._replicas[0].lost))
        faulty.replicas[0].free()  # it goes on, and does not know yet: what it draws is nobody's
        await finished(faulty, readers)
        faulty.proxies[0].heal()
        await used_again(faulty, 0)
        first, second = await faulty.client.replicas()
        assert (first.restarts, first.rejoins, second.rejoins) == (0, 1, 0)
        assert ("closed" if fault == "reset" else "") in first.lost
        assert not faulty.replicas[0].core.scheduler.sequences.requests and faulty.client.failovers == 2


async def test_a_partition_that_outlasts_a_replica_s_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process ends, and so do those that take its place while nobody is reached; the first that is joins."""
    monkeypatch.setattr(engine_process, "ORPHAN_TIMEOUT_S", 1.0)
    async with faulty_cluster(2) as faulty:
        readers = await begun(faulty)
        faulty.proxies[0].partition()
        await until(lambda: not faulty.client._replicas[0].identity)
        await finished(faulty, readers)
        await until(faulty.replicas[0].ended.is_set)
        started = FakeReplica(faulty.client, number=0, hub=faulty.proxies[0].address)
        await until(started.ended.is_set)
        assert not faulty.is_ready(0) and not faulty.client._lost.done()
        faulty.replicas[0] = FakeReplica(faulty.client, number=0, hub=faulty.proxies[0].address)
        faulty.proxies[0].heal()
        await used_again(faulty, 0)
        first, second = await faulty.client.replicas()
        assert (first.restarts, first.rejoins, second.restarts, second.rejoins) == (1, 0, 0, 0)
        assert "nothing came from it for" in first.lost


async def test_a_partition_from_all_replicas_that_outlasts_their_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was accepted waits for the processes that take their places, and goes on from what its reader has."""
    monkeypatch.setattr(engine_process, "ORPHAN_TIMEOUT_S", 1.0)
    async with faulty_cluster(2) as faulty:
        readers = await begun(faulty)
        had = [reader.drawn for reader in readers]
        for proxy in faulty.proxies:
            proxy.partition()
        for replica in faulty.replicas:
            replica.free()
            await until(replica.ended.is_set)
        await until(lambda: not any(replica.identity for replica in faulty.client._replicas))
        assert faulty.client.pending == len(readers) and faulty.client.trouble(), "new ones get 503"
        for number, proxy in enumerate(faulty.proxies):
            proxy.heal()
            faulty.replicas[number] = FakeReplica(faulty.client, number=number, hub=proxy.address)
        await finished(faulty, readers)
        assert all(reader.drawn > before > 0 for reader, before in zip(readers, had, strict=True))
        assert [view.restarts for view in await faulty.client.replicas()] == [1, 1]


async def test_all_links_break_at_once() -> None:
    async with faulty_cluster(6) as faulty:
        readers = await begun(faulty, 8)
        for proxy in faulty.proxies:
            proxy.reset()
        await finished(faulty, readers)


async def test_the_api_process_is_cut_off_from_all_replicas() -> None:
    async with faulty_cluster(6) as faulty:
        readers = await begun(faulty, 8)
        for proxy in faulty.proxies:
            proxy.partition()
        await until(lambda: not any(replica.identity for replica in faulty.client._replicas))
        for proxy in faulty.proxies:
            proxy.heal()
        await finished(faulty, readers)


async def test_a_request_waits_while_it_is_not_known_why_replicas_were_lost_under_it() -> None:
    """One after the other is cut off with it: no other is tried then, for the request may be why."""
    async with faulty_cluster(6, "least-load") as faulty:
        reader, seen = Reader(faulty.client, ask("r", [1, 2])), []
        for _ in range(MAX_FAILOVERS + 1):
            await until(lambda: bool(faulty.client._replica_by_id))
            (holder,) = faulty.client._replica_by_id.values()
            seen.append(holder.number)
            faulty.proxies[holder.number].partition()
            await until(lambda one=holder: not one.identity)
        await until(lambda: sum(replica.load.accepts_requests for replica in faulty.client._replicas) == 2)
        assert faulty.client.pending == 1 and len(set(seen)) == MAX_FAILOVERS + 1 and not faulty.client._replica_by_id
        faulty.proxies[seen[0]].heal()
        await finished(faulty, [reader])


async def test_a_link_that_keeps_breaking_ends_neither_requests_nor_the_server() -> None:
    async with faulty_cluster(2) as faulty:
        readers = await begun(faulty)
        for turn in range(10):
            faulty.proxies[turn % 2].reset()
            faulty.replicas[turn % 2].steps(1)  # in which it was when that happened
            rejoined = faulty.client._replicas[turn % 2]
            await until(lambda turn=turn, one=rejoined: one.rejoins == 1 + turn // 2, stepping=faulty.replicas)
        await finished(faulty, readers)
        assert faulty.client.failovers > MAX_FAILOVERS * len(readers) and not faulty.client._lost.done()


async def lost(faulty: Faulty, number: int) -> None:
    faulty.proxies[number].partition()
    await until(lambda: not faulty.client._replicas[number].identity)


async def back(faulty: Faulty, number: int) -> None:
    faulty.proxies[number].heal()
    await until(lambda: faulty.is_ready(number))
    await faulty.client.stats()  # behind what it was told when it joined


async def test_a_replica_that_joins_again_is_known_before_its_old_connection_is_given_up() -> None:
    async with faulty_cluster(2) as faulty:
        before = faulty.client._replicas[0].identity
        faulty.proxies[0].half_open()
        await until(lambda: faulty.client._replicas[0].rejoins == 1)
        assert before in faulty.client.hub._connected, "nobody has told the hub"
        faulty.client._received([(before, Events([]))])  # late words of the old connection
        await finished(faulty, [Reader(faulty.client, ask(f"r{i}", [i, 2])) for i in range(4)])
        assert not faulty.replicas[0].ended.is_set()


async def test_a_replica_keeps_trying_to_join_again() -> None:
    async with faulty_cluster(1) as faulty:
        proxy, there = faulty.proxies[0], faulty.proxies[0].connections
        proxy.to_target.delay = 0.7  # longer than a connection may take to be made
        proxy.reset()
        await until(lambda: proxy.connections > there + 2)
        proxy.to_target.delay = 0.0
        await until(lambda: faulty.is_ready(0))
        await finished(faulty, [Reader(faulty.client, ask("r", [1, 2]))])


async def test_pages_are_kept_unless_they_were_to_be_dropped_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_router, "BLOCK_TOKENS", 4)
    prompt = list(range(1, 18))
    async with faulty_cluster(1, "cache-aware") as faulty:
        faulty.replicas[0].free()

        async def cached(name: str) -> int:
            reader = Reader(faulty.client, ask(name, prompt, max_tokens=2))
            await asyncio.wait_for(reader.task, 20)
            assert reader.counts is not None
            return reader.counts.cached

        def known() -> int:
            directory = faulty.client._router._directory
            assert directory is not None
            return directory.holds(0)

        assert await cached("first") == 0
        await until(lambda: known() == 4)
        await lost(faulty, 0)
        assert known() == 0
        await back(faulty, 0)
        await until(lambda: known() == 4)
        assert await cached("second") == 16
        for order in ("reset", "drop"):
            faulty.proxies[0].partition()  # what is said from now on does not get there
            if order == "reset":
                faulty.client.reset()
            else:
                with pytest.raises(EngineDeadError):
                    await faulty.client.cache(CacheOrder(action="drop", tokens=prompt))
            await until(lambda: not faulty.client._replicas[0].identity)
            await back(faulty, 0)
            assert await cached(order) == 0
        await lost(faulty, 0)
        await back(faulty, 0)
        assert await cached("last") == 16, "an order that was heard is not given again"


async def test_adapters_that_changed_meanwhile_are_what_the_others_have() -> None:
    async with faulty_cluster(2, adapters=("a",)) as faulty:
        await lost(faulty, 0)
        await faulty.client.load_adapter("b", "/b")
        await faulty.client.unload_adapter("a")
        await faulty.client.load_adapter("a", "/other")
        await back(faulty, 0)
        assert faulty.replicas[0].core.adapters.list() == faulty.client.adapters
        assert sorted(one.name for one in faulty.client.adapters) == ["a", "b"]


async def test_what_was_drained_stays_drained_and_counters_count_once() -> None:
    async with faulty_cluster(2) as faulty:
        await finished(faulty, [Reader(faulty.client, ask(f"r{i}", [i, 2], max_tokens=5)) for i in range(4)])
        assert (await faulty.client.stats()).output_tokens == 20
        await faulty.client.drain("replica-0", 0.0)
        await lost(faulty, 0)
        assert (await faulty.client.stats()).output_tokens == 20
        faulty.proxies[0].heal()
        await until(lambda: bool(faulty.client._replicas[0].identity))
        assert (await faulty.client.stats()).output_tokens == 20
        assert [one.state for one in await faulty.client.replicas()] == ["drained", "ready"]
        assert faulty.client.activate("replica-0").state == "ready"


async def test_a_restart_that_was_not_heard_is_ordered_again() -> None:
    async with faulty_cluster(2) as faulty:
        first = faulty.client._replicas[0].process
        await faulty.client.drain("replica-0", 0.0)
        faulty.proxies[0].partition()
        restarting = asyncio.create_task(faulty.client.restart("replica-0", 0.0))
        await until(lambda: not faulty.client._replicas[0].identity)
        faulty.proxies[0].heal()
        await until(faulty.replicas[0].ended.is_set)
        faulty.replicas.append(FakeReplica(faulty.client, number=0))
        assert (await asyncio.wait_for(restarting, 20)).restarts == 1
        assert faulty.client._replicas[0].process != first


async def test_a_slow_start_over_a_slow_link_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that took long to load is not an orphan because its client's first words take a while."""
    monkeypatch.setattr(membership, "JOIN_TIMEOUT_MS", 15_000)
    monkeypatch.setattr(engine_process, "ORPHAN_TIMEOUT_S", 2.5)
    announce = EngineProcess.announce

    def late(process: EngineProcess, *args: Any) -> None:
        time.sleep(2.5)
        announce(process, *args)

    monkeypatch.setattr(EngineProcess, "announce", late)
    client = ClusterClient(1, make_router("round-robin", 1), RestartPolicy())
    async with FaultProxy(client.hub.address) as proxy:
        proxy.to_client.delay = 0.4
        replica = FakeReplica(client, hub=proxy.address)
        try:
            await client.ready(Host())
            await asyncio.wait_for(Reader(client, ask("r", [1, 2])).task, 20)
            assert not replica.ended.is_set()
        finally:
            await client.close()


async def test_latency_with_jitter_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """With timeouts that a busy machine keeps: to join again takes eight messages, longer than the short ones."""
    for name in ("LINK_TIMEOUT_MS", "JOIN_TIMEOUT_MS"):
        monkeypatch.setattr(membership, name, 30_000)
    monkeypatch.setattr(cluster_client, "SILENT_S", 30.0)
    async with faulty_cluster(2) as faulty:
        for proxy in faulty.proxies:
            for way in (proxy.to_target, proxy.to_client):
                way.delay, way.jitter = 0.05, 0.1
        await finished(faulty, await begun(faulty))
        assert [proxy.connections for proxy in faulty.proxies] == [1, 1]


def test_a_hub_that_has_ended_writes_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of its pipe may be another file's by then."""
    hub = ReplicaHub("127.0.0.1", lambda news: None)
    hub.close()
    written: list[int] = []
    monkeypatch.setattr(os, "write", lambda number, data: written.append(number))
    hub.send("somebody", Heartbeat())
    assert not written
