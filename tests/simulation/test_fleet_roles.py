"""A simulated fleet of prefill and decode replicas, whose roles the cluster's own decisions change."""

from __future__ import annotations

from random import Random

import pytest

from quire.cluster import roles
from quire.cluster.router_policy import ReplicaLoad
from quire.simulation.devices import load_device
from quire.simulation.figures import Targets, summarise
from quire.simulation.fleet import Fleet, simulate
from quire.simulation.fleet_roles import FleetRoles, Routed
from quire.simulation.replica import Kind
from quire.simulation.traces import Arrival
from quire.types.autoscaling import AutoscaleOptions
from quire.types.config import EngineOptions, SchedulerOptions
from quire.types.errors import ConfigError

OPTIONS = EngineOptions(scheduler=SchedulerOptions(max_waiting=1 << 30))


def fleet(replicas: int, prefill: int, router: str = "least-load", **more: object) -> Fleet:
    return Fleet(OPTIONS, load_device("h200"), replicas, router, prefill_replicas=prefill, **more)  # type: ignore[arg-type]


def load(seconds: float, rate: float, prompt: int, outputs: int) -> list[Arrival]:
    rng, at, found = Random(7), 0.0, []
    while (at := at + rng.expovariate(rate)) < seconds:
        found.append(Arrival(at, prompt, outputs))
    return found


def test_every_request_is_computed_once_and_answered_once() -> None:
    trace = load(4.0, 12.0, 4000, 20)
    for switch in (False, True):
        result = simulate(fleet(3, 1, switch_roles=switch), trace, workers=1)
        assert len(result.rows["ttft"]) == len(trace) and not result.lost and not result.refused
        assert result.prompt_tokens == 4000 * len(trace) and result.output_tokens == 20 * len(trace)
        assert result.cached_tokens == 0, "what is handed over is no prefix hit"
        assert sorted(result.rows["arrival"]) == [one.at for one in trace] and min(result.rows["ttft"]) > 0
        assert (result.prefill_peak, result.role_switches) == (1, 0), "too short a load for a change"


def test_answers_are_not_held_up_by_prompts_that_others_compute() -> None:
    trace = sorted([*load(6.0, 6.0, 12_000, 2), *load(6.0, 4.0, 64, 200)])
    apart, together = (simulate(fleet(4, prefill), trace, workers=1).gaps.spread() for prefill in (2, 0))
    assert apart["p99"] < 0.5 * together["p99"]  # type: ignore[operator]


def test_how_many_processes_share_it_changes_nothing() -> None:
    trace = load(3.0, 12.0, 4000, 20)
    one, two = (summarise(simulate(fleet(3, 1), trace, workers=n), len(trace), Targets()) for n in (1, 2))
    assert one["ttft_s"] == pytest.approx(two["ttft_s"]) and one["steps"] == two["steps"]


def test_roles_follow_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """First long prompts, then long answers."""
    monkeypatch.setattr(roles, "WINDOW_S", 2.0)
    prompts = load(12.0, 16.0, 8000, 4)
    fixed, switching = (simulate(fleet(4, 1, switch_roles=switch), prompts, workers=1) for switch in (False, True))
    assert switching.prefill_peak > 1 and switching.role_switches >= 1 and fixed.role_switches == 0
    shares = [summarise(run, len(prompts), Targets(2.0, 0.03))["slo_share"] for run in (fixed, switching)]
    assert shares[1] > 1.5 * shares[0]
    answers = [one._replace(at=one.at + 20.0) for one in load(8.0, 30.0, 64, 200)]
    both = simulate(fleet(4, 1), [*prompts, *answers], workers=1)
    assert len(both.rows["ttft"]) == len(prompts) + len(answers)
    assert both.role_switches > switching.role_switches, "some answer again"


def test_a_prompt_is_handed_to_who_was_to_answer_it() -> None:
    made = FleetRoles(3, 1, switch=False)
    loads = [ReplicaLoad() for _ in range(3)]
    made.weigh(loads)
    assert [one.accepts_requests for one in loads] == [False, True, True]
    loads[2].sent(0)
    assert made.offload(5, 4096, 1, loads) is None, "nobody is delayed there"
    assert made.offload(6, 4096, 2, loads) == 0 and made.busy
    made.weigh(loads)
    assert [one.requests for one in loads] == [0, 0, 2], "it is expected there"
    assert made.prefilled([6]) == [Routed(6, 2, Kind.HANDED_OVER)] and not made.busy


def test_options_that_contradict_each_other() -> None:
    for more in ({"autoscale": AutoscaleOptions(max_replicas=4)}, {"clients": 3}):
        with pytest.raises(ConfigError, match="prefill_replicas"):
            fleet(3, 1, **more)
    with pytest.raises(ConfigError, match="fewer than replicas"):
        fleet(2, 2)


def test_prompts_that_no_replica_takes_are_refused_once() -> None:
    trace = [Arrival(0.01 * number, 500_000 if number % 3 else 4000, 4) for number in range(60)]
    result = simulate(fleet(4, 2), trace, workers=1)
    found = summarise(result, len(trace), Targets())
    assert found["finished"] == 20 and sum(found["refused"].values()) == 40
