"""Random faults on all links of a disaggregated cluster, one after the other, by seed: every answer is the one of an
undisturbed run, and afterwards every replica is there again."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import AsyncExitStack

import pytest
from fake_replicas import FakeReplica, ask
from fault_proxy import Direction, FaultProxy
from test_failover import Host, Reader, until

from quire.cluster import cluster_client, handovers, roles
from quire.cluster.cluster_client import ClusterClient
from quire.cluster.roles import PrefillCosts
from quire.cluster.routers import make_router
from quire.engine.client import RestartPolicy
from quire.types import membership
from quire.types.grammar import GrammarSpec
from quire.types.request import Request

REPLICAS = 4
FAULTS = 12


@pytest.fixture(autouse=True)
def short_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("LINK_HEARTBEAT_MS", 50), ("LINK_TIMEOUT_MS", 300), ("JOIN_TIMEOUT_MS", 300)):
        monkeypatch.setattr(membership, name, value)
    monkeypatch.setattr(cluster_client, "SILENT_S", 0.6)
    monkeypatch.setattr(roles, "MAX_LOCAL_PREFILL_TOKENS", 0)
    monkeypatch.setattr(handovers, "RETRY_S", 0.2)
    monkeypatch.setattr(PrefillCosts, "handover_tokens", 0.0)


def disturb(proxy: FaultProxy, chance: random.Random) -> Callable[[], None]:
    """Begins a fault; what ends it."""

    def slow(way: Direction) -> Callable[[], None]:
        way.delay, way.jitter, way.rate = 0.02, 0.05, chance.choice((0, 20_000))

        def usual() -> None:
            way.delay = way.jitter = way.rate = 0.0

        return usual

    way = chance.choice((proxy.to_client, proxy.to_target))
    match chance.randrange(5):
        case 0:
            proxy.reset()
        case 1:
            proxy.half_open()
        case 2:
            proxy.partition()
        case 3:
            way.block()
        case 4:
            return slow(way)
    return proxy.heal


def any_request(name: str, chance: random.Random) -> Request:
    prompt = [chance.randrange(1, 9)] * 4 + [chance.randrange(97) for _ in range(chance.randrange(1, 12))]
    kinds = [{"temperature": 0.0}, {"n": 2}, {"frequency_penalty": 0.5}, {"grammar": GrammarSpec("json_object")}]
    return ask(name, prompt, seed=chance.randrange(100), max_tokens=chance.randrange(5, 40), **chance.choice(kinds))


async def stepping(replicas: list[FakeReplica]) -> None:
    """So slowly that faults come in the midst of answers."""
    while True:
        for replica in replicas:
            replica.steps(1)
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))])
async def test_answers_are_those_of_an_undisturbed_run(seed: int) -> None:
    chance = random.Random(seed)
    client = ClusterClient(
        REPLICAS, make_router("cache-aware", REPLICAS), RestartPolicy(max_restarts=0), prefill=1, connector="tcp",
        handover_timeout=0.5, rebalance=True,
    )  # fmt: skip
    async with AsyncExitStack() as stack:
        hubs = [await stack.enter_async_context(FaultProxy(client.hub.address, seed)) for _ in range(REPLICAS)]
        replicas = [FakeReplica(client, number=i, hub=hub.address, gated=True) for i, hub in enumerate(hubs)]
        steps = asyncio.create_task(stepping(replicas))
        readers: list[Reader] = []
        try:
            await client.ready(Host())
            pages = [await stack.enter_async_context(FaultProxy(one.connector, seed)) for one in client._replicas]
            ends: list[Callable[[], None]] = []
            for number in range(FAULTS):
                for replica, proxy in zip(client._replicas, pages, strict=True):
                    replica.connector = proxy.address  # which it says anew when it joins again
                if client.trouble() is None:  # or new ones are refused
                    readers += [Reader(client, any_request(f"r{number}.{i}", chance)) for i in range(6)]
                    await asyncio.sleep(0)
                await asyncio.sleep(chance.random() * 0.4)
                ends.append(disturb(chance.choice([*hubs, *pages]), chance))
                if chance.random() < 0.5:
                    ends.pop(chance.randrange(len(ends)))()
            for end in ends:
                end()
            for reader in readers:
                (await asyncio.wait_for(reader.task, 60)).check()
            await until(lambda: all(replica.is_ready for replica in client._replicas))
            assert not any(replica.ended.is_set() for replica in replicas), "the same processes"
            assert not client._lost.done() and not client._active and not client._replica_by_id
            await until(lambda: not any(one.core.scheduler.sequences.requests for one in replicas))
            for replica in client._replicas:
                assert not replica.internal and not replica.load.requests and not replica.load.tokens
        finally:
            steps.cancel()
            for replica in replicas:
                replica.free()
            await client.close()
