"""From options to a cluster that serves: Ray, the hub, replicas, their client."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

from quire.cluster.autoscaler import Autoscaler
from quire.cluster.cluster_client import ClusterClient
from quire.cluster.ray_host import RayHost
from quire.cluster.routers import make_router
from quire.engine.client import RestartPolicy
from quire.types.config import EngineOptions
from quire.types.errors import ConfigError
from quire.types.memory_use import usable_cores
from quire.types.serving import ServeOptions

_RANK = "a rank has a part of every KV page, and pages are handed over whole"
_TIER = "KV pages that such a tier names are not handed over"
_RANKS = dict.fromkeys(("tensor_parallel", "pipeline_parallel", "context_parallel"), _RANK)
NO_HANDOVERS = {**_RANKS, "kv_disk": _TIER, "kv_remote": _TIER}


async def open_cluster(engine: EngineOptions, serving: ServeOptions, policy: RestartPolicy) -> ClusterClient:
    """A client of `serving.replicas` engines; returns when all of them are ready. Later there may be more or fewer."""
    assert serving.replicas is not None
    options = replica_options(engine, serving)
    name = f"{socket.gethostname()}-{serving.port or os.getpid()}"
    host = await asyncio.to_thread(RayHost, serving.ray_address, name)
    client = ClusterClient(
        serving.replicas,
        make_router(serving.router, serving.most_replicas),
        policy,
        host.node_address,
        autoscaler=Autoscaler(serving, serving.replicas) if serving.autoscales else None,
        replica_wait=serving.replica_wait,
        prefill=serving.prefill_replicas,
        connector=serving.connector,
        handover_timeout=serving.handover_timeout,
        rebalance=serving.rebalance and serving.most_replicas > 1,
        switch_roles=serving.switch_roles and serving.prefill_replicas > 0,
        targets=(engine.scheduler.slo_ttft or 0.0, engine.scheduler.slo_tpot or 0.0),
    )
    try:
        await asyncio.to_thread(
            host.start,
            serving.replicas,
            serving.most_replicas,
            client.hub.address,
            client.membership,
            options,
            cpus=serving.replica_cpus,
            gpus=serving.replica_gpus,
            hang_timeout=serving.hang_timeout,
        )
        await client.ready(host)
    except BaseException:
        await client.close()
        await asyncio.to_thread(host.stop)
        raise
    return client


def replica_options(engine: EngineOptions, serving: ServeOptions) -> EngineOptions:
    """Of each replica: on this machine they share the cores; a model's path means the same wherever they start."""
    alone = serving.ray_address is None
    if alone and serving.most_replicas > 1 and engine.cache.kv_disk is not None:
        raise ConfigError("kv_disk is one engine's: replicas on one machine share pages through kv_remote")
    if alone and serving.most_replicas > 1 and engine.cache.kv_events is not None:
        raise ConfigError("kv_events is one engine's endpoint: replicas on one machine cannot all bind it")
    if serving.prefill_replicas and (why := _keeps_pages(engine)):
        raise ConfigError(f"prefill_replicas has no effect beside {why}")
    path = Path(engine.model.model)
    said = {"model": str(path.resolve())} if path.exists() else {}
    if alone and engine.device.threads is None:
        return engine.but(threads=max(1, usable_cores() // serving.most_replicas), **said)
    return engine.but(**said)


def _keeps_pages(engine: EngineOptions) -> str:
    """Which of its options keep an engine from handing KV pages over, and why; nothing if none does."""
    said = engine.flat()
    if said.get("scheduler") == "static":
        return "scheduler static: static batching has no KV pages to hand over"
    if "prefix_cache" in said:
        return "prefix_cache off: KV pages are handed over through it"
    return next((f"{name}: {why}" for name, why in NO_HANDOVERS.items() if name in said), "")
