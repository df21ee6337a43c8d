"""Prefill and decode on replicas of their own, and running requests that move: what readers get is what one engine
gives."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from typing import Any

import pytest
from fake_replicas import FakeReplica, ask
from test_failover import Host, Reader, process_of, until

from quire.cluster import migration, roles
from quire.cluster.cluster_client import ClusterClient
from quire.cluster.open_cluster import replica_options
from quire.cluster.roles import FIXED_TOKENS, MAX_LOCAL_PREFILL_TOKENS, PrefillCosts
from quire.cluster.router_policy import ReplicaLoad
from quire.cluster.routers import make_router
from quire.engine.client import RestartPolicy
from quire.types.config import EngineOptions
from quire.types.errors import ConfigError, InputError
from quire.types.grammar import GrammarSpec
from quire.types.serving import ServeOptions

PROMPT = list(range(1, 34))  # eight pages and one token
NIXL = pytest.mark.skipif(find_spec("nixl") is None, reason="nixl is not installed: pip install 'quire[nixl]'")


@asynccontextmanager
async def cluster(
    count: int, *, prefill: int = 0, gated: tuple[int, ...] = (), **options: Any
) -> AsyncIterator[tuple[ClusterClient, dict[str, FakeReplica]]]:
    """Replicas by their ids; `gated`: the numbers of those that take only steps they are given."""
    settings = {"connector": "tcp", "handover_timeout": 60.0} | options
    client = ClusterClient(
        count, make_router("least-load", count), RestartPolicy(max_restarts=20), prefill=prefill, **settings
    )
    made: dict[str, FakeReplica] = {}
    try:
        for number in range(count):
            made[f"replica-{number}"] = FakeReplica(client, gated=number in gated)
            await until(lambda number=number: client._replicas[number].joined.is_set())
        await client.ready(Host())
        yield client, made
    finally:
        for replica in made.values():
            replica.free()
        await client.close()


@pytest.fixture
def free_handovers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts here are short: a hand-over is taken to cost nothing."""
    monkeypatch.setattr(PrefillCosts, "handover_tokens", 0.0)
    monkeypatch.setattr(roles, "MAX_LOCAL_PREFILL_TOKENS", 0)


async def gather(*readers: Reader) -> None:
    async with asyncio.timeout(60):
        for reader in readers:
            (await reader.task).check()


def handed_over(replica: FakeReplica) -> int:
    assert replica.core.connector is not None
    return replica.core.connector.stats.pages_received


def remote_prefills(replica: FakeReplica) -> int:
    assert replica.core.connector is not None
    return replica.core.connector.stats.remote_prefills


@pytest.mark.usefixtures("free_handovers")
@pytest.mark.parametrize("connector", ["in-process", "tcp", "shared-memory", pytest.param("nixl", marks=NIXL)])
async def test_prompts_are_computed_by_one_replica_and_answered_by_another(connector: str) -> None:
    async with cluster(2, prefill=1, connector=connector) as (client, made):
        assert [one.role for one in await client.replicas()] == ["prefill", "decode"]
        first = Reader(client, ask("alone", [9, 8, 7] * 8, temperature=0.0))
        others = [
            Reader(client, ask("greedy", PROMPT, temperature=0.0)),
            Reader(client, ask("branches", PROMPT[::-1], n=3, seed=7, frequency_penalty=0.5)),
            Reader(client, ask("grammar", PROMPT[5:], grammar=GrammarSpec("json_object"))),
        ]
        await gather(first, *others)
        assert remote_prefills(made["replica-1"]) == 3, "the first came while nobody was answered: it stays"
        assert handed_over(made["replica-1"]) == 8 + 8 + 6
        assert made["replica-0"].core.stats().finished["length"] == 3, "no answer is drawn by the prefill replica"
        assert client.handovers.costs.token_s > 0 and client.handovers.costs.handover_latency_s > 0


@pytest.mark.usefixtures("free_handovers")
async def test_a_prompt_that_is_computed_elsewhere_is_no_queue_where_it_is_answered() -> None:
    async with cluster(2, prefill=1, gated=(0, 1)) as (client, made):
        readers = [Reader(client, ask("first", [3] * 6)), Reader(client, ask("second", PROMPT))]
        await until(lambda: len(client.handovers._prefills) == 1)
        prefill, decode = (replica.load for replica in client._replicas)
        assert (prefill.tokens, decode.tokens, decode.requests) == (len(PROMPT), 6, 2)
        for replica in made.values():
            replica.free()
        await gather(*readers)
        assert prefill.tokens == decode.tokens == prefill.requests == decode.requests == 0


