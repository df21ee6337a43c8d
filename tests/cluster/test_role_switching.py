"""Roles follow the load's shape: the pool with more work a replica gets one of the other's, and nothing swings."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
from fake_replicas import ask
from test_disaggregation import PROMPT, cluster, gather
from test_failover import Reader, until

from quire.cluster import role_switching, roles
from quire.cluster.roles import DECODE, MIN_WORK, PREFILL, WINDOW_S, PoolSample, PrefillCosts, RoleBalancer
from quire.types.errors import ConfigError, InputError
from quire.types.serving import ServeOptions


def run(balancer: RoleBalancer, sample: PoolSample, seconds: float, since: float = 0.0) -> list[tuple[float, str]]:
    """What is decided under a load that does not change, roles being changed as decided."""
    found = []
    for tick in range(int(seconds) + 1):
        if (decision := balancer.decide(since + tick, sample)) is not None:
            found.append((since + tick, decision.role))
            more = 1 if decision.role == PREFILL else -1
            sample = sample._replace(prefill=sample.prefill + more, decode=sample.decode - more)
    return found


def test_long_prompts_get_more_prefill_replicas_and_long_answers_get_them_back() -> None:
    balancer = RoleBalancer()
    prompts = PoolSample(prefill=1, decode=7, prefill_work=60_000, decode_work=20_000)
    changes = run(balancer, prompts, 200)
    assert [role for _, role in changes] == [PREFILL] * 4, "5 of 8: three quarters of the work, less the margin"
    assert changes[0][0] == WINDOW_S and all(b - a > WINDOW_S for (a, _), (b, _) in pairwise(changes))
    answers = PoolSample(prefill=5, decode=3, prefill_work=500, decode_work=40_000)
    assert [role for _, role in run(balancer, answers, 200, since=1000.0)] == [DECODE] * 4, "one stays"


@pytest.mark.parametrize("seed", range(50))
def test_a_steady_load_settles_and_never_swings(seed: int) -> None:
    rng = Random(seed)
    count = rng.randrange(2, 40)
    prefill = rng.randrange(1, count)
    sample = PoolSample(prefill, count - prefill, rng.random() ** 2 * 200_000, rng.random() ** 2 * 200_000)
    changes = run(RoleBalancer(), sample, 50 * WINDOW_S)
    roles = [role for _, role in changes]
    assert len(set(roles)) <= 1, "in one direction only"
    assert len(roles) <= count - 2, "some of each role are left"
    assert all(when < 45 * WINDOW_S for when, _ in changes), "and then it stays"


def test_little_work_short_bursts_and_the_last_of_a_role_change_nothing() -> None:
    assert not run(RoleBalancer(), PoolSample(1, 3, MIN_WORK - 1, 0), 100)
    assert not run(RoleBalancer(), PoolSample(1, 1, 1e6, 0), 100)
    assert not run(RoleBalancer(), PoolSample(1, 3, 0, 1e6), 100)
    assert not run(RoleBalancer(), PoolSample(0, 4, 0, 1e6), 100)
    balancer = RoleBalancer()
    quiet, burst = PoolSample(1, 3, 0, 2000), PoolSample(1, 3, 15_000, 2000)
    for since in range(0, 200, 20):
        assert not run(balancer, quiet, 16, since) and not run(balancer, burst, 2, since + 17)


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of more than a page are computed elsewhere, and little work counts at once."""
    monkeypatch.setattr(PrefillCosts, "should_prefill_remotely", lambda self, need, *_: need > 4)
    monkeypatch.setattr(roles, "WINDOW_S", 0.0)
    monkeypatch.setattr(roles, "MIN_WORK", 1)
    monkeypatch.setattr(role_switching, "REQUEST_TOKENS", 1)


@pytest.mark.usefixtures("eager")
async def test_a_replica_changes_its_role_under_requests_that_all_end_well() -> None:
    async with cluster(3, prefill=1, gated=(0, 1, 2), switch_roles=True) as (client, made):
        assert client.role_switcher is not None
        readers = [Reader(client, ask(f"r{i}", [i + 1, 2, 3], seed=i)) for i in range(2)]
        for name in ("replica-1", "replica-2"):
            made[name].steps(6)
        await until(lambda: all(reader.drawn >= 2 for reader in readers))
        client.role_switcher.look(0.0)
        assert client.role_switches == 0 and [one.role for one in client._replicas] == [PREFILL, DECODE, DECODE]
        readers += [Reader(client, ask(f"long-{i}", PROMPT[::-1][i:], seed=i)) for i in range(8)]
        await until(lambda: len(client._replicas[0].internal) == 8)
        client.role_switcher.look(100.0)
        await until(lambda: sum(one.role == PREFILL for one in client._replicas) == 2)
        client.role_switcher.look(200.0)  # while requests move: nothing more
        for replica in made.values():
            replica.free()
        await gather(*readers)
        await until(lambda: client.role_switches == 1)
        assert sorted(one.role for one in client._replicas) == [DECODE, PREFILL, PREFILL]
        more = [Reader(client, ask(f"short-{i}", [i + 1, 2, 3], seed=i)) for i in range(6)]
        await gather(*more)


@pytest.mark.usefixtures("eager")
async def test_a_role_that_an_operator_gave_stays() -> None:
    async with cluster(3, prefill=1, gated=(0,), switch_roles=True) as (client, made):
        assert client.role_switcher is not None
        with pytest.raises(InputError):
            await client.set_role("replica-1", "other")
        assert not client._replicas[1].role_fixed
        for name in ("replica-1", "replica-2"):
            await client.set_role(name, "decode")
        client._replicas[0].load.sent(10_000)
        client.role_switcher.look(0.0)
        client.role_switcher.look(100.0)
        assert client.role_switcher._task is None and client.role_switches == 0
        client._replicas[0].load.ended(10_000)
        for replica in made.values():
            replica.free()


def test_the_option_needs_prefill_replicas() -> None:
    assert ServeOptions(replicas=3, prefill_replicas=1).switch_roles
    assert not ServeOptions(replicas=3, prefill_replicas=1, switch_roles=False).switch_roles
    for wrong in ({"switch_roles": False}, {"replicas": 3, "switch_roles": False}):
        with pytest.raises(ConfigError, match="switch_roles has no effect"):
            ServeOptions(**wrong)
