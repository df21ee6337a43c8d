"""POST /v1/engine/sleep and /v1/engine/wake: lend the GPU's memory to others while nobody asks anything.

A request that arrives meanwhile wakes the engine. Refuses to know: what is moved where.
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

    @routes.post("/v1/engine/sleep", summary="Free the GPU's memory until woken", openapi_extra=answers(Power))
    async def sleep() -> Response:
        try:
            await serving.frontend.client.power(asleep=True)
        except ConfigError as error:  # not on this hardware
            raise InputError(str(error)) from None
        return Response(json(Power(True)), media_type="application/json")

    @routes.post("/v1/engine/wake", summary="Take the GPU's memory again", openapi_extra=answers(Power))
    async def wake() -> Response:
        await serving.frontend.client.power(asleep=False)
        return Response(json(Power(False)), media_type="application/json")

    return routes
