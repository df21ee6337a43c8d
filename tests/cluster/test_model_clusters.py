"""Several models in one server, of which some have replicas: what the file says, and what operators see and do."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fake_replicas import FakeReplica

from quire.cluster import open_cluster
from quire.cluster.cluster_client import ClusterClient
from quire.cluster.open_cluster import PooledClusters
from quire.cluster.ray_host import RayHost
from quire.cluster.routers import make_router
from quire.engine.client import RestartPolicy
from quire.engine.open_pool import expected_bytes, open_model_pool
from quire.serve.http.server import ServerUrl, background_server
from quire.types.config import EngineOptions
from quire.types.errors import ConfigError
from quire.types.logs import TextLines, model_of_task
from quire.types.membership import CurveKeys, ReplicaMembership
from quire.types.models_file import ServedModel, read_models_file
from quire.types.replica_options import ReplicaOptions
from quire.types.serving import ServeOptions

MODEL = "smollm2-135m"


def read(tmp_path: Path, entries: str, ray_address: str | None = None) -> list[ServedModel]:
    file = tmp_path / "models.yaml"
    file.write_text(f"models:\n{entries}")
    return read_models_file(str(file), EngineOptions(), 60.0, ray_address)


def test_an_entry_may_have_replicas(tmp_path: Path) -> None:
    entries = """
  - {name: chat, model: m, replicas: 3, prefill_replicas: 1, router: slo-aware, threads: 2}
  - {name: embed, model: m, pinned: true}
  - {name: scaled, model: m, replicas: 1, min_replicas: 0, max_replicas: 4, downscale_delay: 20, replica_cpus: 2}
"""
    chat, embed, scaled = read(tmp_path, entries, "there:6379")
    assert chat.replicas == ReplicaOptions(replicas=3, prefill_replicas=1, router="slo-aware", ray_address="there:6379")
    assert chat.engine.device.threads == 2 and embed.replicas is None
    assert scaled.replicas is not None and scaled.replicas.most_replicas == 4 and scaled.replicas.autoscales


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ("router: least-load", "model 1: router has no effect without replicas"),
        ("replicas: 1, router: least-load", "router has no effect with one replica"),
        ("replicas: 0", "replicas must be from 1 to 1024"),
        ("replicas: two", "replicas must be a whole number"),
        ("replicas: 2, router: nearest", "router must be one of"),
        ("replicas: 2, prefill_replicas: 2", "some must answer"),
        ("replicas: 2, replica_cpus: 2", "replica_cpus has no effect without ray_address"),
        ("replicas: 2, ray_address: auto", "ray_address"),
        ("replicsa: 2", "replicas"),
    ],
)
def test_what_an_entry_cannot_say_of_replicas(tmp_path: Path, said: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        read(tmp_path, f"  - {{model: m, {said}}}\n")


def test_what_a_server_cannot_say_beside_models() -> None:
    with pytest.raises(ConfigError, match="replicas is one model's: say it in the file of models"):
        ServeOptions(models="f.yaml", replicas=2)
    with pytest.raises(ConfigError, match="router has no effect without replicas"):
        ServeOptions(models="f.yaml", router="least-load")
    assert ServeOptions(models="f.yaml", ray_address="auto").ray_address == "auto"


async def test_options_without_effect_are_refused_before_anything_is_loaded() -> None:
    plain, cluster = (
        ServedModel("a", EngineOptions()),
        ServedModel("b", EngineOptions(), replicas=ReplicaOptions(replicas=2)),
    )
    with pytest.raises(ConfigError, match=r"ray_address has no effect: no model of f\.yaml has replicas"):
        await open_model_pool([plain], ServeOptions(models="f.yaml", ray_address="auto"))
    with pytest.raises(ConfigError, match="hold_weights has no effect: all models have replicas"):
        await open_model_pool([cluster], ServeOptions(models="f.yaml", hold_weights="1G"))
    disk = ServedModel("d", EngineOptions.of(kv_disk="/x"), replicas=ReplicaOptions(replicas=2))
    with pytest.raises(ConfigError, match="model d: kv_disk is one engine's"):
        PooledClusters([plain, disk], ServeOptions(models="f.yaml"), RestartPolicy())


class FakeSession:
    """In place of Ray's."""

    opened = 0

    def __init__(self, address: str | None) -> None:
        type(self).opened += 1
        self.address, self.local, self.node_address, self.ray = address, True, "127.0.0.1", None
        self.hosts, self.lost = 0, ""

    def when_lost(self, told: Any) -> None:
        pass

    def join(self) -> None:
        self.hosts += 1

    def leave(self) -> None:
        self.hosts -= 1

    def close(self) -> None:
        assert not self.hosts


