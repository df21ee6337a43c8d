"""Predicted waits for a first token: checked against what came true, and what is refused for them."""

import pytest
from msgspec.structs import replace

from quire.simulation.devices import load_device
from quire.simulation.figures import Targets, summarise
from quire.simulation.replica import Replica
from quire.simulation.synthetic import synthetic
from quire.simulation.traces import Arrival
from quire.types.config import EngineOptions
from quire.types.errors import OverloadedError
from quire.types.request import Request
from quire.types.sampling_params import SamplingParams

H200 = load_device("h200")


def served(trace, *, slots=150, **options):
    one = Replica(EngineOptions.of(**options), replace(H200, machine=replace(H200.machine, slots=slots)))
    for number, arrival in enumerate(trace):
        one.arrives(arrival, number)
    one.run()
    return one


def error(one, requests):
    return summarise(one.result(), requests, Targets())["wait_error"]


@pytest.mark.parametrize("rate", [12.0, 20.0])
def test_predicted_waits_are_within_a_factor_of_two_on_the_bursty_mix(rate):
    """Below capacity and above it."""
    one = served(synthetic("mix", 500, rate, 3, "gamma:0.3"), max_waiting=10_000)
    found = error(one, 500)
    assert found["p50"] < 1.4 and found["p90"] < 2.0
    ratios = one.core.stats().wait_ratios
    assert sum(ratios.counts) > 400, "all but those that came before anything was known"
    assert sum(ratios.counts[3:7]) > 0.85 * sum(ratios.counts), "from 0.5 to 2"


def test_waits_for_slots_follow_from_expected_lengths():
    """One at a time, answers of 50 tokens: who is behind ten others waits for ten answers."""
    warm = [Arrival(float(i), 64, 50) for i in range(20)]
    burst = [Arrival(30.0, 64, 50) for _ in range(10)]
    one = served(warm + burst, slots=1, scheduler="fcfs")
    rows = one.result().rows
    assert 0.8 < rows["predicted"][-1] / rows["waited"][-1] < 1.25
    assert rows["waited"][-1] > 8 * rows["waited"][-9] > 0


def test_what_would_wait_longer_than_it_may_is_refused_and_leaves_nothing():
    one = served([Arrival(float(i), 64, 50) for i in range(20)], slots=1, scheduler="fcfs")
    core = one.core
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=50)

    def ask(name, **more):
        one._lengths[name] = 50
        one.recorder.expect(name, Arrival(0.0, 64, 50))
        core.submit(Request(id=name, prompt=[1] * 64, params=params, arrival=one._clock.now, **more))

    ask("first", longest_wait=1e-6)  # the engine is idle
    ask("second")
    with pytest.raises(OverloadedError, match=r"go first for about \d\.\d s"):
        ask("third", longest_wait=0.05)
    ask("resumed", longest_wait=0.05, outputs=[1])
    assert set(core.scheduler.sequences.requests) == {"first", "second", "resumed"}
    while core.busy:
        core.step()
    core.settle()
    core.scheduler.check()


def test_a_first_impression_refuses_nobody():
    """The first step is slow: those who come next would be told of hours, and nothing would ever be learned."""
    one = served([Arrival(0.0, 64, 50)], slots=1, scheduler="fcfs")
    one.core.scheduler._prefill_limiter._base = 1000.0
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=2)
    for name in "abc":
        one._lengths[name] = 2
        one.recorder.expect(name, Arrival(0.0, 64, 2))
        one.core.submit(Request(id=name, prompt=[1] * 64, params=params, arrival=one._clock.now, longest_wait=30.0))
    assert len(one.core.scheduler.sequences.requests) == 3
