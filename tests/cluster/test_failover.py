"""Replicas that are lost, drained and replaced under requests: what readers get is what they would have got."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import zmq
from fake_replicas import FakeReplica, ask, expected

from quire.cluster import pending_requests
from quire.cluster.active_request import ActiveRequest
from quire.cluster.cluster_client import ClusterClient
from quire.cluster.replica_losses import MAX_FAILOVERS
from quire.cluster.routers import make_router
from quire.engine import engine_process
from quire.engine.client import RestartPolicy
from quire.types.counts import Counts, added
from quire.types.errors import EngineDeadError, InputError, ReplicaNotFoundError
from quire.types.events import GAUGES, EngineStats, TokenEvent
from quire.types.grammar import GrammarSpec
from quire.types.histogram import Histogram
from quire.types.membership import CurveKeys, ReplicaView
from quire.types.messages import AdapterInfo, Heartbeat
from quire.types.request import FinishReason, Request


class Host:
    def __init__(self) -> None:
        self.stopped = False

    def stop(self) -> None:
        self.stopped = True


@asynccontextmanager
async def cluster(count: int, router: str = "round-robin", **options) -> AsyncIterator[tuple[ClusterClient, list]]:
    client = ClusterClient(count, make_router(router, count), RestartPolicy(max_restarts=20))
    made = [FakeReplica(client, **options) for _ in range(count)]
    try:
        await client.ready(Host())
        yield client, made
    finally:
        for replica in made:
            replica.free()
        await client.close()


async def until(condition: Callable[[], bool], *, stepping: Iterable[FakeReplica] = ()) -> None:
    """Those that are `stepping` take another step each second: their first may have come before all requests did."""
    async with asyncio.timeout(20):
        for turn in itertools.count(1):
            if condition():
                return
            if turn % 200 == 0:
                for replica in stepping:
                    replica.steps(1)
            await asyncio.sleep(0.005)


class Reader:
    """One request's events as they come, checked for tokens twice and tokens missing."""

    def __init__(self, client: ClusterClient, request: Request):
        self.request = request
        self.tokens: dict[int, list[int]] = {branch: [] for branch in range(request.params.n)}
        self.finish: dict[int, FinishReason] = {}
        self.counts = None
        self.stream = client.submit(request)
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> Reader:
        async for batch in self.stream:
            for event in batch:
                self._take(event)
        return self

    def _take(self, event: TokenEvent) -> None:
        assert event.request == self.request.id
        assert event.index == len(self.tokens[event.branch]), "a token twice, or one missing"
        assert event.branch not in self.finish
        self.tokens[event.branch] += event.tokens
        self.counts = added(self.counts, event.counts)
        if event.finish is not None:
            self.finish[event.branch] = event.finish

    @property
    def drawn(self) -> int:
        return sum(map(len, self.tokens.values()))

    def check(self) -> None:
        for branch, tokens in self.tokens.items():
            assert tokens == expected(self.request, branch)
        assert set(self.finish.values()) == {FinishReason.LENGTH} and len(self.finish) == self.request.params.n


def process_of(client: ClusterClient, made: list[FakeReplica], name: str) -> FakeReplica:
    """Whoever works on a request now."""
    holder = client._replica_by_id[name].identity
    return next(replica for replica in made if replica.identity == holder)


async def test_a_killed_replicas_requests_go_on_elsewhere_as_if_nothing_was() -> None:
    async with cluster(2, gated=True) as (client, made):
        requests = [
            ask("greedy", [1, 2, 3], temperature=0.0),
            ask("other", [9, 9], seed=8),
            ask("branches", [4, 5], n=3, seed=7, frequency_penalty=0.5),
            ask("waits", [6] * 5, seed=3),
        ]
        readers = [Reader(client, request) for request in requests]
        await until(lambda: len(client._replica_by_id) == 4)
        for replica in made:
            replica.steps(6)
        await until(lambda: all(reader.drawn >= 4 for reader in readers), stepping=made)
        dying = process_of(client, made, "greedy")
        assert process_of(client, made, "branches") is dying  # of four, every other
        dying.kill()
        for replica in made:
            replica.free()
        async with asyncio.timeout(30):
            for reader in readers:
                (await reader.task).check()
        assert client.failovers == 2
        assert {one.request for one in await client.timelines("branches")} == {"branches"}
        states = [(one.state, one.restarts, one.running + one.waiting) for one in await client.replicas()]
        assert sorted(states) == [("ready", 0, 0), ("starting", 0, 0)]


