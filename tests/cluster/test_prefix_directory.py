"""Which replicas hold which prefixes, against a plain model of it; and what the least-cost router makes of that."""

from __future__ import annotations

from collections import Counter, OrderedDict
from random import Random

import pytest

from quire.cluster.prefix_directory import MAX_TOLD_RUN, PrefixDirectory
from quire.cluster.prefix_routers import PREFILL_WEIGHT, members
from quire.cluster.router_policy import ReplicaLoad, RouteView
from quire.cluster.routers import make_router


def chain(name: str, count: int) -> list[str]:
    return [f"{name}{i}" for i in range(count)]


@pytest.mark.parametrize("seed", range(20))
def test_the_longest_match_is_exact_and_no_match_is_invented(seed: int) -> None:
    rng = Random(seed)
    directory, held = PrefixDirectory(5, capacity=10_000), [dict.fromkeys(()) for _ in range(5)]
    prompts = [chain(rng.choice("ab"), rng.randrange(1, 40)) + chain(f"own{i}", rng.randrange(20)) for i in range(60)]
    for prompt in prompts:
        replica, upto = rng.randrange(5), rng.randrange(len(prompt) + 1)
        directory.add(replica, prompt[:upto])
        held[replica] |= dict.fromkeys(prompt[:upto])
        if rng.random() < 0.2:
            gone = rng.randrange(5)
            directory.forget(gone)
            held[gone] = {}
        directory.check()
        asked = rng.choice(prompts)
        have = [next((i for i, block in enumerate(asked) if block not in mine), len(asked)) for mine in held]
        found = directory.match(asked)
        assert (found[0].blocks if found else 0) == max(have)
        for blocks, replicas in found:
            assert all(have[replica] >= blocks for replica in members(replicas))


def test_what_a_replica_holds_is_bounded_and_the_latest_stays() -> None:
    directory = PrefixDirectory(2, capacity=8)
    directory.use(0, chain("a", 6))
    directory.use(1, chain("a", 6))
    directory.use(0, chain("b", 6))
    assert directory.holds(0) == 8 and directory.match(chain("a", 3)) == [(3, 0b10), (2, 0b01)]
    assert directory.match(chain("b", 6)) == [(6, 0b01)]
    directory.resize(1, 2)
    directory.add(1, ["c"])
    assert directory.holds(1) == 2
    directory.remove(0, ["b5", "never"])
    assert directory.match(chain("b", 6)) == [(5, 0b01)]
    directory.check()


@pytest.mark.parametrize("seed", range(20))
def test_what_was_used_longest_ago_leaves_first_and_ends_before_beginnings(seed: int) -> None:
    """The same blocks are held as if each were renewed by itself."""
    rng = Random(seed)
    capacity = rng.choice([6, 20, 50])
    directory, oldest_first = PrefixDirectory(2, capacity), OrderedDict[str, None]()
    tree = [""]
    for number in range(40):  # prompts that go on from anywhere in others
        tree.append(rng.choice(tree) + chr(97 + number % 26) * rng.randrange(1, 12))
    for _ in range(300):
        text = rng.choice(tree)
        prompt = [text[: i + 1] for i in range(len(text))]
        match rng.random():
            case chance if chance < 0.85:
                directory.use(1, prompt)
                for block in reversed(prompt):
                    oldest_first[block] = None
                    oldest_first.move_to_end(block)
                while len(oldest_first) > capacity:
                    oldest_first.popitem(last=False)
            case chance if chance < 0.99:  # a replica evicts ends first as well
                block = rng.choice(list(oldest_first) or [""])
                gone = [other for other in oldest_first if other.startswith(block)]
                directory.remove(1, gone)
                for other in gone:
                    del oldest_first[other]
            case _:
                directory.forget(1)
                oldest_first.clear()
        directory.check()
        assert directory.holds(1) == len(oldest_first)
        have = next((i for i, block in enumerate(prompt) if block not in oldest_first), len(prompt))
        assert directory.match(prompt) == ([(have, 0b10)] if have else [])


def test_what_a_replica_tells_of_several_prompts_at_once_is_renewed_by_each() -> None:
    directory = PrefixDirectory(1, capacity=9)
    directory.add(0, ["a0", "a1", "b1", "b2", "a2", "a3"])
    directory.use(0, ["b0", "b1", "b2"])
    directory.check()
    assert directory.holds(0) == 7 and directory.match(["b0", "b1", "b2"]) == [(3, 1)]
    directory.use(0, chain("c", 5))
    directory.check()
    assert directory.match(["b0", "b1", "b2"]) == [(2, 1)] and directory.match(chain("a", 4)) == [(2, 1)]


