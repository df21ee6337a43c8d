"""Ray's control process is lost: it is told once, replicas answer what they have, and another Ray takes its place."""

from __future__ import annotations

import asyncio
import gc
import logging
import queue
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest
from fake_replicas import FakeReplica, ask
from test_failover import Host, Reader, until

from quire.cluster import gcs_watch, open_cluster
from quire.cluster.cluster_client import ClusterClient
from quire.cluster.gcs_watch import GcsWatch
from quire.cluster.open_cluster import PooledClusters
from quire.cluster.ray_host import RayHost
from quire.cluster.routers import make_router
from quire.engine.client import RestartPolicy
from quire.types.config import EngineOptions
from quire.types.errors import EngineDeadError
from quire.types.models_file import ServedModel
from quire.types.replica_options import ReplicaOptions
from quire.types.serving import ServeOptions


@pytest.fixture(autouse=True)
def short_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gcs_watch, "INTERVAL_S", 0.01)


def listening(port: int = 0) -> socket.socket:
    return socket.create_server(("127.0.0.1", port))


def logged(caplog: pytest.LogCaptureFixture, words: str) -> None:
    began = time.monotonic()
    while words not in caplog.text:
        assert time.monotonic() - began < 20, caplog.text
        time.sleep(0.01)


def test_it_is_told_once_when_nobody_answers_for_long(caplog: pytest.LogCaptureFixture) -> None:
    server, told = listening(), queue.SimpleQueue[str]()
    watch = GcsWatch(f"127.0.0.1:{server.getsockname()[1]}", 0.05, told.put)
    server.accept()[0].close()
    server.accept()[0].close()
    assert told.empty() and not caplog.messages
    server.close()
    assert "Ray's control process (gcs_server) was lost: " in told.get(timeout=20)
    watch._thread.join(20)
    assert told.empty() and "requests go on, lost replicas are not replaced" in caplog.text


def test_one_that_comes_back_was_not_lost(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    server, told = listening(), queue.SimpleQueue[str]()
    port = server.getsockname()[1]
    watch = GcsWatch(f"127.0.0.1:{port}", 60.0, told.put)
    server.close()
    logged(caplog, "cannot be reached")
    with listening(port):
        logged(caplog, "is there again")
    watch.close()
    watch._thread.join(20)
    assert told.empty()


async def test_replicas_answer_what_they_have() -> None:
    """A server drains when its client is lost, unless there is trouble with its engines too."""
    client = ClusterClient(1, make_router("round-robin", 1), RestartPolicy())
    replica = FakeReplica(client, gated=True)
    try:
        await client.ready(Host())
        reader = Reader(client, ask("r", [1, 2]))
        replica.steps(4)
        await until(lambda: reader.drawn > 2, stepping=[replica])
        await asyncio.to_thread(client.lose, "Ray is gone")
        await asyncio.to_thread(client.lose, "and again")
        assert str(await asyncio.wait_for(client.lost(), 20)) == "Ray is gone"
        assert client.trouble() is None
        replica.free()
        (await asyncio.wait_for(reader.task, 20)).check()
    finally:
        replica.free()
        await client.close()


async def test_a_start_without_ray_is_given_up() -> None:
    unheard: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: unheard.append(context))
    client = ClusterClient(2, make_router("round-robin", 2), RestartPolicy())
    try:
        starting = asyncio.create_task(client.ready(Host()))
        client.lose("Ray is gone")
        with pytest.raises(EngineDeadError, match="Ray is gone"):
            await asyncio.wait_for(starting, 20)
    finally:
        await client.close()
    del starting, client  # which hold the error, and that all it was raised through
    gc.collect()
    assert not unheard, "the one error is the last word"


class MortalSession:
    """In place of Ray's; closed when nobody uses it any more."""

    made: list[MortalSession]

    def __init__(self, address: str | None) -> None:
        assert all(one.closed for one in self.made), "there is one at a time"
        self.local, self.node_address, self.ray = True, "127.0.0.1", None
        self.lost, self.closed, self.hosts = "", False, 0
        self.when_lost: Callable[..., None] = lambda told: None
        self.made.append(self)

    def join(self) -> None:
        self.hosts += 1

    def leave(self) -> None:
        self.hosts -= 1

    def close(self) -> None:
        assert not self.hosts
        self.closed = True


async def test_a_model_that_is_loaded_again_has_another_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    MortalSession.made, hosts = [], []

    async def opened(engine: Any, replicas: Any, policy: Any, host: RayHost) -> None:
        hosts.append(host)

    monkeypatch.setattr(open_cluster, "RaySession", MortalSession)
    monkeypatch.setattr(open_cluster, "_opened", opened)
    monkeypatch.setattr(RayHost, "_delete_all", lambda host: pytest.fail("nobody would answer"))
    models = [ServedModel(name, EngineOptions(), replicas=ReplicaOptions(replicas=1)) for name in "ab"]
    clusters = PooledClusters(models, ServeOptions(models="f.yaml"), RestartPolicy())
    await asyncio.gather(*map(clusters.open, models))
    [first] = MortalSession.made
    first.lost = "it is gone"
    hosts[0]._calls = 1  # under way, and would wait for an answer
    for host in hosts:
        await asyncio.wait_for(asyncio.to_thread(host.stop), 20)
    await asyncio.gather(*map(clusters.open, models))
    assert first.closed and len(MortalSession.made) == 2 and not MortalSession.made[1].closed
