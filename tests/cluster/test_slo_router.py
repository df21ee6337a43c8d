"""Routing by service levels: predictions learned from requests, and who misses a target because of a decision."""

from __future__ import annotations

import asyncio
from math import inf

import pytest
from fake_replicas import FakeReplica, ask, expected
from msgspec.structs import replace

from quire.cluster.cluster_client import ClusterClient
from quire.cluster.latency_model import LatencyLine, prefill_work
from quire.cluster.router_policy import ReplicaLoad, RouteView
from quire.cluster.slo_router import SloAware
from quire.engine.client import RestartPolicy
from quire.memory.page_table import PageTable
from quire.scheduling.sequence import Sequence
from quire.simulation.devices import load_device
from quire.simulation.fleet import Fleet, simulate
from quire.simulation.records import Recorder
from quire.simulation.synthetic import resampled
from quire.simulation.traces import Arrival
from quire.types.clock import Clock
from quire.types.config import EngineOptions, SchedulerOptions
from quire.types.request import FinishReason

TOKEN_S = 0.001  # that replicas take here, for a unit of prompt work


def seconds(tokens: int) -> float:
    return TOKEN_S * prefill_work(tokens, 0)


def trained(replicas: int) -> tuple[SloAware, list[ReplicaLoad]]:
    """A router that has seen prompts of several lengths, and answers at 0.01 s a token and 0.01 s more for each
    request beside."""
    router, loads = SloAware(replicas), [ReplicaLoad() for _ in range(replicas)]
    for number in range(40):
        tokens, beside = 100 * (number % 4 + 1), number % 3
        asked = [RouteView(1, id=("beside", i)) for i in range(beside)]
        for view in (*asked, RouteView(tokens, id=number)):
            router._send(view, 0, late=False)
            if view.id == number:
                router._requests[number].alone = True
        router.first_token(number, seconds(tokens))
        router.ended(number, seconds(tokens) + 10 * 0.01 * (2 + beside), 11)
        for view in asked:
            router.ended(view.id, 0.0, 0)
    return router, loads


def send(router: SloAware, loads: list[ReplicaLoad], view: RouteView) -> int:
    chosen = router.choose(view, loads)
    loads[chosen].sent(view.tokens - router.saved)
    return chosen


@pytest.mark.parametrize(("base", "slope"), [(0.5, 0.02), (0.0, 0.1), (0.3, 0.0)])
def test_a_line_is_found_again_and_follows_changes(base: float, slope: float) -> None:
    line = LatencyLine()
    assert not line.known
    for x in range(50):
        line.record(float(x % 7), 9.0)
    for x in range(600):
        line.record(float(x % 7), base + slope * (x % 7))
    assert line.seconds(20.0) == pytest.approx(base + 20 * slope, rel=0.01, abs=0.01)


def test_a_line_never_falls_and_never_begins_below_zero() -> None:
    falling, steep = LatencyLine(), LatencyLine()
    for x in (1.0, 2.0, 3.0):
        falling.record(x, 10.0 - x)
        steep.record(x, 5 * x - 4)
    assert falling.slope == 0.0 and falling.seconds(100.0) == pytest.approx(8.0, rel=0.02)
    assert steep.base == 0.0 and steep.slope > 0


def test_what_replicas_take_is_learned_from_requests() -> None:
    router, _ = trained(2)
    assert router.ttft.seconds(prefill_work(1000, 0)) == pytest.approx(seconds(1000), rel=1e-6)
    assert router.tpot.seconds(5) == pytest.approx(0.06, rel=1e-6)


def test_requests_without_targets_go_as_cache_aware_sends_them() -> None:
    router, loads = trained(3)
    first = send(router, loads, RouteView(1000, ("s", "a"), id="a"))
    loads[first].prefilled(1000)
    assert send(router, loads, RouteView(1500, ("s", "a", "b"), id="b")) == first and router.saved == 1000


