"""GET /health, /ready and /metrics: is the process there, is the engine, and what do they measure.

Refuses to know: requests.
"""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from quire.observe.metrics import CONTENT_TYPE
from quire.serve.generation import Serving
from quire.types.errors import EngineDeadError
from quire.types.events import EngineStats

ENGINE_TIMEOUT = 2.0  # seconds the engine has to answer before it counts as gone


async def engine_stats(serving: Serving) -> EngineStats:
    try:
        return await asyncio.wait_for(serving.frontend.client.stats(), ENGINE_TIMEOUT)
    except TimeoutError:
        raise EngineDeadError(f"the engine did not answer within {ENGINE_TIMEOUT:g} seconds") from None


def router(serving: Serving) -> APIRouter:
    routes = APIRouter(tags=["operations"])

    @routes.get("/health", summary="Is the server process up?")
    async def health() -> Response:
        return JSONResponse({"status": "ok"})

    @routes.get("/ready", summary="Does the engine answer?")
    async def ready() -> Response:
        await engine_stats(serving)
        return JSONResponse({"status": "ready", "model": serving.frontend.model_name})

    @routes.get("/metrics", summary="Prometheus metrics")
    async def metrics() -> Response:
        try:
            serving.metrics.engine(await engine_stats(serving))
        except EngineDeadError:
            serving.metrics.engine(None)
        return Response(serving.metrics.render(), media_type=CONTENT_TYPE)

    return routes
