"""POST /v1/engine/sleep and /v1/engine/wake: lend the GPU's memory to others while nobody asks anything.

A request that arrives meanwhile wakes the engine. Of several models, `?model=` names one; without it all that are
loaded are meant. Refuses to know: what is moved where.
"""

from __future__ import annotations

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from quire.serve.core.generation import Serving
from quire.serve.http.http_io import json
from quire.serve.http.openapi import answers
from quire.types.errors import ConfigError, InputError


class Power(msgspec.Struct):
    asleep: bool


def router(serving: Serving) -> APIRouter:
    routes = APIRouter(tags=["operations"])

    async def power(model: str | None, asleep: bool) -> None:
        loaded = serving.models.loaded()
        wanted = list(loaded) if model is None else [serving.find_model(model)[0]]
        if not set(wanted) <= loaded.keys():
            raise InputError(f"model {model!r} is not loaded", param="model")
        for name in wanted:
            await loaded[name].client.power(asleep=asleep)

    @routes.post("/v1/engine/sleep", summary="Free the GPU's memory until woken", openapi_extra=answers(Power))
    async def sleep(model: str | None = None) -> Response:
        try:
            await power(model, True)
        except ConfigError as error:  # not on this hardware
            raise InputError(str(error)) from None
        return Response(json(Power(True)), media_type="application/json")

    @routes.post("/v1/engine/wake", summary="Take the GPU's memory again", openapi_extra=answers(Power))
    async def wake(model: str | None = None) -> Response:
        await power(model, False)
        return Response(json(Power(False)), media_type="application/json")

    return routes
