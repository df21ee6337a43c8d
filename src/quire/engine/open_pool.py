"""From entries and options to a pool of models: engines in processes of their own, texts read once.

Refuses to know: the command line, HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from quire.assets import LocalModel, present
from quire.engine.client import AsyncClient, RestartPolicy
from quire.engine.frontend import Frontend
from quire.engine.model_pool import ModelPool, PoolLimits
from quire.engine.spare_process import SpareProcess
from quire.text import TextModel
from quire.types.errors import ModelNotFoundError
from quire.types.models_file import ServedModel
from quire.types.option_checks import parse_size
from quire.types.serving import ServeOptions


async def open_model_pool(
    models: Sequence[ServedModel], serving: ServeOptions, policy: RestartPolicy | None = None
) -> ModelPool:
    """A pool in which the default model and those that are pinned are loaded."""
    spare = SpareProcess() if serving.spare_engine and len(models) > 1 else None

    async def open_model(model: ServedModel, earlier: Frontend | None) -> Frontend:
        local = _local(model)
        opening = asyncio.ensure_future(AsyncClient.open(model.engine, process=True, policy=policy, spare=spare))
        parsers = {"tool_call_parser": serving.tool_call_parser, "reasoning_parser": serving.reasoning_parser}
        try:
            text = earlier.text if earlier is not None else await asyncio.to_thread(TextModel.load, local, **parsers)
        except BaseException:
            if not opening.cancel() and opening.exception() is None:
                await opening.result().close()
            raise
        return Frontend(await opening, text, model.name)

    limits = PoolLimits(
        serving.max_loaded_models,
        parse_size(serving.models_memory) if serving.models_memory is not None else None,
        serving.model_wait,
    )
    pool = ModelPool(models, open_model, limits, expected_bytes)
    if spare is not None:
        pool.beside.append(spare)
    try:
        await pool.start()
        if spare is not None:
            spare.prepare()
    except BaseException:
        await pool.close()
        raise
    return pool


def expected_bytes(model: ServedModel) -> int:
    """About what a model will take: its files, and the KV pages it asks for. A load tells more."""
    asked = model.engine.cache.kv_memory
    return _local(model).size() + (parse_size(asked) if asked is not None else 0)


def _local(model: ServedModel) -> LocalModel:
    found = present(model.engine.model.model)
    if found is None:
        raise ModelNotFoundError(f"the files of {model.engine.model.model} are not here; `quire pull` fetches them")
    return found