@pytest.mark.usefixtures("free_handovers")
async def test_a_hand_over_that_finds_no_memory_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of both replicas go on: the one that waits for pages computes them, none ends with an error."""

    def full(name: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    async with cluster(2, prefill=1, connector="shared-memory") as (client, made):
        monkeypatch.setattr(os, "memfd_create", full)
        await gather(Reader(client, ask("first", [3] * 6)), Reader(client, ask("second", PROMPT)))
        stats = made["replica-0"].core.stats().handovers
        assert stats is not None and stats.failed >= 1 and handed_over(made["replica-1"]) == 0
        assert not any(one.core._failures for one in made.values())


@pytest.mark.usefixtures("free_handovers")
async def test_a_prefix_that_the_decoder_holds_is_not_sent_for() -> None:
    async with cluster(2, prefill=1) as (client, made):
        await gather(Reader(client, ask("before", PROMPT)))
        await gather(Reader(client, ask("busy", [5] * 9)), Reader(client, ask("again", PROMPT, seed=3)))
        assert remote_prefills(made["replica-1"]) <= 1


@pytest.mark.usefixtures("free_handovers")
async def test_a_prefill_replica_that_dies_costs_no_request() -> None:
    async with cluster(2, prefill=1, gated=(0,)) as (client, made):
        first = Reader(client, ask("first", [3] * 6))
        second = Reader(client, ask("second", PROMPT))
        await until(lambda: len(client.handovers._prefills) == 1)
        await gather(first)
        assert not second.drawn, "it waits for its pages"
        made["replica-0"].kill()
        await gather(second)
        assert handed_over(made["replica-1"]) == remote_prefills(made["replica-1"]) == 0


@pytest.mark.usefixtures("free_handovers")
async def test_when_all_decoders_die_prefill_replicas_answer() -> None:
    async with cluster(2, prefill=1, gated=(1,)) as (client, made):
        reader = Reader(client, ask("r", PROMPT))
        made["replica-1"].steps(4)
        await until(lambda: reader.drawn >= 1)
        made["replica-1"].kill()
        await gather(reader)
        assert client.failovers == 1
        FakeReplica(client)
        await until(lambda: client._replicas[1].is_ready)
        assert [load.accepts_requests for load in client._loads] == [False, True], "then it prefills again"
        await gather(Reader(client, ask("later", PROMPT)))


@pytest.mark.usefixtures("free_handovers")
async def test_a_silent_prefill_replica_is_not_waited_for_longer_than_said() -> None:
    async with cluster(2, prefill=1, gated=(0,), handover_timeout=0.1) as (client, made):
        readers = [Reader(client, ask("first", [3] * 6)), Reader(client, ask("second", PROMPT))]
        await gather(*readers)
        assert remote_prefills(made["replica-1"]) == 0, "the prefill replica computed nothing"
        stats = made["replica-1"].core.stats().handovers
        assert stats is not None and stats.timed_out == 1


@pytest.mark.usefixtures("free_handovers")
async def test_a_request_whose_reader_leaves_ends_its_prefill() -> None:
    async with cluster(2, prefill=1, gated=(0, 1)) as (client, made):
        first = Reader(client, ask("first", [3] * 6))
        second = Reader(client, ask("second", PROMPT))
        await until(lambda: len(client.handovers._prefills) == 1)
        second.task.cancel()
        await second.stream.aclose()
        assert not client._replicas[0].internal and not client._replicas[0].load.requests
        for replica in made.values():
            replica.free()
        await gather(first)
        await until(lambda: not made["replica-0"].core.scheduler.sequences.requests)


async def test_roles_change_without_losing_anything(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="quire.cluster")
    async with cluster(3, prefill=1, gated=(1,)) as (client, made):
        reader = Reader(client, ask("r", PROMPT, seed=4))
        made["replica-1"].steps(6)
        await until(lambda: reader.drawn >= 4)
        assert process_of(client, list(made.values()), "r") is made["replica-1"]
        changing = asyncio.create_task(client.set_role("replica-1", "prefill"))
        await until(lambda: bool(client._replicas[2].internal))
        made["replica-1"].free()
        assert (await changing).role == "prefill"
        assert "replica-1 has the role prefill, after decode" in caplog.text
        await gather(reader)
        with pytest.raises(InputError, match="no other replica is ready to decode"):
            await client.set_role("replica-2", "prefill")
        await client.set_role("replica-0", "both")
        assert [load.accepts_requests for load in client._loads] == [True, False, True]
        await gather(Reader(client, ask("later", PROMPT)))


async def test_the_only_decoder_is_drained_and_restarted_while_the_prefill_replica_answers() -> None:
    async with cluster(2, prefill=1, gated=(1,)) as (client, made):
        reader = Reader(client, ask("r", PROMPT, seed=4))
        made["replica-1"].steps(6)
        await until(lambda: reader.drawn >= 4)
        draining = asyncio.create_task(client.drain("replica-1", 0.0))
        await until(lambda: bool(client._replicas[0].internal))
        made["replica-1"].free()
        assert (await draining).state == "drained"
        await gather(reader, Reader(client, ask("meanwhile", PROMPT[2:])))
        with pytest.raises(InputError, match="no other replica is ready"):
            await client.drain("replica-0", 0.0)
        client.activate("replica-1")

        async def again() -> None:
            """As Ray does: whoever ends comes back."""
            for name in ("replica-0", "replica-1"):
                await until(made[name].ended.is_set)
                made[name] = FakeReplica(client)

        back = asyncio.create_task(again())
        after = await asyncio.wait_for(client.rolling_restart(0.0), 30)
        await back
        assert [(one.role, one.state, one.restarts) for one in after] == [
            ("prefill", "ready", 1),
            ("decode", "ready", 1),
        ]
        assert [load.accepts_requests for load in client._loads] == [False, True]
        await gather(Reader(client, ask("later", PROMPT)))


async def test_the_only_decoder_that_is_ready_stays_one() -> None:
    async with cluster(3, prefill=1) as (client, _):
        await client.drain("replica-2", 0.0)
        with pytest.raises(InputError, match="no other replica is ready to decode"):
            await client.set_role("replica-1", "prefill")
        client.activate("replica-2")
        assert (await client.set_role("replica-1", "prefill")).role == "prefill"


async def test_running_requests_move_with_their_pages() -> None:
    """Of many kinds, all of one replica at once; what was copied is not computed again."""
    async with cluster(2, gated=(0,)) as (client, made):
        requests = [
            ask("greedy", PROMPT, temperature=0.0),
            ask("seeded", PROMPT[3:], seed=8),
            ask("branches", PROMPT[6:], n=2, seed=7, frequency_penalty=0.5),
            ask("grammar", PROMPT[9:], grammar=GrammarSpec("json_object")),
        ]
        client._replicas[1].routable = False
        readers = [Reader(client, request) for request in requests]
        await until(lambda: len(client._replicas[0].sub_requests) == 4)
        made["replica-0"].steps(9)
        each = [tokens for reader in readers for tokens in reader.tokens.values()]
        await until(lambda: min(map(len, each)) >= 3, stepping=[made["replica-0"]])
        client._replicas[1].routable = True
        draining = asyncio.create_task(client.drain("replica-0", 0.0))
        await until(lambda: len(client._replicas[1].internal) >= 4)
        made["replica-0"].free()  # it draws on while its pages are copied
        assert (await draining).state == "drained"
        await gather(*readers)
        assert client.migration.migrations + sum(r.drawn == 24 for r in readers) >= 1
        if client.migration.migrations:
            assert handed_over(made["replica-1"]) >= 8


async def test_a_request_that_cannot_be_copied_goes_on_all_the_same() -> None:
    """The target dies while pages are on their way; the source is lost meanwhile."""
    async with cluster(3, gated=(0, 1)) as (client, made):
        for replica in client._replicas[1:]:
            replica.routable = False
        reader = Reader(client, ask("r", PROMPT, seed=5))
        made["replica-0"].steps(6)
        await until(lambda: reader.drawn >= 4)
        client._replicas[1].routable = True
        draining = asyncio.create_task(client.drain("replica-0", 0.0))
        await until(lambda: bool(client._replicas[1].internal))
        client._replicas[2].routable = True
        made["replica-1"].kill()
        assert (await draining).state == "drained"
        made["replica-0"].free()
        await gather(reader)


async def test_skewed_load_is_rebalanced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migration, "MIN_TOKENS", 1)
    async with cluster(2, gated=(0,), rebalance=True) as (client, made):
        client._replicas[1].routable = False
        readers = [Reader(client, ask(f"r{i}", PROMPT[i:], seed=i)) for i in range(8)]
        await until(lambda: len(client._replicas[0].sub_requests) == 8)
        made["replica-0"].steps(6)
        await until(lambda: all(reader.drawn >= 1 for reader in readers), stepping=[made["replica-0"]])
        client._replicas[1].routable = True
        await until(lambda: len(client._replicas[1].internal) == 4)
        await until(lambda: len(made["replica-0"].core.connector._routes) == 4)  # type: ignore[union-attr]
        made["replica-0"].steps(3)  # their pages are read between steps
        await until(lambda: client.migration.migrations == 4)
        assert len(client._replicas[0].sub_requests) == 4
        made["replica-0"].free()
        await gather(*readers)


async def test_balanced_load_stays_where_it_is() -> None:
    async with cluster(2, gated=(0, 1), rebalance=True) as (client, made):
        readers = [Reader(client, ask(f"r{i}", PROMPT[i:], seed=i)) for i in range(6)]
        await until(lambda: len(client._replica_by_id) == 6)
        client.migration.rebalance()
        assert not any(replica.internal for replica in client._replicas)
        for replica in made.values():
            replica.free()
        await gather(*readers)
        assert client.migrations == 0


async def test_short_prompts_stay_however_many_are_answered() -> None:
    async with cluster(2, prefill=1, gated=(1,)) as (client, made):
        readers = [Reader(client, ask(f"r{i}", [i, *PROMPT])) for i in range(12)]
        await until(lambda: len(client._replica_by_id) == 12)
        assert client._replicas[1].load.requests == 12 and not client._replicas[0].internal
        made["replica-1"].free()
        await gather(*readers)
        assert remote_prefills(made["replica-1"]) == made["replica-0"].core.stats().steps == 0


def test_where_a_prompt_is_computed_is_a_matter_of_cost() -> None:
    costs, decoder, prefill = PrefillCosts(), ReplicaLoad(), ReplicaLoad()
    assert not costs.should_prefill_remotely(4096, decoder, prefill, 0), (
        "nobody is delayed, and it takes no longer in place"
    )
    decoder.sent(0)
    assert costs.should_prefill_remotely(4096, decoder, prefill, 0)
    assert not costs.should_prefill_remotely(FIXED_TOKENS, decoder, prefill, 0), "too short to be worth a hand-over"
    crowded = ReplicaLoad()
    for _ in range(64):
        crowded.sent(0)
    assert not costs.should_prefill_remotely(MAX_LOCAL_PREFILL_TOKENS, crowded, prefill, 0), "whoever is answered there"
    assert costs.should_prefill_remotely(MAX_LOCAL_PREFILL_TOKENS + 1, crowded, prefill, 0)
    prefill.sent(9000)
    assert not costs.should_prefill_remotely(4096, decoder, prefill, 0), "it would wait too long there"
    assert costs.should_prefill_remotely(4096, decoder, prefill, 4090 * 2), "... unless most of it is cached there"
    costs.record_prefill(1000, 1.0)
    costs.record_handover(6.0)
    assert costs.handover_tokens == 6000
    for _ in range(50):
        costs.record_handover(0.1)
    assert 90 < costs.handover_tokens < 110


def test_options_of_disaggregation() -> None:
    assert ServeOptions(replicas=3, prefill_replicas=1).connector in ("shared-memory", "tcp")
    assert ServeOptions(replicas=3, ray_address="auto").connector == "tcp"
    assert ServeOptions(replicas=3, kv_connector="none").connector == ""
    assert ServeOptions(replicas=3, ray_address="auto", kv_connector="nixl").connector == "nixl"
    for wrong, why in (
        ({"prefill_replicas": 1}, "has no effect without replicas"),
        ({"replicas": 2, "prefill_replicas": 2}, "fewer than replicas"),
        ({"replicas": 2, "prefill_replicas": 1, "kv_connector": "none"}, "no effect with kv_connector none"),
        ({"replicas": 2, "ray_address": "auto", "kv_connector": "shared-memory"}, "on this machine"),
    ):
        with pytest.raises(ConfigError, match=why):
            ServeOptions(**wrong)


@pytest.mark.parametrize(
    "option",
    [
        {"prefix_cache": False}, {"scheduler": "static"}, {"tensor_parallel": 2}, {"pipeline_parallel": 2},
        {"context_parallel": 2},
        {"kv_remote": "redis://localhost"},
    ],
)  # fmt: skip
def test_engines_that_hand_nothing_over_have_no_prefill_replicas(option: dict[str, Any]) -> None:
    engine, (name,) = EngineOptions.of(**option), option
    with pytest.raises(ConfigError, match=f"prefill_replicas has no effect beside {name}"):
        replica_options(engine, ServeOptions(replicas=2, prefill_replicas=1))
    replica_options(engine, ServeOptions(replicas=2))


async def test_a_prefill_replica_that_cannot_hand_over_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    async with cluster(2, prefill=1, connector="") as (client, made):
        assert "replica-0 cannot hand KV pages of this model over" in caplog.text
        await gather(*(Reader(client, ask(f"r{i}", PROMPT[i:])) for i in range(4)))
        assert made["replica-0"].core.stats().steps == 0