def test_a_prefix_is_left_where_waiting_for_it_would_be_too_late() -> None:
    router, loads = trained(2)
    shared = tuple(range(10))
    first = send(router, loads, RouteView(1000, shared, id="a"))
    router.first_token("a", 1.0)
    loads[first].prefilled(1000)
    for number in range(2):  # two of 800 tokens: what their replica has ahead of another is 1.6 s
        view = RouteView(810, (*shared, number), id=number)
        router._send(view._replace(blocks=()), first, late=False)
    view = RouteView(1000, shared, id="c", now=2.0)
    assert router.choose(view._replace(ttft=5.0), loads) == first, "there is time"
    router.ended("c", 2.0, 0)
    assert router.choose(view._replace(ttft=1.3), loads) != first, "there is none, and the other computes it in time"


def test_what_is_too_late_is_nobodys_queue() -> None:
    router, loads = trained(2)
    late = send(router, loads, RouteView(8000, id="late", ttft=1.0))
    other = send(router, loads, RouteView(500, id="b", ttft=2.0))
    assert other != late
    view = RouteView(500, id="c", ttft=0.8)
    assert router.missed(view, 0, late, loads[late]) == (0, False)
    assert router.missed(view, 0, other, loads[other]) == (1, True)


def test_others_are_not_made_late() -> None:
    """A short prompt goes before a long one that has no time to spare, but not where that makes it late."""
    router, loads = trained(2)
    tight = send(router, loads, RouteView(1000, id="tight", ttft=seconds(1000) * 1.1))
    loads[1 - tight].sent(3000)  # by cost alone the new one would go to the tight one's replica
    view = RouteView(400, id="new", ttft=5.0)
    assert loads[tight].cost < loads[1 - tight].cost
    assert router.choose(view, loads) == 1 - tight
    router.ended("tight", 1.0, 0)
    router.ended("new", 1.0, 0)
    assert router.choose(view._replace(id="again"), loads) == tight, "with nobody there to be late it does"


def test_answers_keep_their_pace() -> None:
    router, loads = trained(2)
    for number in range(4):  # 0.05 s a token with four, 0.06 with five
        router._send(RouteView(10, id=number, tpot=0.055), 0, late=False)
        router.first_token(number, 0.1)
        loads[0].sent(0)
    loads[1].sent(4000)  # a longer queue, but nobody is slowed there
    assert loads[0].cost < loads[1].cost
    assert router.choose(RouteView(400, id="new", tpot=1.0), loads) == 1
    router.ended("new", 0.2, 0)
    for number in range(4):
        router.ended(number, 0.2, 0)
    assert router.choose(RouteView(1000, id="fast", tpot=1.0), loads) == 0, "with nobody there to be slowed it does not"
    loads[1].prefilled(2500)
    assert router.choose(RouteView(1000, id="own", tpot=0.055), loads) == 1, "and its own pace counts"


def test_late_everywhere_means_least_cost() -> None:
    router, loads = trained(2)
    send(router, loads, RouteView(900, id="a", ttft=0.1))
    second = send(router, loads, RouteView(300, id="b", ttft=0.1))
    assert send(router, loads, RouteView(500, id="c", ttft=0.1)) == second


def test_prompts_that_others_compute_are_no_work_here() -> None:
    router, loads = trained(1)
    send(router, loads, RouteView(5000, id="a", ttft=9.0))
    router.offloaded("a")
    assert router.missed(RouteView(500, id="b", ttft=0.8), 0, 0, loads[0])[0] == 0
    before = router.ttft.seconds(1000.0)
    router.first_token("a", 100.0)
    assert router.ttft.seconds(1000.0) == before, "and nothing is learned from them"


