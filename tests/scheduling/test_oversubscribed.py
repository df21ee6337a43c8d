"""Memory at its end: many more requests than fit all finish, as if alone, and none starts over and over."""

import random
from collections import Counter

import pytest
from test_scheduler_property import FULL, VOCAB, World, alone

from quire.scheduling import SchedulingFeature
from quire.types.config import SchedulerOptions
from quire.types.fake_tiers import FakeTiers
from quire.types.request import Request
from quire.types.sampling_params import SamplingParams
from quire.types.transfer import TierSpec


@pytest.mark.parametrize("count", [200, pytest.param(500, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("mode", "depth"), [("auto", 2), ("recompute", 2), ("swap", 1), pytest.param("auto", 1, marks=pytest.mark.slow)]
)
def test_eight_times_too_much_work(mode, depth, count, monkeypatch):
    tiers = FakeTiers((TierSpec("host", 200),), 4, seed=1)
    monkeypatch.setattr("test_scheduler_property.SchedulerOptions", lambda **o: SchedulerOptions(**o, preempt=mode))
    counts = Counter()

    class Preemptions(SchedulingFeature):
        def preempted(self, seq):
            counts[seq.key] += 1

    listeners = [Preemptions()]
    world = World((FULL,), policy="fcfs", depth=depth, seed=2, pages=60, slots=64, tiers=tiers, listeners=listeners)
    rng = random.Random(4)
    for i in range(count):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(4, 12))]
        params = SamplingParams(max_tokens=rng.randint(10, 60), seed=i, stop_token_ids=[])
        world.requests[f"r{i}"] = request = Request(id=f"r{i}", prompt=prompt, params=params, arrival=float(i))
        world.scheduler.submit(request)
    world.drain()
    world.scheduler.check()
    assert len(world.ended) == count
    for name, request in world.requests.items():
        assert (world.outputs[name, 0], world.ended[name, 0]) == alone(request, 0)
    assert counts and max(counts.values()) <= 4
    swaps, preemptions = world.scheduler.stats.swaps, world.scheduler.stats.preemptions
    assert swaps == {"recompute": 0, "swap": preemptions}.get(mode, swaps)
