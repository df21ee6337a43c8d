"""GET /health, /ready, /ping, /version, /load and /metrics: is the process there, is the engine, what do they measure.

Refuses to know: requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import suppress
from typing import TypeVar

from fastapi import APIRouter
from msgspec.structs import replace
from starlette.responses import JSONResponse, PlainTextResponse, Response

from quire import __version__
from quire.observe import exposition
from quire.observe.metrics import CONTENT_TYPE
from quire.serve.core.generation import Serving
from quire.serve.core.rate_limits import DRAIN_RETRY
from quire.serve.ops import gauges
from quire.types.errors import EngineDeadError, OverloadedError
from quire.types.membership import ReplicaView
from quire.types.seams import ReplicaOperator

ENGINE_TIMEOUT = 2.0  # seconds the engine has to answer before it counts as gone

Answer = TypeVar("Answer")


async def answered(asked: Awaitable[Answer]) -> Answer:
    """What an engine says of itself. EngineDeadError: it does not, so that who looks at a hung one does not hang."""
    try:
        return await asyncio.wait_for(asked, ENGINE_TIMEOUT)
    except TimeoutError:
        raise EngineDeadError(f"the engine gave no answer within {ENGINE_TIMEOUT:g} s") from None


async def ask_engine(serving: Serving, model: str) -> None:
    """Have the metrics of a model tell what its engine says of itself now."""
    metrics, frontend = serving.metrics_by_model[model], serving.models.loaded().get(model)
    if frontend is None:
        metrics.unloaded()
        return
    metrics.info = frontend.client.info
    try:
        metrics.engine(await answered(frontend.client.stats()))
    except EngineDeadError:
        metrics.engine(None)


async def all_replicas(serving: Serving) -> list[ReplicaView]:
    """The engines of all models that are loaded. Of several models, an engine is called like its model, one of its
    replicas MODEL:ID."""
    found: list[ReplicaView] = []
    for name, frontend in serving.models.loaded().items():
        with suppress(EngineDeadError):  # of one that is lost meanwhile
            replicas = await frontend.client.replicas()
            if serving.models.single_model:
                found += replicas
                continue
            several = isinstance(frontend.client, ReplicaOperator)
            found += [replace(one, id=f"{name}:{one.id}" if several else name, model=name) for one in replicas]
    return found


def router(serving: Serving) -> APIRouter:
    routes = APIRouter(tags=["operations"])

    @routes.head("/health", include_in_schema=False)
    @routes.get("/health", summary="Is the server process up?")
    async def health() -> Response:
        return JSONResponse({"status": "ok"})

    def check() -> None:
        if serving.admission.draining:
            raise OverloadedError("the server is shutting down", retry_after=DRAIN_RETRY)
        if (trouble := serving.models.trouble()) is not None:
            raise EngineDeadError(trouble)

    @routes.head("/ready", include_in_schema=False)
    @routes.get("/ready", summary="Would a request be served now?")
    async def ready() -> Response:
        check()
        return JSONResponse({"status": "ready", "model": serving.models.names[0]})

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
        await asyncio.gather(serving.refresh(), *(ask_engine(serving, name) for name in serving.models.names))
        told = exposition.render(*serving.metrics_by_model.values())
        return Response(told + gauges.render(serving, await all_replicas(serving)), media_type=CONTENT_TYPE)

    return routes
