"""From options to clusters that serve: Ray, the hub, replicas, their client; of one model, or of several."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Sequence
from contextvars import Context
from hashlib import blake2b
from pathlib import Path

from quire.cluster.autoscaler import Autoscaler
from quire.cluster.cluster_client import ClusterClient
from quire.cluster.ray_host import RayHost, RaySession
from quire.cluster.routers import make_router
from quire.engine.client import RestartPolicy
from quire.types.config import EngineOptions
from quire.types.errors import ConfigError
from quire.types.logs import model_of_task
from quire.types.memory_use import usable_cores
from quire.types.models_file import ServedModel
from quire.types.replica_options import ReplicaOptions
from quire.types.serving import ServeOptions

MAX_NAME = 40  # characters of a model's name that those of its replicas begin with
_RANK = "a rank has a part of every KV page, and pages are handed over whole"
_TIER = "KV pages that such a tier names are not handed over"
_RANKS = dict.fromkeys(("tensor_parallel", "pipeline_parallel", "context_parallel"), _RANK)
NO_HANDOVERS = {**_RANKS, "kv_disk": _TIER, "kv_remote": _TIER}


async def open_cluster(engine: EngineOptions, serving: ServeOptions, policy: RestartPolicy) -> ClusterClient:
    """A client of `serving.replicas` engines; returns when all of them are ready. Later there may be more or fewer."""
    replica_options(engine, serving)
    session = await asyncio.to_thread(RaySession, serving.ray_address)
    return await _opened(engine, serving, policy, RayHost(session, _server_name(serving)))


class PooledClusters:
    """Clusters of a server's models that have replicas: their engines share one Ray, and nothing else."""

    def __init__(self, models: Sequence[ServedModel], serving: ServeOptions, policy: RestartPolicy):
        """Refuses what could not be opened later."""
        self._server = _server_name(serving)
        self._address = serving.ray_address
        self._policy = policy
        self._session: asyncio.Task[RaySession] | None = None
        for model in models:
            if model.replicas is not None:
                try:
                    replica_options(model.engine, model.replicas)
                except ConfigError as error:
                    raise ConfigError(f"model {model.name}: {error}") from None

    async def open(self, model: ServedModel) -> ClusterClient:
        assert model.replicas is not None
        lost = self._lost_session()
        if self._session is None or lost is not None:
            self._session = asyncio.create_task(self._connected(lost))
        try:
            session = await asyncio.shield(self._session)
        except Exception:
            self._session = None  # who asks next tries again
            raise
        differs = blake2b(model.name.encode(), digest_size=6).hexdigest()  # as names do, in more than Ray's may
        host = RayHost(session, f"{self._server}-{model.name[:MAX_NAME]}-{differs}", shared=True)
        own = Context()  # not that of the request that asked for it first
        own.run(model_of_task.set, model.name)
        opening = _opened(model.engine, model.replicas, self._policy, host)
        return await asyncio.create_task(opening, context=own)

    def _lost_session(self) -> RaySession | None:
        """That of a Ray that is there no more."""
        task = self._session
        found = task.result() if task is not None and task.done() and not task.exception() else None
        return found if found is not None and found.lost else None

    async def _connected(self, lost: RaySession | None) -> RaySession:
        """There is one at a time."""
        if lost is not None:
            await asyncio.to_thread(lost.close)
        return await asyncio.to_thread(RaySession, self._address)

    def close(self) -> None:
        """When all of them have ended."""
        if self._session is not None and self._session.done() and not self._session.exception():
            self._session.result().close()


def _server_name(serving: ServeOptions) -> str:
    return f"{socket.gethostname()}-{serving.port or os.getpid()}"


async def _opened(
    engine: EngineOptions, replicas: ReplicaOptions, policy: RestartPolicy, host: RayHost
) -> ClusterClient:
    """Replicas that `host` starts, all of them ready."""
    assert replicas.replicas is not None
    options = replica_options(engine, replicas)
    client = ClusterClient(
        replicas.replicas,
        make_router(replicas.router, replicas.most_replicas),
        policy,
        host.node_address,
        autoscaler=Autoscaler(replicas, replicas.replicas) if replicas.autoscales else None,
        replica_wait=replicas.replica_wait,
        prefill=replicas.prefill_replicas,
        connector=replicas.connector,
        handover_timeout=replicas.handover_timeout,
        rebalance=replicas.rebalance and replicas.most_replicas > 1,
        switch_roles=replicas.switch_roles and replicas.prefill_replicas > 0,
        targets=(engine.scheduler.slo_ttft or 0.0, engine.scheduler.slo_tpot or 0.0),
    )
    host.when_lost(client.lose)
    try:
        await asyncio.to_thread(
            host.start,
            replicas.replicas,
            replicas.most_replicas,
            client.hub.address,
            client.membership,
            options,
            cpus=replicas.replica_cpus,
            gpus=replicas.replica_gpus,
            hang_timeout=policy.hang_timeout,
        )
        await client.ready(host)
    except BaseException:
        await client.close()
        await asyncio.to_thread(host.stop)
        raise
    return client


def replica_options(engine: EngineOptions, replicas: ReplicaOptions) -> EngineOptions:
    """Of each replica: on this machine they share the cores; a model's path means the same wherever they start."""
    alone = replicas.ray_address is None
    if alone and replicas.most_replicas > 1 and engine.cache.kv_disk is not None:
        raise ConfigError("kv_disk is one engine's: replicas on one machine share pages through kv_remote")
    if alone and replicas.most_replicas > 1 and engine.cache.kv_events is not None:
        raise ConfigError("kv_events is one engine's endpoint: replicas on one machine cannot all bind it")
    if replicas.prefill_replicas and (why := _keeps_pages(engine)):
        raise ConfigError(f"prefill_replicas has no effect beside {why}")
    path = Path(engine.model.model)
    said = {"model": str(path.resolve())} if path.exists() else {}
    if alone and engine.device.threads is None:
        return engine.but(threads=max(1, usable_cores() // replicas.most_replicas), **said)
    return engine.but(**said)


def _keeps_pages(engine: EngineOptions) -> str:
    """Which of its options keep an engine from handing KV pages over, and why; nothing if none does."""
    said = engine.flat()
    if said.get("scheduler") == "static":
        return "scheduler static: static batching has no KV pages to hand over"
    if "prefix_cache" in said:
        return "prefix_cache off: KV pages are handed over through it"
    return next((f"{name}: {why}" for name, why in NO_HANDOVERS.items() if name in said), "")
