"""What a cluster counts of its replicas' work is what they have, whatever happens, and nothing when all is over."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import pytest
from fake_replicas import ask
from msgspec.structs import replace
from scripted_engines import ScriptedHub

from quire.cluster import cluster_client
from quire.cluster.cluster_client import ClusterClient
from quire.cluster.replica_handle import Replica, ReplicaState
from quire.cluster.roles import ROLES, PrefillCosts
from quire.cluster.slo_router import SloAware
from quire.engine.client import RestartPolicy
from quire.engine.event_queue import EventQueue
from quire.types.errors import EngineDeadError, InputError, OverloadedError
from quire.types.events import TokenEvent
from quire.types.request import FinishReason, Request

REPLICAS = 4
EVENTS = 400


@pytest.fixture
def hubs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_client, "ReplicaHub", ScriptedHub)
    monkeypatch.setattr(cluster_client, "RETRY_S", 0.0)
    monkeypatch.setattr(PrefillCosts, "handover_tokens", 0.0)


class Scene:
    """A cluster, its engines and its readers, and everything that may happen to them."""

    def __init__(self, chance: random.Random):
        self.chance = chance
        self.policy = SloAware(REPLICAS)
        restarts = RestartPolicy(max_restarts=1000)
        self.client = ClusterClient(REPLICAS, self.policy, restarts, prefill=1, connector="tcp", targets=(1.0, 0.1))
        self.hub: Any = self.client.hub
        self.names = map(str, itertools.count())
        self.readers: dict[str, tuple[EventQueue, asyncio.Task[None]]] = {}
        self.tasks: list[asyncio.Task[Any]] = []
        for number in range(REPLICAS):
            self.hear(self.hub.start(number, next(self.names)))

    def hear(self, news: Any) -> None:
        self.client._received(news)

    async def happen(self) -> None:
        await self.chance.choice(
            [self.submit] * 4 + [self.step] * 12 + [self.read] * 4
            + [self.leave, self.cancel, self.stop, self.lose, self.join, self.drain, self.activate, self.migrate]
            + [self.change_role]
        )()  # fmt: skip
        self.check()

    async def submit(self) -> None:
        stream = self.client.submit(self.any_request())

        async def read() -> None:
            with suppress(Exception):
                async for _ in stream:
                    pass

        self.readers[stream.id] = stream, asyncio.create_task(read())
        await asyncio.sleep(0)

    def any_request(self) -> Request:
        prompt = [self.chance.randrange(9) for _ in range(self.chance.choice((3, 40, 400, 3000)))]
        request = ask(next(self.names), prompt, n=self.chance.choice((1, 1, 2)))
        return replace(request, slo_ttft=self.chance.choice((0.0, 0.5)), slo_tpot=self.chance.choice((0.0, 0.05)))

    async def step(self) -> None:
        if self.hub.engines:
            identity = self.chance.choice(list(self.hub.engines))
            self.hub.engines[identity].step(self.chance)
            if self.chance.random() < 0.8:  # else it is still on its way
                self.hear(self.hub.deliver(identity))

    async def read(self) -> None:
        for _ in range(3):
            await asyncio.sleep(0)

    async def leave(self) -> None:
        if self.readers:
            stream, task = self.readers.pop(self.chance.choice(list(self.readers)))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await stream.aclose()

    async def cancel(self) -> None:
        if self.readers:
            self.client.abort(self.chance.choice(list(self.readers)))

    async def stop(self) -> None:
        if self.readers:
            self.client.finish_at(self.chance.choice(list(self.readers)), self.chance.randrange(2), 1)

    async def lose(self) -> None:
        if self.hub.engines:
            self.hear(self.hub.lose(self.chance.choice(list(self.hub.engines))))

    async def join(self) -> None:
        missing = [one.number for one in self.client._replicas if not one.identity]
        if missing:
            self.hear(self.hub.start(self.chance.choice(missing), next(self.names)))

    def any_replica(self) -> Replica:
        return self.chance.choice(self.client._replicas)

    async def drain(self) -> None:
        replica = self.any_replica()
        if replica.identity:
            self.tasks.append(asyncio.create_task(self.client.drain_replica(replica, self.chance.choice((0.0, 0.01)))))

    async def activate(self) -> None:
        with suppress(InputError):
            self.client.activate(self.any_replica().id)

    async def migrate(self) -> None:
        replica = self.any_replica()
        for sub_request in list(replica.sub_requests.values())[:2]:
            self.tasks.append(asyncio.create_task(self.client.migration.move(sub_request, replica)))

    async def change_role(self) -> None:
        with suppress(InputError):
            self.client.handovers.set_role(self.any_replica(), self.chance.choice(ROLES))

    def check(self) -> None:
        """What is counted of each replica is what it has."""
        policy = self.policy
        for replica in self.client._replicas:
            there, own, load = list(replica.sub_requests.values()), replica.internal.values(), replica.load
            assert load.requests == len(there) + len(own)
            unstarted = [one for one in there if not one.started]
            assert load.tokens == sum(one.prefill for one in unstarted) + sum(one.tokens for one in own)
            assert replica.idle.is_set() == (not there and not own)
            assert policy._under_way[replica.number] == len(there)
            computing = {one.request.id for one in unstarted if one.prefill}
            assert {id for id, one in policy._prompts[replica.number].items() if one.work} == computing
            assert set(policy._answers[replica.number]) == {one.request.id for one in there}
            assert all(self.client._replica_by_id[one.request.id] is replica for one in there)
        assert len(policy._requests) == len(self.client._replica_by_id)

    async def end(self) -> None:
        """All readers leave; engines say what they have to say."""
        for stream, task in self.readers.values():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await stream.aclose()
        while not all(task.done() for task in self.tasks):
            for identity in list(self.hub.engines):
                self.hear(self.hub.deliver(identity))
                self.hub.engines[identity].step(self.chance)
            await asyncio.sleep(0)
        for identity in list(self.hub.engines):
            for id in list(self.hub.engines[identity].requests):
                self.hub.engines[identity].draw(id, 0)
            self.hear(self.hub.deliver(identity))
        await asyncio.gather(*self.tasks)


@pytest.fixture
async def scene(request: pytest.FixtureRequest, hubs: None) -> AsyncIterator[Scene]:
    made = Scene(random.Random(getattr(request, "param", 0)))
    yield made
    while made.hub.engines:
        await made.lose()
    await made.client.close()


@pytest.mark.parametrize("scene", range(20), indirect=True)
async def test_whatever_happens_counters_are_what_replicas_have_and_nothing_in_the_end(scene: Scene) -> None:
    for _ in range(EVENTS):
        await scene.happen()
    await scene.end()
    scene.check()
    client, policy = scene.client, scene.policy
    assert not client._active and not client._replica_by_id and not client.pending and not policy._requests
    assert not client.handovers._prefills and not client.handovers._ended and not client.migration._moving
    assert all(not one.load.requests and not one.load.tokens and not one.internal for one in client._replicas)


def engine_with(scene: Scene, id: str) -> tuple[str, Any]:
    """Whoever has a request, and its identity."""
    return next((identity, engine) for identity, engine in scene.hub.engines.items() if id in engine.requests)


async def sent(scene: Scene, request: Request) -> list[TokenEvent]:
    """A request is sent; the list that all its reader gets will be in."""
    events: list[TokenEvent] = []
    stream = scene.client.submit(request)

    async def read() -> None:
        with suppress(EngineDeadError):  # at the end of the test
            async for batch in stream:
                events.extend(batch)

    scene.readers[request.id] = stream, asyncio.create_task(read())
    await asyncio.sleep(0)
    return events


async def test_nothing_is_learned_from_requests_that_draw_nothing(scene: Scene) -> None:
    """Refused at once or too late, they do not say how long prompts take, what is cached or who hands pages over."""
    client = scene.client
    for number in range(2):
        await sent(scene, ask(str(number), [number + 5] * 400))  # so that somebody would be delayed by further ones
    await sent(scene, ask("drawn", [1] * 400))
    scene.hub.engines[identity := engine_with(scene, "drawn")[0]].draw("drawn", 0)
    scene.hear(scene.hub.deliver(identity))
    known = scene.policy.ttft.seconds(400.0)
    for id, error, token in (("refused", OverloadedError.__name__, 2), ("late", "", 3), ("cached", "", 1)):
        await sent(scene, ask(id, [token] * 400))
        there = client._active[id].sub_requests[id]
        assert there.cached if token == 1 else there.remote_prefill, "which would be blamed"
        identity, engine = engine_with(scene, id)
        engine.end(id, FinishReason.ERROR, error=error, message="no")
        scene.hear(scene.hub.deliver(identity))
    assert scene.policy.ttft.seconds(400.0) == known
    assert not client.handovers._failed and not any(client._router._expected)
    scene.check()


async def test_no_pace_is_learned_from_replicas_that_are_lost(scene: Scene) -> None:
    """Who knows how long they had been silent."""
    await sent(scene, ask("r", [1, 2, 3]))
    identity, engine = engine_with(scene, "r")
    for _ in range(3):
        engine.draw("r", 0)
    scene.hear(scene.hub.deliver(identity))
    scene.hear(scene.hub.lose(identity))
    assert not scene.policy.tpot.known and engine_with(scene, "r~1")
    scene.check()


async def test_what_moves_keeps_its_pace_in_sight(scene: Scene) -> None:
    """Its target for each token holds where it goes on, and it counts among those under way there."""
    await sent(scene, replace(ask("r", [1, 2, 3]), slo_tpot=0.05))
    identity, engine = engine_with(scene, "r")
    engine.draw("r", 0)
    scene.hear(scene.hub.deliver(identity))
    source = scene.client._by_identity[identity]
    move = asyncio.create_task(scene.client.migration.move(source.sub_requests["r"], source))
    while not any(one.internal for one in scene.client._replicas):
        await asyncio.sleep(0)
    for other in list(scene.hub.engines):
        for id in [id for id in scene.hub.engines[other].requests if "+" in id]:
            scene.hub.engines[other].end(id, FinishReason.LENGTH)
        scene.hear(scene.hub.deliver(other))
    assert await move
    target = scene.client._replica_by_id["r~1"].number
    assert target != source.number and scene.policy._answers[target]["r~1"].tpot == 0.05
    assert not scene.policy._prompts[target] and scene.policy._under_way[target] == 1
    scene.check()


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_request_is_cancelled_while_no_replica_has_it(scene: Scene, when: str) -> None:
    """Whether it waits for one already, or was told to stop when its replica was lost."""
    events = await sent(scene, ask("r", [1, 2, 3], n=2))
    if when == "before":
        scene.client.abort("r")
    while scene.hub.engines:
        await scene.lose()
    if when == "after":
        assert scene.client.pending == 1
        scene.client.abort("r")
    await asyncio.wait_for(scene.readers["r"][1], 10)
    assert [(event.branch, event.finish) for event in events] == [(0, FinishReason.ABORT), (1, FinishReason.ABORT)]
    assert not scene.client.pending and not scene.client._active


async def test_a_stopped_branch_leaves_its_replica_when_another_of_its_request_was_lost(scene: Scene) -> None:
    """Its reader was told of its end when the other branch moved; that its own replica ends it too is no news to it."""
    await sent(scene, ask("r", [1, 2, 3], n=2))
    identity, engine = engine_with(scene, "r")
    for branch in range(2):
        engine.draw("r", branch)
    scene.hear(scene.hub.deliver(identity))
    scene.hear(scene.hub.lose(identity))
    first, second = engine_with(scene, "r~1")[0], engine_with(scene, "r~2")[0]
    assert first != second
    scene.client.finish_at("r", 1, 1)
    scene.hear(scene.hub.lose(first))
    scene.hear(scene.hub.deliver(second))
    assert "r~2" not in scene.client._replica_by_id
    scene.check()


async def test_a_drained_replica_first_computes_what_others_wait_for(scene: Scene) -> None:
    client = scene.client
    for number in range(4):  # one for each of the others, and one that somebody would be delayed by
        await sent(scene, ask(str(number), [number] * 400))
    prefill = client._replicas[0]
    assert prefill.internal
    drain = asyncio.create_task(client.drain_replica(prefill, 20.0))
    await asyncio.sleep(0)
    engine = scene.hub.engines[prefill.identity]
    assert prefill.internal and len(engine.requests) == len(prefill.internal), "none was aborted"
    for id in list(engine.requests):
        engine.end(id, FinishReason.LENGTH)
    scene.hear(scene.hub.deliver(prefill.identity))
    while not drain.done():
        await asyncio.sleep(0)
        scene.hear(scene.hub.deliver(prefill.identity))
    assert prefill.state is ReplicaState.DRAINED