async def test_grammars_go_on_from_their_tokens() -> None:
    async with cluster(1, gated=True) as (client, made):
        request = ask("g", [1, 2], grammar=GrammarSpec("json_object"))
        reader = Reader(client, request)
        await until(lambda: bool(client._replica_by_id))
        made[0].steps(4)
        await until(lambda: reader.drawn >= 3)
        made[0].kill()
        FakeReplica(client)  # the request waited for it
        async with asyncio.timeout(30):
            (await reader.task).check()


async def test_usage_is_that_of_the_first_replica() -> None:
    """What the one that goes on finds in its cache says nothing of the prompt."""
    async with cluster(1, gated=True) as (client, made):
        prompt = list(range(1, 13))
        first = Reader(client, ask("first", prompt, max_tokens=4))
        made[0].steps(10)
        await first.task
        second = Reader(client, ask("second", prompt))
        await until(lambda: second.drawn >= 1)
        made[0].kill()
        FakeReplica(client)
        (await second.task).check()
        assert second.counts is not None and second.counts.cached == 11  # all tokens but the last


async def test_a_branch_that_its_reader_ended_does_not_go_on() -> None:
    async with cluster(1, gated=True) as (client, made):
        request = ask("r", [1, 2, 3], n=2)
        reader = Reader(client, request)
        await until(lambda: bool(client._replica_by_id))
        made[0].steps(4)
        await until(lambda: min(map(len, reader.tokens.values())) >= 3)
        client.finish_at("r", 0, 3)
        await asyncio.sleep(0)
        made[0].kill()
        FakeReplica(client)
        async with asyncio.timeout(30):
            await reader.task
        assert reader.finish == {0: FinishReason.STOP, 1: FinishReason.LENGTH}
        assert reader.tokens[1] == expected(request, 1) and len(reader.tokens[0]) < 24


async def test_a_request_that_every_replica_dies_of_is_given_up() -> None:
    async with cluster(1, gated=True) as (client, made):
        reader = Reader(client, ask("poison", [1, 2]))
        for _ in range(MAX_FAILOVERS + 1):
            await until(lambda: bool(client._replica_by_id))
            made[-1].kill()
            await until(lambda: not client._by_identity)
            if not reader.task.done():
                made.append(FakeReplica(client, gated=True))
        with pytest.raises(EngineDeadError, match="given up"):
            await asyncio.wait_for(reader.task, 10)


async def test_requests_wait_for_a_replica_only_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending_requests, "MAX_WAIT_S", 0.0)
    async with cluster(1, gated=True) as (client, made):
        reader = Reader(client, ask("r", [1]))
        await until(lambda: bool(client._replica_by_id))
        made[0].kill()
        with pytest.raises(EngineDeadError, match="no replica"):
            await asyncio.wait_for(reader.task, 20)
        assert client.trouble() is not None
        with pytest.raises(EngineDeadError, match="no replica"):
            await client.submit(ask("new", [1])).__anext__()


async def test_a_drained_replica_gets_nothing_and_what_it_had_goes_on_elsewhere(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with cluster(2, gated=True) as (client, made):
        readers = [Reader(client, ask(f"r{i}", [i, i + 1], seed=i)) for i in range(1, 5)]
        await until(lambda: len(client._replica_by_id) == 4)
        for replica in made:
            replica.steps(5)
        await until(lambda: all(reader.drawn >= 4 for reader in readers), stepping=made)
        caplog.set_level(logging.INFO, logger="quire.cluster")
        assert (await client.drain("replica-0", 0.0)).state == "drained"
        assert "draining replica-0: 2 requests have 0 s to finish there" in caplog.text
        assert "replica-0 is drained" in caplog.text
        for replica in made:
            replica.free()
        async with asyncio.timeout(30):
            for reader in readers:
                (await reader.task).check()
            later = Reader(client, ask("later", [5]))
            await later.task
        assert client.failovers == 0 and client._replicas[0].load.requests == 0
        with pytest.raises(InputError, match="no other replica"):
            await client.drain("replica-1", 0.0)
        assert client.activate("replica-0").state == "ready"
        with pytest.raises(InputError, match="replica-0 is ready: only a replica that was drained"):
            client.activate("replica-0")
        with pytest.raises(ReplicaNotFoundError):
            await client.drain("replica-7", 0.0)


async def drain_under_way(client: ClusterClient, timeout: float) -> tuple[Reader, Any, asyncio.Task[ReplicaView]]:
    """A request, its replica, and the drain of that."""
    reader = Reader(client, ask("r", [1, 2]))
    await until(lambda: bool(client._replica_by_id))
    mine = client._replica_by_id["r"]
    drained = asyncio.create_task(client.drain(mine.id, timeout))
    await until(lambda: mine.state == "draining")
    return reader, mine, drained


async def test_a_drain_lets_requests_finish_in_time() -> None:
    async with cluster(2, gated=True) as (client, made):
        reader, _, drained = await drain_under_way(client, 20.0)
        process_of(client, made, "r").free()
        (await reader.task).check()
        assert (await drained).state == "drained"


async def test_a_rolling_restart_replaces_all_and_loses_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="quire.cluster")
    async with cluster(2, gated=True) as (client, made):
        readers = [Reader(client, ask(f"r{i}", [i, 3], seed=i, n=2)) for i in range(1, 5)]
        await until(lambda: len(client._replica_by_id) == 4)

        identities = [replica.identity for replica in client._replicas]

        async def again() -> None:
            """As Ray does: whoever ends comes back."""
            for number in range(2):  # who came first is the first
                replica = next(one for one in made if one.identity == identities[number])
                await until(replica.ended.is_set)
                made.append(FakeReplica(client))

        for replica in made:
            replica.steps(5)
        await until(lambda: all(reader.drawn >= 4 for reader in readers), stepping=made)
        back = asyncio.create_task(again())
        for replica in made:
            replica.free()
        after = await asyncio.wait_for(client.rolling_restart(0.0), 30)
        await back
        for reader in readers:
            (await asyncio.wait_for(reader.task, 30)).check()
        assert [(one.state, one.restarts) for one in after] == [("ready", 1), ("ready", 1)]
        said = [record.getMessage() for record in caplog.records if "restart" in record.getMessage()]
        assert said[0] == "a rolling restart of 2 replicas begins" and said[-1] == "the rolling restart is done"
        assert [line.split(" in ")[0] for line in said[1:-1]] == [
            "restarting replica-0", "replica-0 was restarted", "restarting replica-1", "replica-1 was restarted",
        ]  # fmt: skip
        assert client.trouble() is None and not client._lost.done()


