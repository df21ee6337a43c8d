"""Fair between tenants: the bound of virtual token counters, in the engine's scheduler and in the simulator."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_policies import ask, engine, step

from quire.simulation.figures import Targets, summarise
from quire.simulation.fleet import Fleet, simulate
from quire.simulation.traces import Arrival
from quire.types.config import EngineOptions
from quire.types.cost_model import CostModel, Machine, Rates

OUTPUT_CHARGE = 2.0


def served(scheduler, weights):
    """Service of each tenant so far, over its weight, as the policy's counters have it."""
    return {name: scheduler.policy.counter(name) for name in weights}


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    weight=st.sampled_from([1.0, 2.0, 0.5]),
    pages=st.sampled_from([31, 40, 60]),
    shared=st.booleans(),
)
def test_backlogged_tenants_stay_within_twice_the_largest_charge(seed, weight, pages, shared):
    """Two tenants that always have something waiting; prompts of all sizes, prefix hits, preemption for want of
    pages."""
    rng = random.Random(seed)
    weights = {"a": 1.0, "b": weight}
    scheduler, executor = engine("fair", slots=4, pages=pages, tokens=24)
    stem = [rng.randrange(90) for _ in range(20)]
    count, longest, apart = 0, 1, []

    def refill():
        nonlocal count, longest
        for name in weights:
            while sum(seq.request.tenant == name for seq in scheduler.sequences.waiting) < 3:
                size = rng.choice([2, 9, 30])
                prompt = (stem if shared and rng.random() < 0.5 else []) + [rng.randrange(90) for _ in range(size)]
                longest = max(longest, len(prompt))
                request = ask(f"r{count}", prompt, tokens=rng.randint(1, 25), tenant=name, weight=weights[name])
                scheduler.submit(request)
                count += 1

    refill()
    for i in range(150):
        step(scheduler, executor, 1.0 + 0.1 * i)
        refill()
        counters = served(scheduler, weights)
        apart.append(abs(counters["a"] - counters["b"]))
    memory = (pages - 1) * 4  # tokens that KV memory holds: what may run when the order changes
    largest = max(longest, OUTPUT_CHARGE * memory) / min(weights.values())
    assert max(apart) <= 2 * largest
    assert scheduler.stats.output_tokens > 100


def test_the_bound_is_not_met_first_come_first_served():
    """One tenant sends ten times as much: without fairness it gets nearly all."""
    shares = {}
    for policy in ("fcfs", "fair"):
        scheduler, executor = engine(policy, slots=2)
        rng, tokens = random.Random(1), {"large": 0, "small": 0}
        for i in range(220):
            name = "small" if i % 11 == 0 else "large"
            prompt = [rng.randrange(90) for _ in range(6)]
            scheduler.submit(ask(f"{name}{i}", prompt, tokens=10, tenant=name, arrival=i * 1e-3))
        while tokens["small"] < 150:
            for event in step(scheduler, executor, 1.0)[1]:
                tokens[event.request.rstrip("0123456789")] += len(event.tokens)
        shares[policy] = tokens["small"] / sum(tokens.values())
    assert shares["fcfs"] < 0.15 and shares["fair"] > 0.45


def test_a_tenant_that_comes_back_has_saved_nothing_up():
    scheduler, executor = engine("fair", slots=1)
    scheduler.submit(ask("early", [1, 2], tokens=1, tenant="rests"))
    for i in range(30):
        scheduler.submit(ask(f"busy{i}", [i, 3, 4], tokens=6, tenant="busy", arrival=0.1))
    for i in range(60):
        step(scheduler, executor, 1.0 + i)
    for i in range(5):
        scheduler.submit(ask(f"back{i}", [i, 9], tokens=6, tenant="rests", arrival=50.0))
    assert scheduler.policy.counter("rests") >= scheduler.policy.counter("busy") - 1e-9


MODEL = CostModel(
    "test",
    "none",
    "made up",
    64,
    Rates(base=0.01, tokens=1e-4),
    Machine(pages=400, slots=8, max_model_len=4096, max_batch_tokens=256, depth=2, page_size=16),
)


@pytest.mark.parametrize("policy", ["fair", "auto"])
def test_a_small_tenant_beside_one_that_sends_ten_times_as_much_in_the_simulator(policy):
    rng, trace = random.Random(4), []
    for i in range(440):
        tenant = "small" if i % 11 == 0 else "large"
        trace.append(Arrival(i * 0.01, rng.randrange(50, 200), rng.randrange(5, 40), tenant=tenant))

    def tail(name):
        options = EngineOptions.of(scheduler=name, max_waiting=10_000)
        found = summarise(simulate(Fleet(options, MODEL), trace, workers=1), len(trace), Targets())
        assert found["finished"] == 440
        return found["tenants"]["small"]["ttft_s"]["p99"]

    before, after = tail("fcfs"), tail(policy)
    assert after < (0.2 if policy == "fair" else 0.8) * before


def test_a_tenant_that_was_alone_is_charged_when_another_comes():
    """As if it had been with every step: who comes then begins where the first is."""
    scheduler, executor = engine("fair", slots=4)
    for i in range(4):
        scheduler.submit(ask(f"first{i}", [i, 2, 3], tokens=20, tenant="first"))
    for i in range(6):
        step(scheduler, executor, 1.0 + i)
    scheduler.submit(ask("second", [7, 8], tokens=5, tenant="second"))
    computed = [seq.view.computed for seq in scheduler.sequences.running]
    assert len(computed) == 4 and min(computed) > 3
    assert scheduler.policy.counter("first") == sum(3 + OUTPUT_CHARGE * (count - 3) for count in computed)
    assert scheduler.policy.counter("second") == scheduler.policy.counter("first")
