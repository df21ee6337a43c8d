"""What replicas tell their router of their caches, over the real link, and what the router makes of it."""

from __future__ import annotations

import pytest
from fake_replicas import FakeReplica, ask
from test_failover import Reader, cluster, until

from quire.cluster import request_router
from quire.cluster.cluster_client import ClusterClient
from quire.memory.cache_events import CacheEventRecorder
from quire.types.cache_control import CacheOrder
from quire.types.hashing import Root

SYSTEM = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26]  # four pages, two blocks


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_router, "BLOCK_TOKENS", 8)


def directory(client: ClusterClient):
    found = client._router._directory
    assert found is not None
    found.check()
    return found


def held(replica: FakeReplica) -> set[bytes]:
    """Names at every second place of a chain, of what the engine really has."""
    index = replica.core.scheduler.memory.index
    parents = {name: parent for name, parent, _ in index.entries(0)}

    def place(name: bytes) -> int:
        return 1 + (0 if isinstance(parents[name], Root) else place(parents[name]))

    return {name for name in parents if place(name) % 2 == 0}


def test_changes_are_told_once_and_the_last_counts() -> None:
    recorder = CacheEventRecorder(2)
    for name, parent in ((b"a", Root()), (b"b", b"a"), (b"c", b"b"), (b"d", b"c"), (b"lost", b"never")):
        recorder.published(name, parent, b"")
    recorder.removed(b"d")
    assert recorder.take() == ([b"b"], [b"d"], False) and recorder.take() is None
    recorder.removed(b"c")
    recorder.published(b"d2", b"c", b"")  # behind a page that is gone: its place is not known
    assert recorder.take() is None
    recorder.cleared()
    recorder.published(b"a", b"", b"")
    assert recorder.take() == ([], [], True)


async def test_the_directory_is_what_replicas_hold() -> None:
    async with cluster(2, "cache-aware") as (client, made):
        for number in range(6):
            await Reader(client, ask(f"r{number}", [*SYSTEM, 30 + number, number], seed=number)).task
        known = directory(client)
        numbers = {client._by_identity[replica.identity].number: replica for replica in made}

        def same() -> bool:
            return all(set(known._held[n]) == held(replica) for n, replica in numbers.items())

        await until(same)
        assert len(known) > 8  # what was drawn is known too, which no decision could tell
        await client.cache(CacheOrder(action="drop"))
        await until(lambda: not len(known))
        assert same()


async def test_requests_follow_their_prefix_and_a_lost_replica_is_forgotten() -> None:
    async with cluster(3, "cache-aware") as (client, made):
        for number in range(8):
            reader = Reader(client, ask(f"r{number}", [*SYSTEM, number]))
            await reader.task
            assert reader.counts is not None and reader.counts.cached == (16 if number else 0)
        (home,) = (one for one in client._replicas if directory(client).holds(one.number))
        next(one for one in made if one.identity == home.identity).kill()
        await until(lambda: len(client._by_identity) == 2)
        assert directory(client).holds(home.number) == 0
        again = await Reader(client, ask("again", [*SYSTEM, 9])).task
        assert again.counts is not None and again.counts.cached == 0


async def test_pages_that_leave_leave_the_directory() -> None:
    async with cluster(1, "prefix") as (client, made):
        for number in range(60):  # more than the pool holds
            await Reader(client, ask(f"r{number}", [number + 1] * 40, max_tokens=2)).task
        known = directory(client)
        await until(lambda: set(known._held[0]) == held(made[0]))
        assert made[0].core.stats().pages_cached < 60 * 10


async def test_who_holds_little_of_what_is_known_of_it_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_router, "TRIAL_TOKENS", 60)
    async with cluster(1, "cache-aware") as (client, _):
        router, known = client._router, directory(client)
        names = router._blocks(ask("r", SYSTEM))
        assert len(names) == 2
        known.add(0, names)
        for _ in range(3):
            router.found(0, 16, 16)
        router.found(0, 16, 0)
        assert known.holds(0) == 2  # three of four were there
        for number in range(4):  # it was expected to hold them, and did not
            router.found(0, 16, number)
        assert known.holds(0) == 0


async def test_without_a_prefix_cache_there_is_nothing_to_know() -> None:
    async with cluster(1, "cache-aware", prefix_cache=False) as (client, _):
        await Reader(client, ask("r", SYSTEM)).task
        assert not len(directory(client))