def test_a_target_is_not_worth_any_cost() -> None:
    """Where a long prefix is cached, prompts of usual length are late rather than computed twice."""
    router, loads = trained(2)
    shared = tuple(range(100))
    first = send(router, loads, RouteView(10_000, shared, id="a"))
    router.ended("a", 0.0, 0)
    loads[first].prefilled(10_000)
    for number in range(300):  # what a prompt is on the mean
        router.choose(RouteView(500, id=number), loads)
        router.ended(number, 0.0, 0)
    router._send(RouteView(2000, id="before"), first, late=False)
    view = RouteView(10_000, shared, id="b", ttft=seconds(10_000) + 0.1)
    assert router.missed(view, 10_000, first, loads[first])[0] == 0
    tight = view._replace(id="c", ttft=0.5 * seconds(2000))
    assert router.missed(tight, 10_000, first, loads[first]) == (1, True)
    assert router.choose(tight, loads) == first


def test_what_ended_leaves_nothing_behind() -> None:
    router, loads = trained(3)
    for number in range(30):
        send(router, loads, RouteView(100, id=("n", number), ttft=1.0, tpot=1.0))
        if number % 2:
            router.first_token(("n", number), 1.0)
    for number in range(30):
        router.ended(("n", number), 2.0, number % 3)
        router.ended(("n", number), 2.0, 1)
    assert not router._requests and not any(router._prompts) and not any(router._answers)
    assert router._under_way == [0, 0, 0]


def test_a_simulated_fleet_tells_its_router_of_first_tokens_and_ends() -> None:
    """So that it decides otherwise than by cost alone, and however many processes share the fleet."""
    options = EngineOptions(scheduler=SchedulerOptions(max_waiting=1 << 30, slo_ttft=0.4, slo_tpot=0.05))
    asked = resampled([Arrival(0.0, length, 8) for length in (3000, 500, 12_000)], 120, 20.0, 3, "poisson")
    found = []
    for router, workers in (("cache-aware", 1), ("slo-aware", 1), ("slo-aware", 2)):
        result = simulate(Fleet(options, load_device("h200"), 3, router), asked, workers=workers)
        assert len(result.rows["ttft"]) == len(asked)
        found.append(sorted(result.rows["ttft"]))
    assert found[1] != found[0] and found[1] == found[2]


def test_a_simulated_request_that_draws_nothing_has_no_first_token() -> None:
    clock = Clock(3.0)
    recorder = Recorder(clock, {}, observes=True)
    for number, reason in enumerate((FinishReason.ERROR, FinishReason.LENGTH)):
        recorder.expect(str(number), Arrival(0.0, 8, 1), 8)
        recorder.finished(Sequence(ask(str(number), [1] * 8), 0, id=number, limit=9, table=PageTable(1)), reason)
    assert recorder.take_progress() == [(3.0, 0, 1), (3.0, 1, 0), (3.0, 1, 1)] and not recorder.tokens


class Host:
    def stop(self) -> None:
        pass


async def test_a_cluster_tells_its_router_of_targets_first_tokens_and_ends() -> None:
    policy = SloAware(2)
    client = ClusterClient(2, policy, RestartPolicy(max_restarts=20), targets=(5.0, 0.0))
    made = [FakeReplica(client, gated=True) for _ in range(2)]

    async def read(name: str, ttft: float) -> None:
        request = replace(ask(name, [1, 2, 3, 4]), slo_ttft=ttft)
        tokens = [t async for batch in client.submit(request) for event in batch for t in event.tokens]
        assert tokens == expected(request)

    try:
        await client.ready(Host())  # type: ignore[arg-type]
        tasks = [asyncio.create_task(read(str(number), 2.0 * (number == 0))) for number in range(4)]
        async with asyncio.timeout(30):
            while len(policy._requests) < 4:
                await asyncio.sleep(0.005)
            allowed = {str(name): one.deadline - one.sent for name, one in policy._requests.items()}
            assert allowed == pytest.approx({"0": 2.0, "1": 5.0, "2": 5.0, "3": 5.0})
            assert {one.tpot for one in policy._requests.values()} == {inf}
            made[0].kill()
            made[1].free()
            await asyncio.gather(*tasks)
        assert not policy._requests and not any(policy._prompts) and policy._under_way == [0, 0]
        assert policy.ttft.known and policy.tpot.known
    finally:
        for replica in made:
            replica.free()
        await client.close()
