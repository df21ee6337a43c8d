"""GET /models, POST /models/load and /models/unload: which models are loaded, and having one loaded or let go now, as
llama.cpp's server has them.

Refuses to know: how a model is loaded, who may be in its way.
"""

from __future__ import annotations

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.engine.model_pool import ModelState
from quire.serve.core.fields import Name
from quire.serve.core.generation import Serving
from quire.serve.http.http_io import decode, json, read_body
from quire.serve.http.openapi import answers
from quire.types.errors import InputError


class ModelStates(msgspec.Struct):
    """The default first."""

    data: list[ModelState]
    object: str = "list"


class NamedModel(msgspec.Struct, forbid_unknown_fields=True):
    model: Name


class Done(msgspec.Struct):
    success: bool


_NAMED = msgspec.json.Decoder(NamedModel)


def router(serving: Serving) -> APIRouter:
    routes = APIRouter(tags=["operations"])

    async def named(request: Request) -> str:
        return serving.find_model(decode(_NAMED, await read_body(request, serving.max_body)).model)[0]

    def answer(found: msgspec.Struct) -> Response:
        return Response(json(found), media_type="application/json")

    @routes.get("/models", summary="The models and which are loaded", openapi_extra=answers(ModelStates))
    async def models() -> Response:
        return answer(ModelStates(serving.models.states()))

    @routes.post("/models/load", summary="Load a model now", openapi_extra=answers(Done, takes=NamedModel))
    async def load(request: Request) -> Response:
        name = await named(request)
        serving.models.forget_failure(name)  # an operator may have mended it
        await serving.use_model(name)
        return answer(Done(True))

    @routes.post(
        "/models/unload", summary="Unload a model once it is idle", openapi_extra=answers(Done, takes=NamedModel)
    )
    async def unload(request: Request) -> Response:
        name = await named(request)
        if not await serving.models.unload(name):
            raise InputError(f"{name} stays loaded: it is pinned, or the only model", param="model")
        return answer(Done(True))

    return routes