def test_a_block_leaves_alone_and_comes_back_in_its_place() -> None:
    """What a replica told of together need not be of one prompt."""
    directory = PrefixDirectory(1, capacity=6)
    directory.add(0, chain("a", 6))
    directory.remove(0, ["a2"])
    directory.check()
    assert directory.holds(0) == 5 and directory.match(chain("a", 2)) == [(2, 1)]
    directory.use(0, chain("a", 6))
    directory.check()
    assert directory.match(chain("a", 6)) == [(6, 1)]
    directory.use(0, ["b0"])
    directory.check()
    assert directory.match(chain("a", 6)) == [(5, 1)], "the end leaves first"


def test_names_that_come_twice_count_once() -> None:
    directory = PrefixDirectory(1, capacity=3)
    directory.use(0, ["a", "b", "a", "b"])
    directory.add(0, ["c", "c"])
    directory.check()
    assert directory.holds(0) == 3
    far_apart = [*chain("far", MAX_TOLD_RUN + 1), "far0"]
    directory.resize(0, len(far_apart))
    directory.add(0, far_apart)
    directory.check()
    directory.resize(0, 3)
    directory.use(0, ["d", "d", "e", "f", "g", "d"])
    directory.check()
    assert directory.holds(0) == 3


@pytest.mark.parametrize("router", ["cache-aware", "prefix"])
def test_a_prefix_that_is_used_stays_known_from_its_first_block_on(router: str) -> None:
    """Its blocks leave the replica's cache when nobody used them for long, the last of them first."""
    policy = make_router(router, 1, capacity=20)
    loads = [ReplicaLoad()]
    for number in range(20):
        policy.choose(RouteView(16 * 64, [*chain("system", 10), *chain(f"own{number}.", 6)]), loads)
        assert policy.saved == (10 * 64 if number else 0)
        policy.directory.check()
    policy.choose(RouteView(7 * 64, [*chain("system", 5), *chain("branch", 2)]), loads)
    assert policy.saved == 5 * 64


def test_a_prefix_is_chased_as_far_as_it_saves_more_than_waiting_takes() -> None:
    router = make_router("cache-aware", 3)
    loads = [ReplicaLoad() for _ in range(3)]
    for number in range(50):  # others: the prefix is not hot
        router.choose(RouteView(64, [f"other{number}"]), loads)
    prompt = RouteView(20 * 64, chain("s", 20))
    first = router.choose(prompt, loads)
    assert router.saved == 0
    assert router.choose(prompt, loads) == first and router.saved == prompt.tokens
    loads[first] = ReplicaLoad(tokens=PREFILL_WEIGHT * prompt.tokens - 1)
    assert router.choose(prompt, loads) == first
    loads[first] = ReplicaLoad(tokens=PREFILL_WEIGHT * prompt.tokens + 1)
    second = router.choose(prompt, loads)
    assert second != first
    assert router.choose(prompt, [ReplicaLoad(9) if i == first else ReplicaLoad() for i in range(3)]) == second
    for load in loads:
        load.accepts_requests = False
    loads[3 - first - second].accepts_requests = True
    assert router.choose(prompt, loads) == 3 - first - second


def test_a_hot_prefix_spreads_and_loads_stay_even() -> None:
    router = make_router("cache-aware", 8)
    loads = [ReplicaLoad() for _ in range(8)]
    counts: Counter[int] = Counter()
    for number in range(8 * 64):
        request = RouteView(40 * 64, chain("hot", 32) + chain(f"own{number}", 8))
        chosen = router.choose(request, loads)
        counts[chosen] += 1
        loads[chosen].sent(request.tokens - router.saved)
        loads[chosen].prefilled(request.tokens - router.saved)
    assert len(counts) == 8 and max(counts.values()) / 64 < 1.3


def test_sessions_stay_where_they_are_and_few_move_when_a_replica_goes() -> None:
    router, loads = make_router("session", 8, seed=3), [ReplicaLoad() for _ in range(8)]
    views = [RouteView(10, session=f"s{i}") for i in range(800)]
    before = [router.choose(view, loads) for view in views]
    assert before == [router.choose(view, loads) for view in views] and len(set(before)) == 8
    loads[2].accepts_requests = False
    after = [router.choose(view, loads) for view in views]
    assert all(old == new for old, new in zip(before, after, strict=True) if old != 2) and 2 not in after
    assert router.choose(RouteView(10, tenant="t"), loads) == router.choose(RouteView(10, tenant="t"), loads)
