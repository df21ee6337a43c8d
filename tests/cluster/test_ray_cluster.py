"""Two replicas on a Ray of the server's own, by one command: killed, drained and replaced under 32 streams."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, NamedTuple

import grpc
import httpx
import psutil
import pytest
from live_server import MODEL, live_server
from stream_cases import streams

from quire.cluster.ray_host import LOCAL_ONLY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


class Cluster(NamedTuple):
    url: str
    admin: str
    process: subprocess.Popen[str]

    def replicas(self) -> list[dict[str, Any]]:
        return httpx.get(f"{self.admin}/v1/replicas").json()["data"]

    def settled(self, restarts: int) -> float:
        """Seconds until both are ready and have been replaced so often together."""
        began = time.monotonic()
        while time.monotonic() - began < 180:
            found = self.replicas()
            if all(one["state"] == "ready" for one in found) and sum(one["restarts"] for one in found) == restarts:
                return time.monotonic() - began
            time.sleep(0.1)
        raise AssertionError(found)


@pytest.fixture(scope="module")
def cluster(default_model: Any) -> Iterator[Cluster]:
    flags = ("--replicas", "2", "--port", "0", "--kv-memory", "512M", "--max-queue-wait", "600")
    with live_server(*flags) as started:
        yield Cluster(*started)


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster) -> list[dict[str, Any]]:
    return asyncio.run(streams(cluster.url, MODEL))


def disturbed(cluster: Cluster, disturb: Callable[[], Awaitable[None]]) -> list[dict[str, Any]]:
    return asyncio.run(streams(cluster.url, MODEL, disturb))


def test_kill_9_under_32_streams(cluster: Cluster, undisturbed: list[dict[str, Any]]) -> None:
    before = cluster.replicas()
    assert [(one["id"], one["role"], one["state"]) for one in before] == [
        ("replica-0", "both", "ready"),
        ("replica-1", "both", "ready"),
    ]

    async def kill() -> None:
        busy = [one for one in cluster.replicas() if one["running"]]
        assert busy
        os.kill(busy[0]["pid"], signal.SIGKILL)

    assert disturbed(cluster, kill) == undisturbed
    print(f"back after {cluster.settled(1):.1f} s more")
    assert {one["pid"] for one in cluster.replicas()} != {one["pid"] for one in before}
    metrics = httpx.get(f"{cluster.admin}/metrics").text
    assert float(re.findall(r"^quire_failovers_total (\S+)", metrics, re.M)[0]) >= 1
    assert len(re.findall(r'^quire_replica_ready\{replica="replica-\d"\} 1.0', metrics, re.M)) == 2


def test_a_rolling_restart_under_32_streams(cluster: Cluster, undisturbed: list[dict[str, Any]]) -> None:
    before = cluster.replicas()
    restarts = sum(one["restarts"] for one in before)
    actors = [psutil.Process(one["pid"]).ppid() for one in before]

    async def replace_all() -> None:
        async with httpx.AsyncClient(timeout=300) as client:
            answer = await client.post(f"{cluster.admin}/v1/replicas/restart", json={"timeout": 0.5})
            assert answer.status_code == 200, answer.text

    assert disturbed(cluster, replace_all) == undisturbed
    cluster.settled(restarts + 2)
    after = cluster.replicas()
    assert not {one["pid"] for one in before} & {one["pid"] for one in after}
    assert [psutil.Process(one["pid"]).ppid() for one in after] == actors, "for Ray nothing happened"


def test_a_drained_replica_under_32_streams(cluster: Cluster, undisturbed: list[dict[str, Any]]) -> None:
    async def drain() -> None:
        async with httpx.AsyncClient(timeout=300) as client:
            answer = await client.post(f"{cluster.admin}/v1/replicas/replica-1/drain", json={"timeout": 0})
            assert answer.json()["state"] == "drained", answer.text
            refused = await client.post(f"{cluster.admin}/v1/replicas/replica-0/drain")
            assert refused.status_code == 400

    assert disturbed(cluster, drain) == undisturbed
    assert httpx.post(f"{cluster.admin}/v1/replicas/replica-1/activate").json()["state"] == "ready"


def test_ray_asks_for_its_token(cluster: Cluster) -> None:
    """Whoever else is on this machine cannot use the server's Ray."""
    gcs = next(one for one in psutil.Process(cluster.process.pid).children() if "gcs_server" in one.cmdline()[0])
    port = next(c.laddr.port for c in gcs.net_connections("tcp") if c.status == psutil.CONN_LISTEN)
    code = f"import ray; ray.init(address='127.0.0.1:{port}', logging_level='error')"
    stranger = os.environ | LOCAL_ONLY | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}
    assert subprocess.run([sys.executable, "-c", code], env=stranger, capture_output=True, timeout=120).returncode != 0


def test_what_others_reach_asks_for_the_token_too(cluster: Cluster) -> None:
    """All listen on loopback but one port of each actor, which Ray Serve binds to all interfaces."""
    server = psutil.Process(cluster.process.pid)
    found = [
        (one.name(), link.laddr)
        for one in (server, *server.children(recursive=True))
        for link in one.net_connections("tcp")
        if link.status == psutil.CONN_LISTEN
    ]
    assert any("gcs_server" in name for name, _ in found)
    reached = [(name, at.port) for name, at in found if at.ip.removeprefix("::ffff:") != "127.0.0.1"]
    assert [name[:17] for name, _ in reached] == ["ray::ServeReplica"] * 2, reached
    for _, port in reached:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel, pytest.raises(grpc.RpcError) as refused:
            channel.unary_unary("/ray.serve.ASGIService/HandleRequest")(b"", timeout=30)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED  # type: ignore[attr-defined]