async def test_who_has_no_key_is_refused_and_what_was_given_up_is_ended() -> None:
    async with cluster(1) as (client, made):
        public, secret = zmq.curve_keypair()
        forged = CurveKeys(client.hub.keys.server, public.decode(), secret.decode())
        FakeReplica(client, keys=forged)
        await until(lambda: client.hub.refused > 0)
        assert len(client._by_identity) == 1
        client._on_replicas_lost([(made[0].identity, None)])  # as after a break of the network: it is still there
        client._received([(made[0].identity, Heartbeat())])
        await until(made[0].ended.is_set)


async def test_a_reader_that_leaves_aborts_all_parts() -> None:
    async with cluster(2, gated=True) as (client, made):
        reader = Reader(client, ask("r", [1, 2], n=2))
        await until(lambda: bool(client._replica_by_id))
        for replica in made:
            replica.steps(2)
        await until(lambda: reader.drawn >= 2)
        process_of(client, made, "r").kill()
        await until(lambda: len(client._replica_by_id) == 2 and "r" not in client._replica_by_id)
        reader.task.cancel()
        with suppress(asyncio.CancelledError):
            await reader.task
        assert not client._replica_by_id and not client._active and all(not load.requests for load in client._loads)
        for replica in made:
            replica.free()
        await until(lambda: all(not one.core.busy for one in made if not one.executor.killed))


async def test_a_replica_that_hears_nothing_of_its_client_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_process, "ORPHAN_TIMEOUT_S", 0.3)
    async with cluster(1) as (client, made):
        await asyncio.to_thread(client.hub.close)
        await until(made[0].ended.is_set)


async def test_who_closes_second_waits_as_well() -> None:
    async with cluster(1) as (client, _):
        host = client._host
        first = asyncio.create_task(client.close())
        await asyncio.sleep(0)
        await client.close()
        assert isinstance(host, Host) and host.stopped and first.done()


async def test_activating_a_replica_ends_its_drain() -> None:
    async with cluster(2, gated=True) as (client, made):
        reader, mine, drained = await drain_under_way(client, 0.2)
        client.activate(mine.id)
        assert (await drained).state == "ready" and client._replica_by_id["r"] is mine
        for replica in made:
            replica.free()
        (await reader.task).check()


