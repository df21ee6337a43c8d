"""Random life over tiers that are slow, small and lose pages: nobody's tokens change, and nothing leaks."""

import pytest
from test_scheduler_property import FULL, SHORT_OR_LONG, STATE, WINDOW, World, alone, live

from quire.types.fake_tiers import FakeTiers
from quire.types.request import Request
from quire.types.sampling_params import SamplingParams
from quire.types.transfer import TierSpec

HOST = TierSpec("host", 40)
ROOMY = TierSpec("host", 160)
DISK = TierSpec("disk", 120, kept=True)
REMOTE = TierSpec("remote", 0, kept=True)

WORLDS = [
    pytest.param((FULL,), (HOST,), 1, "lru", 0.0, id="host"),
    pytest.param((FULL,), (HOST, DISK), 2, "cost", 0.1, id="host-disk-lossy", marks=pytest.mark.slow),
    pytest.param((FULL, WINDOW), (HOST, DISK, REMOTE), 2, "lfu", 0.1, id="all-two-groups-lossy"),
    pytest.param((FULL,), (REMOTE,), 1, "lru", 0.9, id="remote-mostly-lost"),
    pytest.param((FULL, STATE), (ROOMY,), 1, "lru", 0.0, id="hybrid-host", marks=pytest.mark.slow),
    pytest.param((FULL, STATE), (HOST, REMOTE), 2, "lru", 0.1, id="hybrid-remote-lossy", marks=pytest.mark.slow),
    pytest.param((FULL, STATE), (ROOMY, DISK), 2, "cost", 0.1, id="hybrid-host-disk-lossy"),
]


def test_engines_share_snapshots_through_a_tier():
    """A second engine finds what the first has computed: pages, and the states behind them."""
    fakes = FakeTiers((REMOTE,), 4, seed=1)
    cached = []
    for seed in range(2):
        world = World((FULL, STATE), policy="fcfs", depth=1, seed=seed, pages=200, tiers=fakes, naming=b"n" * 32)
        for i in range(6):
            prompt = [i] * 30 + [7]
            request = Request(id=f"r{i}", prompt=prompt, params=SamplingParams(max_tokens=9, seed=3))
            world.requests[request.id] = request
            world.scheduler.submit(request)
            world.drain()
            assert world.outputs[request.id, 0] == alone(request, 0)[0]
        world.scheduler.check()
        cached.append(world.scheduler.stats.cached_tokens)
    assert cached == [0, 6 * 28]


@SHORT_OR_LONG
@pytest.mark.parametrize(("groups", "tiers", "depth", "policy", "losses"), WORLDS)
def test_random_life_over_tiers(groups, tiers, depth, policy, losses, operations):
    fakes = FakeTiers(tiers, max(g.tokens_per_page for g in groups if g is not STATE), seed=3, losses=losses)
    pages = 60 if WINDOW in groups else 40
    world = World(groups, policy="fcfs", depth=depth, seed=11, pages=pages, tiers=fakes, kv_policy=policy)
    live(world, "fcfs", True, operations)
    found = {tier.name: tier for tier in world.scheduler.snapshot().tiers}
    first = found[tiers[0].name]
    assert first.pages_out > (5 if losses > 0.5 else 100) and sum(tier.hit_tokens for tier in found.values()) > 20
    assert (sum(tier.missed for tier in found.values()) > 0) == (losses > 0)
    assert not world.scheduler.features.tiers.moving
