"""Networks that fail between replicas that hand KV pages over: what does not come in time is computed, once, by who
waits for it; no page is taken that is not what was asked for; and hand-overs go on when the network does."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fake_replicas import FakeReplica, ask
from fault_proxy import FaultProxy
from test_disaggregation import PROMPT, gather, handed_over, remote_prefills
from test_failover import Host, Reader, until

from quire.cluster import handovers, roles
from quire.cluster.cluster_client import ClusterClient
from quire.cluster.roles import PrefillCosts
from quire.cluster.routers import make_router
from quire.engine.client import RestartPolicy
from quire.types import membership
from quire.types.request import Request


@pytest.fixture(autouse=True)
def all_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roles, "MAX_LOCAL_PREFILL_TOKENS", 0)
    monkeypatch.setattr(PrefillCosts, "handover_tokens", 0.0)


@pytest.fixture
def short_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a link is to be given up; others go on with one however busy the machine is."""
    monkeypatch.setattr(membership, "LINK_HEARTBEAT_MS", 100)
    monkeypatch.setattr(membership, "LINK_TIMEOUT_MS", 600)


class Disaggregated:
    """A prefill and a decode replica, with a proxy between them; the decode replica never has nothing to do."""

    def __init__(self, client: ClusterClient, proxy: FaultProxy, prefill: FakeReplica, decode: FakeReplica):
        self.client, self.proxy, self.prefill, self.decode = client, proxy, prefill, decode

    async def answers(self, *requests: Request) -> None:
        """All of them at once, behind one that is being answered: their prompts are computed elsewhere."""
        await gather(*(Reader(self.client, one) for one in (ask(f"busy{requests[0].id}", [3] * 6), *requests)))

    @property
    def stats(self) -> Any:
        return self.decode.core.stats().handovers


@asynccontextmanager
async def disaggregated(timeout: float = 60.0, gated: bool = False) -> AsyncIterator[Disaggregated]:
    client = ClusterClient(
        2, make_router("least-load", 2), RestartPolicy(), prefill=1, connector="tcp", handover_timeout=timeout
    )
    prefill = FakeReplica(client, number=0, gated=gated)
    await until(lambda: client._replicas[0].joined.is_set())
    decode = FakeReplica(client, number=1)
    async with FaultProxy(client._replicas[0].connector) as proxy:
        try:
            await client.ready(Host())
            client._replicas[0].connector = proxy.address
            yield Disaggregated(client, proxy, prefill, decode)
        finally:
            proxy.heal()
            prefill.free()
            await client.close()


def prompts(count: int, start: int = 0) -> list[Request]:
    return [ask(f"r{start + i}", [start + i, *PROMPT], seed=i, n=1 + i % 2) for i in range(count)]


async def test_latency_changes_nothing() -> None:
    async with disaggregated() as made:
        for way in (made.proxy.to_target, made.proxy.to_client):
            way.delay, way.jitter = 0.02, 0.05
        await made.answers(*prompts(4))
        assert remote_prefills(made.decode) == 4


FAULTS = {
    "reset": lambda proxy: proxy.reset(),
    "half open": lambda proxy: proxy.half_open(),
    "partition": lambda proxy: proxy.partition(),
    "no pages": lambda proxy: proxy.to_client.block(),
    "no requests": lambda proxy: proxy.to_target.block(),
}


@pytest.mark.usefixtures("short_timeouts")
@pytest.mark.parametrize("fault", FAULTS)
async def test_pages_that_do_not_come_are_computed_and_later_ones_come_again(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with disaggregated(gated=True) as made:
        if fault == "no requests":
            FAULTS[fault](made.proxy)
        readers = [Reader(made.client, one) for one in (ask("busy", [3] * 6, max_tokens=50), *prompts(3))]
        await until(lambda: len(made.prefill.core.connector._routes) == (0 if fault == "no requests" else 3))
        FAULTS[fault](made.proxy)
        made.prefill.free()
        await gather(*readers)
        assert made.stats.peers_lost == 3 and made.stats.timed_out == handed_over(made.decode) == 0
        await made.answers(*prompts(3, 10))
        assert made.stats.started == 3, "nothing is waited for that will hardly come"
        made.proxy.heal()
        monkeypatch.setattr(handovers, "RETRY_S", 0.0)
        await made.answers(*prompts(4, 20))
        assert remote_prefills(made.decode) == 4
