"""Predicted waits for a first token: checked against what came true, and what is refused for them."""

from contextlib import suppress
from itertools import count
from math import isfinite, log
from random import Random

import pytest
from msgspec.structs import replace

from quire.scheduling.features.lateness import LatenessModel
from quire.scheduling.features.wait_prediction import WaitCorrection
from quire.simulation.devices import load_device
from quire.simulation.figures import Targets, summarise
from quire.simulation.replica import Replica
from quire.simulation.synthetic import synthetic
from quire.simulation.traces import Arrival
from quire.types.config import EngineOptions
from quire.types.cost_model import CostModel, Machine, Rates
from quire.types.errors import OverloadedError
from quire.types.request import Request
from quire.types.sampling_params import SamplingParams

H200 = load_device("h200")
CPU = CostModel(
    "cpu",
    "135M",
    "made up: 64 streams take seven times as long a step as one does",
    knee=0,
    rates=Rates(base=0.006, tokens=0.0006, context=2e-8, pairs=1e-8),
    machine=Machine(8000, 256, 8192, 2048, depth=1, step_target=0.3),
)


def served(trace, *, device=H200, slots=150, **options):
    one = Replica(EngineOptions.of(**options), replace(device, machine=replace(device.machine, slots=slots)))
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


@pytest.mark.parametrize("scheduler", ["auto", "fcfs"])
@pytest.mark.parametrize("streams", [1, 16, 64])
def test_a_burst_behind_many_streams_is_not_told_of_a_wait_that_is_too_long(streams, scheduler):
    """With time between in which nothing came, and prompts so short that steps are hardly about them."""
    rounds, burst = 12, 100
    trace = [Arrival(30.0 * number, 64, 64) for number in range(rounds) for _ in range(streams)]
    trace += [Arrival(30.0 * rounds, 64, 64)] * burst
    one = served(trace, device=CPU, slots=256, scheduler=scheduler)
    rows = one.result().rows
    ratios = [told / real for told, real in zip(rows["predicted"][-burst:], rows["waited"][-burst:], strict=True)]
    assert max(ratios) < 2, "the first of a burst cannot know of the others, but nobody is told of more than there is"
    assert min(ratios[burst // 4 :]) > 0.5


def test_waits_are_predicted_where_every_step_has_prompts():
    """What a step takes by itself has not been seen then."""
    one = served([Arrival(0.01 * number, 256, 2) for number in range(60)], device=CPU, slots=2)
    assert min(one.result().rows["predicted"][-20:]) > 0


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
        one.recorder.expect(name, Arrival(0.0, 64, 50), 64)
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


def test_a_correction_that_is_wrong_does_not_refuse_for_ever():
    """Nothing comes true of what was refused."""
    one = served([Arrival(float(i), 64, 50) for i in range(20)], slots=1, scheduler="fcfs")
    waits, params = one.core.scheduler.features.waits, SamplingParams(temperature=0.0, seed=0, max_tokens=50)
    one._lengths.update((str(number), 50) for number in range(100))

    def ask(number):
        one.recorder.expect(str(number), Arrival(0.0, 64, 50), 64)
        arrival = one._clock.now
        one.core.submit(Request(id=str(number), prompt=[1] * 64, params=params, arrival=arrival, longest_wait=5.0))

    ask(0)
    regime = (1, True, False, False, None)  # behind one that waits for the slot too
    waits._corrections[regime] = WaitCorrection(log(64.0), 16)
    refused = 0
    for number in range(1, 100):
        with suppress(OverloadedError):
            ask(number)
            break
        refused += 1
    assert 0 < refused < 50
    assert one.core.scheduler.sequences.requests.keys() == {"0", str(1 + refused)}


def test_a_first_impression_refuses_nobody():
    """The first step is slow: those who come next would be told of hours, and nothing would ever be learned."""
    one = served([Arrival(0.0, 64, 50)], slots=1, scheduler="fcfs")
    one.core.scheduler._prefill_limiter._times.learn(1e5, 1, 0.0)
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=2)
    for name in "abc":
        one._lengths[name] = 2
        one.recorder.expect(name, Arrival(0.0, 64, 2), 64)
        one.core.submit(Request(id=name, prompt=[1] * 64, params=params, arrival=one._clock.now, longest_wait=30.0))
    assert len(one.core.scheduler.sequences.requests) == 3


@pytest.mark.parametrize("rate,seed,most", [(20.0, 3, 4.0), (60.0, 2, 12.0)])
def test_whoever_will_be_late_is_told_so(rate, seed, most):
    """Above capacity, one kind of work: who is too late goes behind all who come later, and so waits much longer than
    for those that are ahead."""
    rng, at, trace = Random(seed), 0.0, []
    for _ in range(500):
        at += rng.expovariate(rate)
        prompt = int(min(8000, rng.lognormvariate(7.6, 0.7)))
        trace.append(Arrival(at, prompt, rng.randint(5, 40), ttft=1.0, tpot=0.1))
    one = served(trace, max_waiting=10_000)
    assert sum(ttft > 1 for ttft in one.result().rows["ttft"]) > 50
    found = error(one, 500)
    assert found["p50"] < 1.6 and found["p90"] < most


def test_lateness_is_learned_from_what_came_true():
    """At first late is what would be so without anybody else coming; then what was, known once the target passed."""
    model, ids = LatenessModel(), count()

    def expects(now, *, seconds, prefill, ahead, served=None):
        sequence = next(ids)
        late = model.expects(sequence, now, 1.0, seconds=seconds, prefill=prefill, ahead=ahead)
        if served is not None:
            model.served(sequence, served)
        return late

    large = {"seconds": 0.5, "prefill": 0.1, "ahead": 3}
    assert not expects(0.0, **large, served=0.9)
    assert expects(0.0, **large | {"seconds": 2.0}, served=1.5)
    for now in range(1, 40):
        small_late = expects(now, seconds=0.1, prefill=0.01, ahead=0, served=now + 0.2)
        large_late = expects(now, **large)
    assert large_late and not small_late
    for now in range(41, 120):
        large_late = expects(now, **large, served=now + 0.9)
    assert not large_late
    assert len(model._open) <= 1


def test_a_target_that_nobody_could_meet_spoils_nothing():
    model = LatenessModel()
    model.expects(1, 0.0, 1e-320, seconds=0.1, prefill=0.1, ahead=0)
    model.served(1, 1.0)
    assert all(isfinite(weight) for weight in model._weights)


def test_deadlines_of_those_that_are_served_are_forgotten():
    model = LatenessModel()
    for sequence in range(1000):
        model.expects(sequence, 0.0, 86_400.0, seconds=0.1, prefill=0.1, ahead=0)
        model.served(sequence, 0.1)
    assert len(model._deadlines) < 100
