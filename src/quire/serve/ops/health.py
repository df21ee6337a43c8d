"""GET /health, /ready, /ping, /version, /load and /metrics: is the process there, is the engine, what do they measure.

Refuses to know: requests.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from fastapi import APIRouter
from starlette.responses import JSONResponse, PlainTextResponse, Response

from quire import __version__
from quire.observe import exposition
from quire.observe.metrics import CONTENT_TYPE
from quire.serve.core.generation import Serving
from quire.serve.core.rate_limits import DRAIN_RETRY
from quire.serve.ops import gauges
from quire.types.errors import EngineDeadError, OverloadedError
from quire.types.events import EngineStats
from quire.types.membership import ReplicaView

ENGINE_TIMEOUT = 2.0  # seconds the engine has to answer before it counts as gone


async def engine_stats(serving: Serving) -> EngineStats:
    try:
        return await asyncio.wait_for(serving.frontend.client.stats(), ENGINE_TIMEOUT)
    except TimeoutError:
        raise EngineDeadError(f"the engine did not answer within {ENGINE_TIMEOUT:g} seconds") from None


def router(serving: Serving) -> APIRouter:
    routes = APIRouter(tags=["operations"])

    @routes.head("/health", include_in_schema=False)
    @routes.get("/health", summary="Is the server process up?")
    async def health() -> Response:
        return JSONResponse({"status": "ok"})

    def check() -> None:
        if serving.admission.draining:
            raise OverloadedError("the server is shutting down", retry_after=DRAIN_RETRY)
        if (trouble := serving.frontend.client.trouble()) is not None:
            raise EngineDeadError(trouble)

    @routes.head("/ready", include_in_schema=False)
    @routes.get("/ready", summary="Would a request be served now?")
    async def ready() -> Response:
        check()
        return JSONResponse({"status": "ready", "model": serving.frontend.model_name})

    # As SageMaker asks, by either method: an answer without words.
    @routes.api_route("/ping", methods=["GET", "HEAD", "POST"], include_in_schema=False)
    async def ping() -> Response:
        check()
        return Response()

    @routes.get("/version", summary="This server's version")
    async def version() -> Response:
        return JSONResponse({"version": __version__})

    @routes.get("/load", summary="How many requests are under way?")
    async def load() -> Response:
        return JSONResponse({"server_load": serving.admission.inflight})

    return routes


def metrics_router(serving: Serving) -> APIRouter:
    routes = APIRouter(tags=["operations"])

    @routes.get("/metrics", summary="Prometheus metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        replicas: list[ReplicaView] = []
        try:
            serving.metrics.engine(await engine_stats(serving))
        except EngineDeadError:
            serving.metrics.engine(None)
        with suppress(EngineDeadError):  # of one that is lost meanwhile
            replicas = await serving.frontend.client.replicas()
        return Response(exposition.render(serving.metrics) + gauges.render(serving, replicas), media_type=CONTENT_TYPE)

    return routes
