"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them. With keys, for those of scope admin.

An adapter that is loaded answers under its own name, or behind the model's: base:adapter. Unloading takes the name away
at once; requests that run with the adapter finish with it. Refuses to know: what an adapter is.
"""

from __future__ import annotations

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from quire.serve.core.fields import Name
from quire.serve.core.generation import Serving
from quire.serve.http.http_io import decode, read_body
from quire.serve.http.openapi import answers
from quire.types.errors import ConfigError, InputError, ModelFileError


class LoadLoraRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/load_lora_adapter: the name it is to have, and the directory it is in, on the server; of several
    models, which it is for (default: the first)."""

    lora_name: Name
    lora_path: str
    model: Name | None = None


class UnloadLoraRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    lora_name: Name
    lora_int_id: int | None = None  # vLLM's own number of it: names suffice


_LOAD = msgspec.json.Decoder(LoadLoraRequest)
_UNLOAD = msgspec.json.Decoder(UnloadLoraRequest)


def router(serving: Serving) -> APIRouter:
    routes = APIRouter(tags=["OpenAI"])

    @routes.post(
        "/v1/load_lora_adapter",
        summary="Load a LoRA adapter",
        openapi_extra=answers(None, takes=LoadLoraRequest, media="text/plain"),
    )
    async def load(request: Request) -> Response:
        body = decode(_LOAD, await read_body(request, serving.max_body))
        if body.lora_name in serving.models.names:
            raise InputError(f"{body.lora_name!r} is the model itself", param="lora_name")
        await serving.use_model(body.model)
        try:
            await serving.frontend.client.load_adapter(body.lora_name, body.lora_path)
        except (ConfigError, ModelFileError) as error:  # what is wrong is the file that was named
            raise InputError(str(error), param="lora_path") from None
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @routes.post(
        "/v1/unload_lora_adapter",
        summary="Unload a LoRA adapter",
        openapi_extra=answers(None, takes=UnloadLoraRequest, media="text/plain"),
    )
    async def unload(request: Request) -> Response:
        body = decode(_UNLOAD, await read_body(request, serving.max_body))
        if (found := serving.models.find(body.lora_name)) is not None:
            await serving.use_model(found[0])
        await serving.frontend.client.unload_adapter(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    return routes
