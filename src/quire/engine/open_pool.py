"""From entries and options to a pool of models, one that stays or several: engines in processes of their own.

Refuses to know: the command line, HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Protocol

from quire.assets import LocalModel, present
from quire.engine.client import AsyncClient, RestartPolicy
from quire.engine.frontend import Frontend
from quire.engine.model_pool import ModelPool, PoolLimits
from quire.engine.spare_process import SpareProcess
from quire.engine.weight_holder import WeightHolder
from quire.text import TextModel
from quire.types.config import EngineOptions
from quire.types.errors import ConfigError, ModelNotFoundError
from quire.types.models_file import ServedModel
from quire.types.option_checks import parse_size
from quire.types.seams import EngineClient
from quire.types.serving import ServeOptions


class ModelClusters(Protocol):
    """Opens models that have replicas."""

    def open(self, model: ServedModel) -> Coroutine[None, None, EngineClient]: ...

    def close(self) -> None: ...


async def open_one_model(
    local: LocalModel, engine: EngineOptions, serving: ServeOptions, policy: RestartPolicy
) -> ModelPool:
    """A pool of one model, which stays."""
    holder = _holder(serving)
    spare = SpareProcess(holder=holder) if serving.spare_engine and policy.max_restarts else None
    client = await AsyncClient.open(engine, process=True, policy=policy, spare=spare, holder=holder)
    try:
        pool = ModelPool.of(Frontend(client, _text(local, serving), serving.served_model_name or local.name))
    except BaseException:
        await client.close()
        raise
    if holder is not None:
        pool.closables.append(holder)
    if spare is not None:
        pool.closables.append(spare)
        spare.busy = lambda: pool.busy
        spare.prepare(later=True)
    return pool


async def open_model_pool(
    models: Sequence[ServedModel],
    serving: ServeOptions,
    policy: RestartPolicy | None = None,
    clusters: ModelClusters | None = None,
) -> ModelPool:
    """A pool in which the default model and those that are pinned are loaded. `clusters`: of those with replicas."""
    alone = [model for model in models if model.replicas is None]
    if serving.hold_weights is not None and not alone:
        raise ConfigError("hold_weights has no effect: all models have replicas, whose weights are theirs")
    if serving.models_asleep is not None and (len(models) < 2 or not alone):
        raise ConfigError(
            "models_asleep has no effect: " + ("all models have replicas" if models[1:] else "one model stays loaded")
        )
    if serving.ray_address is not None and len(alone) == len(models):
        raise ConfigError(f"ray_address has no effect: no model of {serving.models} has replicas")
    holder = _holder(serving)
    spare = SpareProcess(holder=holder) if serving.spare_engine and alone and len(models) > 1 else None

    async def open_model(model: ServedModel, earlier: Frontend | None) -> Frontend:
        local = _local(model)
        name = model.name if len(models) > 1 else ""
        client: Coroutine[None, None, EngineClient]
        if model.replicas is not None:
            assert clusters is not None
            client = clusters.open(model)
        else:
            client = AsyncClient.open(model.engine, name=name, process=True, policy=policy, spare=spare, holder=holder)
        opening = asyncio.ensure_future(client)
        try:
            text = earlier.text if earlier is not None else await asyncio.to_thread(_text, local, serving)
        except BaseException:
            if not opening.cancel() and opening.exception() is None:
                await opening.result().close()
            raise
        return Frontend(await opening, text, model.name)

    limits = PoolLimits(
        serving.max_loaded_models,
        parse_size(serving.models_memory) if serving.models_memory is not None else None,
        serving.model_wait,
        parse_size(serving.models_asleep) if serving.models_asleep is not None else 0,
    )
    pool = ModelPool(models, open_model, limits, expected_bytes)
    pool.closables += [each for each in (spare, holder, clusters) if each is not None]
    try:
        await pool.start()
        if spare is not None:
            spare.busy = lambda: pool.busy
            spare.prepare()
    except BaseException:
        await pool.close()
        raise
    return pool


def _holder(serving: ServeOptions) -> WeightHolder | None:
    return None if serving.hold_weights is None else WeightHolder(parse_size(serving.hold_weights))


def _text(local: LocalModel, serving: ServeOptions) -> TextModel:
    return TextModel.load(local, tool_call_parser=serving.tool_call_parser, reasoning_parser=serving.reasoning_parser)


def expected_bytes(model: ServedModel) -> int:
    """About what a model will take: its files, as often as it has them in memory, and the KV pages it asks for, for
    each of its ranks. A load tells more."""
    asked, device = model.engine.cache.kv_memory, model.engine.device
    pages = parse_size(asked) * device.ranks if asked is not None else 0
    return (_local(model).size() * device.context_parallel + pages) * model.most_engines


def _local(model: ServedModel) -> LocalModel:
    found = present(model.engine.model.model)
    if found is None:
        raise ModelNotFoundError(f"the files of {model.engine.model.model} are not here; `quire pull` fetches them")
    return found
