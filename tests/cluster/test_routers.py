"""Router policies: which replica a request goes to."""

from collections import Counter

import pytest

from quire.cluster.router_policy import ReplicaLoad, RouteView
from quire.cluster.routers import ROUTERS, make_router
from quire.types.errors import ConfigError


def route(router, requests, loads):
    chosen = []
    for request in requests:
        chosen.append(router.choose(request, loads))
        loads[chosen[-1]].sent(request.tokens - router.saved)
    return chosen


@pytest.mark.parametrize("name", ROUTERS)
def test_every_router_spreads_unrelated_requests(name):
    loads = [ReplicaLoad() for _ in range(4)]
    counts = Counter(route(make_router(name, 4, seed=1), [RouteView(100, (i,)) for i in range(400)], loads))
    assert len(counts) == 4 and max(counts.values()) < 130


@pytest.mark.parametrize("name", ROUTERS)
def test_a_single_replica_gets_everything(name):
    assert make_router(name, 1).choose(RouteView(5), [ReplicaLoad()]) == 0


def test_least_load_counts_tokens_and_requests():
    assert make_router("least-load", 2).choose(RouteView(1), [ReplicaLoad(1, 5000), ReplicaLoad(3, 40)]) == 1


def test_a_prefix_goes_where_it_was_computed_unless_that_is_overloaded():
    router = make_router("prefix", 4, seed=2)
    loads = [ReplicaLoad() for _ in range(4)]
    first = router.choose(RouteView(1000, ("s", "a")), loads)
    assert all(router.choose(RouteView(1500, ("s", "a", i)), loads) == first for i in range(20))
    loads[first].requests = 50
    assert router.choose(RouteView(1500, ("s", "a", "late")), loads) != first


def test_routers_that_are_not_there():
    with pytest.raises(ConfigError, match="round-robin"):
        make_router("random", 2)


@pytest.mark.parametrize("name", ROUTERS)
def test_only_what_is_ready_gets_requests(name):
    loads = [ReplicaLoad(accepts_requests=i == 2) for i in range(5)]
    requests = [RouteView(100, ("s", i), session=str(i % 7)) for i in range(40)]
    assert set(route(make_router(name, 5, seed=4), requests, loads)) == {2}
