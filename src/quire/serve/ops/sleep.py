"""POST /v1/engine/sleep and /v1/engine/wake (vLLM's /sleep and /wake_up): lend memory while nobody asks anything.

`?level=` as vLLM's: weights wait in host memory (1), or are loaded again (2). A request that arrives meanwhile wakes
the engine. Of several models, `?model=` names one; without it all that are loaded are meant. One that the pool has put
to sleep is loaded by a wake (where none is loaded, the first of those is) and ended by level 2. Refuses to know: what
is moved where.
"""

from __future__ import annotations

import asyncio

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from quire.serve.core.generation import Serving
from quire.serve.http.http_io import json
from quire.serve.http.openapi import answers
from quire.serve.ops.health import answered
from quire.types.errors import ConfigError, InputError


class Power(msgspec.Struct):
    asleep: bool


class Sleeping(msgspec.Struct):
    is_sleeping: bool


def router(serving: Serving) -> APIRouter:
    routes = APIRouter(tags=["operations"])

    async def power(model: str | None, asleep: bool, level: int = 1) -> None:
        """All that can; then, why another could not."""
        if level not in (1, 2):
            raise InputError(f"sleep has levels 1 and 2, not {level}", param="level")
        models = serving.models
        asked = models.names if model is None else [serving.find_model(model)[0]]
        name = next(filter(models.sleeps, asked), None)
        if name is not None and (model is not None or not models.loaded()):
            if not asleep:
                (await models.acquire(name)).release()
            elif level == 2:
                for each in filter(models.sleeps, asked):
                    await models.unload(each)
            return
        frontends = serving.models.loaded().values() if model is None else [serving.loaded(model)]
        told = [frontend.client.power(asleep=asleep, level=level) for frontend in frontends]
        for outcome in await asyncio.gather(*told, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome

    @routes.post("/sleep", summary="/v1/engine/sleep by vLLM's name", openapi_extra=answers(Power))
    @routes.post("/v1/engine/sleep", summary="Free the engine's memory until woken", openapi_extra=answers(Power))
    async def sleep(model: str | None = None, level: int = 1) -> Response:
        try:
            await power(model, True, level)
        except ConfigError as error:  # not on this hardware
            raise InputError(str(error)) from None
        return Response(json(Power(True)), media_type="application/json")

    @routes.post("/wake_up", summary="/v1/engine/wake by vLLM's name", openapi_extra=answers(Power))
    @routes.post("/v1/engine/wake", summary="Take the memory again", openapi_extra=answers(Power))
    async def wake(model: str | None = None) -> Response:
        await power(model, False)
        return Response(json(Power(False)), media_type="application/json")

    @routes.get("/is_sleeping", summary="Whether all engines, or a model's, sleep", openapi_extra=answers(Sleeping))
    async def is_sleeping(model: str | None = None) -> Response:
        names = serving.models.names if model is None else [serving.find_model(model)[0]]
        loaded = serving.models.loaded()
        clients = [loaded[name].client for name in names if name in loaded]
        awake = [client for client in clients if not (await answered(client.stats())).sleep_level]
        sleeps = not awake and (bool(clients) or any(map(serving.models.sleeps, names)))
        return Response(json(Sleeping(sleeps)), media_type="application/json")

    return routes