async def test_an_adapter_that_one_replica_refuses_is_on_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else those that took it would refuse it when it is loaded again, for they have it."""

    def missing(slot: int, path: str) -> str:
        raise InputError("it is not on this machine")

    async with cluster(3) as (client, made):
        with monkeypatch.context() as patched:
            patched.setattr(made[1].executor, "load_adapter", missing)
            with pytest.raises(InputError, match="not on this machine"):
                await client.load_adapter("a", "/a")
        assert not client.adapters and not any(one.core.adapters.list() for one in made)
        await client.load_adapter("a", "/a")
        with pytest.raises(InputError, match="loaded already"):
            await client.load_adapter("a", "/a")
        assert [one.core.adapters.list() for one in made] == 3 * [client.adapters] == 3 * [[AdapterInfo("a", "/a")]]


async def test_numbers_add_up_and_a_new_replica_has_the_adapters_that_others_have() -> None:
    async with cluster(2, adapters=("a",)) as (client, made):
        assert (client.info.slots, client.info.pages) == (32, 510)
        readers = [Reader(client, ask(f"r{i}", [i, 2], max_tokens=5)) for i in range(1, 5)]
        for reader in readers:
            await reader.task
        stats = await client.stats()
        assert (stats.output_tokens, stats.prompt_tokens, stats.pages_total) == (20, 8, 510)
        assert sum(stats.prefill_time.counts) == 4
        view = await client.view()
        assert (view.slots, [tier.name for tier in view.tiers]) == (32, ["replica-0 device", "replica-1 device"])
        assert len(await client.timelines("r1")) == 1
        await client.load_adapter("b", "/b")
        await client.unload_adapter("a")
        made[0].kill()
        await until(lambda: len(client._by_identity) == 1)
        fresh = FakeReplica(client, adapters=("a",))
        await until(lambda: len(client._by_identity) == 2)
        await client.stats()  # after what it was told when it joined
        assert fresh.core.adapters.list() == client.adapters == [AdapterInfo("b", "/b")]


async def test_tokens_that_a_reader_has_are_not_counted_again() -> None:
    async with cluster(1) as (client, _):
        request = ask("r", [1])
        active = ActiveRequest.begun(request, client.submit(request))
        sub_request = active.sub_request(request, 0)
        active.outputs[0] += [5, 6]
        event = TokenEvent("r", 0, 1, [6, 7, 8], counts=Counts(forced=3), forced=[0, 1, 2])
        fresh = active.take(sub_request, event)
        assert fresh is not None and (fresh.tokens, fresh.forced, fresh.counts) == ([7, 8], [0, 1], Counts(forced=2))


def falling(before: EngineStats, after: EngineStats) -> list[str]:
    """Counters that are less than they were."""
    found = []
    for name in before.__struct_fields__:
        old, new = getattr(before, name), getattr(after, name)
        if isinstance(old, Histogram):
            old, new = sum(old.counts), sum(new.counts)
        elif isinstance(old, dict):
            old, new = sum(old.values()), sum(new.values())
        if name not in GAUGES and isinstance(old, (int, float)) and new < old:
            found.append(name)
    return found


async def test_a_restart_that_is_refused_is_told_to_its_end(caplog: pytest.LogCaptureFixture) -> None:
    async with cluster(1) as (client, _):
        with caplog.at_level(logging.INFO, "quire"), pytest.raises(InputError, match="no other replica is ready"):
            await client.restart("replica-0", 0.0)
    told = [record.getMessage() for record in caplog.records if "restart" in record.getMessage()]
    refused = "replica-0 is not restarted: no other replica is ready to take over from replica-0"
    assert told == ["restarting replica-0", refused]


async def test_an_engine_whose_actor_is_gone_serves_until_it_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_process, "HEARTBEAT_INTERVAL_S", 0.0)  # with every step
    heartbeats, theirs = os.pipe()
    async with cluster(1, heartbeat_fd=theirs) as (client, made):
        os.close(heartbeats)
        (await asyncio.wait_for(Reader(client, ask("r", [1, 2])).task, 20)).check()
        assert not made[0].ended.is_set(), "a broken pipe is not what it dies of"
    os.close(theirs)


async def test_counters_do_not_fall_when_a_replica_ends() -> None:
    """Lost, or restarted after nobody asked for its counters: they are part of the sum; what it held is not."""
    async with cluster(2) as (client, made):
        readers = [Reader(client, ask(f"r{i}", [i, 2, 3] * 3, max_tokens=5)) for i in range(1, 9)]
        for reader in readers:
            await reader.task
        before = await client.stats()
        assert before.prompt_tokens == 72 and before.steps and sum(before.step_tokens.counts) and before.met_slo == 8
        made[0].kill()
        await until(lambda: len(client._by_identity) == 1)
        after = await client.stats()
        assert not falling(before, after) and after.output_tokens == before.output_tokens
        assert after.pages_total == 255, "memory that went with it is not counted"
        assert not falling(before, (await client.view()).stats)
        made.append(FakeReplica(client))
        await until(lambda: len(client._by_identity) == 2)
        await asyncio.gather(*(Reader(client, ask(f"s{i}", [i, 2, 3], max_tokens=5)).task for i in range(4)))
        restarting = asyncio.create_task(client.restart(client._by_identity[made[1].identity].id, 0.0))
        await until(made[1].ended.is_set)
        made.append(FakeReplica(client))
        await restarting
        assert (await client.stats()).output_tokens == 12 * 5
