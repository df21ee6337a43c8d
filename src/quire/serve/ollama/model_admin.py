"""What Ollama's API does to model files, where `--model-management` lets it: /api/pull, /api/copy, /api/delete.

The models that are served stay those that are served. Refuses to know: how files are fetched, answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire import assets
from quire.serve.core.generation import Serving
from quire.serve.core.model_facts import facts_of
from quire.serve.http.http_io import JsonLines, decode, json, read_body
from quire.serve.http.openapi import answers
from quire.serve.ollama.model_files import Pulls, fetchable
from quire.serve.ollama.ollama_bodies import OllamaCopyRequest, OllamaError, OllamaNamed, OllamaProgress
from quire.types.errors import ForbiddenError, InputError

_NAMED = msgspec.json.Decoder(OllamaNamed)
_COPY = msgspec.json.Decoder(OllamaCopyRequest)


def router(serving: Serving) -> APIRouter:
    routes = APIRouter(tags=["Ollama"])
    pulls = Pulls()

    def check() -> None:
        if not serving.options.model_management:
            raise ForbiddenError(
                "this server leaves model files alone; started with --model-management it fetches, copies and deletes"
            )

    async def lines(name: str) -> AsyncGenerator[bytes, None]:
        async with aclosing(pulls.pull(name)) as steps:
            async for step in steps:
                yield json(step) + b"\n"

    @routes.post(
        "/api/pull",
        summary="Fetch a model",
        openapi_extra=answers(OllamaProgress, takes=OllamaNamed, error=OllamaError, media="application/x-ndjson"),
    )
    async def pull(request: Request) -> Response:
        check()
        body = decode(_NAMED, await read_body(request, serving.max_body))
        name = fetchable(body.named())
        if body.stream is not False:
            return JsonLines(lines(name))
        steps = [step async for step in pulls.pull(name)]
        return Response(json(steps[-1]), media_type="application/json")

    # Both answer with nothing, as Ollama does.
    @routes.post("/api/copy", include_in_schema=False)
    async def copy(request: Request) -> Response:
        check()
        body = decode(_COPY, await read_body(request, serving.max_body))
        source = body.source.removesuffix(":latest")
        known = (await facts_of(serving, source)).model if source in serving.models.names else source
        await asyncio.to_thread(assets.copy, known, body.destination.removesuffix(":latest"))
        return Response()

    @routes.delete("/api/delete", include_in_schema=False)
    async def delete(request: Request) -> Response:
        check()
        name = decode(_NAMED, await read_body(request, serving.max_body)).named().removesuffix(":latest")
        if name in [
            each for served in serving.models.names for each in (served, (await facts_of(serving, served)).model)
        ]:
            raise InputError(f"{name} is being served", param="model")
        await asyncio.to_thread(assets.remove, name)
        return Response()

    # What builds models from parts: those here were made elsewhere.
    @routes.api_route("/api/create", methods=["POST"], include_in_schema=False)
    @routes.api_route("/api/push", methods=["POST"], include_in_schema=False)
    @routes.api_route("/api/blobs/{digest}", methods=["HEAD", "POST"], include_in_schema=False)
    async def build() -> Response:
        raise InputError("models are neither made nor published here; `quire serve MODEL` serves one")

    return routes