async def test_models_share_one_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts: list[RayHost] = []

    async def opened(engine: Any, replicas: ReplicaOptions, policy: Any, host: RayHost) -> str:
        hosts.append(host)
        return f"{replicas.replicas} of {engine.model.model}"

    monkeypatch.setattr(open_cluster, "RaySession", FakeSession)
    monkeypatch.setattr(open_cluster, "_opened", opened)
    names = ("a/b", "a-b")
    models = [
        ServedModel(name, EngineOptions(), replicas=ReplicaOptions(replicas=n + 2)) for n, name in enumerate(names)
    ]
    clusters = PooledClusters(models, ServeOptions(models="f.yaml", port=1234), RestartPolicy())
    clusters.close()
    before = FakeSession.opened
    assert await asyncio.gather(*map(clusters.open, models)) == [f"2 of {MODEL}", f"3 of {MODEL}"]
    assert FakeSession.opened == before + 1
    found = {host._application(0) for host in hosts}
    assert len(found) == 2, "names that Ray would not tell apart are"
    assert all("-1234-a-b-" in name for name in found), "and lines of the log say whose they are"
    monkeypatch.setattr(RayHost, "_delete_all", lambda self: None)
    for host in hosts:
        host.stop()
        host.stop()
    clusters.close()


async def test_a_cluster_is_no_part_of_the_request_that_asked_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it does and logs later is nobody's request, and names the model; nor is that request kept for it."""
    said = []

    async def opened(*told: Any) -> None:
        said.append((request.get(""), TextLines("api").format(logging.makeLogRecord({"msg": "replica-0 is ready"}))))

    monkeypatch.setattr(open_cluster, "RaySession", FakeSession)
    monkeypatch.setattr(open_cluster, "_opened", opened)
    model = ServedModel("org/b", EngineOptions(), replicas=ReplicaOptions(replicas=2))
    request: ContextVar[str] = ContextVar("request")
    request.set("the first")
    await PooledClusters([model], ServeOptions(models="f.yaml"), RestartPolicy()).open(model)
    [(of, line)] = said
    assert of == "" and line.endswith(" replica-0 is ready model=org/b")


async def test_what_replicas_say_is_logged_in_the_context_of_their_cluster() -> None:
    model_of_task.set("org/b")
    client = ClusterClient(1, make_router("round-robin", 1), RestartPolicy())
    told: list[str] = []
    client._received = lambda news: told.append(model_of_task.get())  # type: ignore[method-assign]
    model_of_task.set("")
    try:
        client._on_loop([])
        await asyncio.sleep(0)
        assert told == ["org/b"]
    finally:
        await client.close()


def test_the_memory_of_a_model_is_that_of_all_replicas_it_may_have(default_model: object) -> None:
    one, four = (
        ServedModel("m", EngineOptions.of(kv_memory="64M"), replicas=ReplicaOptions(replicas=1, max_replicas=most))
        for most in (1, 4)
    )
    assert expected_bytes(four) == 4 * expected_bytes(one) > 4 * 64 << 20


def test_the_memory_of_a_model_is_that_of_all_its_ranks(default_model: object) -> None:
    """Each has as many KV pages; context-parallel ones all weights, too."""
    plain, one, tensor, context = (
        expected_bytes(ServedModel("m", EngineOptions.of(**options)))
        for options in (
            {},
            {"kv_memory": "64M"},
            *({"kv_memory": "64M", how: 2} for how in ("tensor_parallel", "context_parallel")),
        )
    )
    assert tensor - one == one - plain == 64 << 20 and context == 2 * one


@pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")
async def test_a_start_that_is_given_up_leaves_nothing_deployed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread goes on while others end what is there."""
    pytest.importorskip("ray")
    going_on, may_deploy = threading.Event(), threading.Event()
    deployed: list[str] = []
    host = RayHost(FakeSession(None), "n", shared=True)  # type: ignore[arg-type]

    def deploy(replicas: int) -> None:
        going_on.set()
        assert may_deploy.wait(20)
        deployed.append("replica")

    monkeypatch.setattr(host, "_deploy", deploy)
    monkeypatch.setattr(host, "_delete_all", deployed.clear)
    monkeypatch.setattr(host, "_ray", SimpleNamespace(cluster_resources=lambda: {"CPU": 2.0}))
    member = ReplicaMembership("", CurveKeys("", "", ""), "", 64)
    start = asyncio.create_task(
        asyncio.to_thread(host.start, 1, 1, "", member, EngineOptions(), cpus=1.0, gpus=0.0, hang_timeout=0.0)
    )
    await asyncio.to_thread(going_on.wait, 20)
    stop = asyncio.create_task(asyncio.to_thread(host.stop))
    while not host._stopped:
        await asyncio.sleep(0)
    may_deploy.set()
    await asyncio.gather(start, stop)
    assert not deployed
    host.start(1, 1, "", member, EngineOptions(), cpus=1.0, gpus=0.0, hang_timeout=0.0)
    assert not deployed, "nor is anything afterwards"


class Host:
    def stop(self) -> None:
        pass


class Clusters:
    """Opens clusters of fakes, and keeps them."""

    def __init__(self) -> None:
        self.made: dict[str, list[FakeReplica]] = {}
        self.closed = 0

    async def open(self, model: ServedModel) -> ClusterClient:
        assert model.replicas is not None and model.replicas.replicas is not None
        count = model.replicas.replicas
        client = ClusterClient(count, make_router(model.replicas.router, count), RestartPolicy(max_restarts=20))
        self.made[model.name] = [FakeReplica(client, number=number) for number in range(count)]
        await client.ready(Host())  # type: ignore[arg-type]
        return client

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def clusters() -> Clusters:
    return Clusters()


@pytest.fixture
def url(clusters: Clusters, default_model: object) -> Iterator[ServerUrl]:
    two = ReplicaOptions(replicas=2)
    models = [ServedModel("chat", EngineOptions(), replicas=two), ServedModel("org/b", EngineOptions(), replicas=two)]
    serving = ServeOptions(models="f.yaml", port=0, grace=1, max_loaded_models=2)

    async def start() -> Any:
        return await open_model_pool(models, serving, RestartPolicy(), clusters)

    with background_server(start, serving) as found:
        yield found
    assert clusters.closed == 1
    assert all(one.ended.wait(10) for made in clusters.made.values() for one in made)


def complete(url: str, model: str) -> str:
    body = {"model": model, "prompt": [5, 6, 7], "max_tokens": 8, "seed": 1, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def listed(url: ServerUrl) -> list[tuple[str, str, str]]:
    found = httpx.get(f"{url.admin}/v1/replicas").json()["data"]
    return [(one["id"], one["model"], one["state"]) for one in found]


def test_models_with_replicas_are_loaded_listed_and_unloaded(url: ServerUrl, clusters: Clusters) -> None:
    chat = [("chat:replica-0", "chat", "ready"), ("chat:replica-1", "chat", "ready")]
    assert listed(url) == chat, "the default is loaded at start"
    said = complete(url, "org/b")
    assert said == complete(url, "org/b")
    both = [*chat, ("org/b:replica-0", "org/b", "ready"), ("org/b:replica-1", "org/b", "ready")]
    assert listed(url) == both
    metrics = httpx.get(f"{url.admin}/metrics").text
    assert 'quire_replica_ready{model_name="org/b",replica="org/b:replica-1"} 1.0' in metrics
    assert 'quire_failovers_total{model_name="chat"} 0.0' in metrics
    assert 'quire_requests_pending{model_name="org/b"} 0.0' in metrics
    assert httpx.post(f"{url.admin}/models/unload", json={"model": "org/b"}).status_code == 200
    assert all(one.ended.wait(10) for one in clusters.made["org/b"])
    assert listed(url) == chat
    assert complete(url, "org/b") == said, "and loaded again"


def test_replicas_of_a_model_are_drained_and_lost(url: ServerUrl, clusters: Clusters) -> None:
    complete(url, "org/b")
    drained = httpx.post(f"{url.admin}/v1/replicas/org/b:replica-1/drain").json()
    assert (drained["id"], drained["model"], drained["state"]) == ("org/b:replica-1", "org/b", "drained")
    assert ("chat:replica-1", "chat", "ready") in listed(url)
    again = httpx.post(f"{url.admin}/v1/replicas/org/b:replica-1/activate").json()
    assert (again["id"], again["state"]) == ("org/b:replica-1", "ready")
    clusters.made["org/b"][0].kill()
    assert complete(url, "org/b") == complete(url, "org/b"), "the other answers"
    for id in ("replica-0", "nobody:replica-0", "org/b:replica-7"):
        missing = httpx.post(f"{url.admin}/v1/replicas/{id}/drain")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "replica_not_found")
