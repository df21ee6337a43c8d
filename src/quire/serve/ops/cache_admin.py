"""/v1/cache: what operators may see and do of the KV cache. Refuses to know: where pages are, how they move.

GET shows it. POST .../warm computes a prompt ahead of time, .../pin keeps its pages, .../drop forgets pages, .../export
gives a prefix as a bundle that another engine of the same kind takes with .../import.
"""

from __future__ import annotations

import hashlib
import time
import uuid
from typing import Annotated

import msgspec
from fastapi import APIRouter
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from quire.serve.core.api_keys import Key
from quire.serve.core.context import Context
from quire.serve.core.fields import Int
from quire.serve.core.generation import Serving, off_loop
from quire.serve.http.auth import salt_of
from quire.serve.http.http_io import decode, json, read_body
from quire.serve.http.openapi import answers
from quire.serve.ops.health import answered
from quire.types.cache_control import CacheOrder, CacheReport
from quire.types.errors import InputError
from quire.types.sampling_params import SamplingParams
from quire.types.seams import EngineClient

BUNDLE = 64 << 20  # bytes of an import


class CachePrompt(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Whose pages are meant: a prompt, as text or token ids, of a key (by name) and within a salt, if any."""

    prompt: str | list[Int] | None = None
    key: str | None = None
    cache_salt: str | None = None


class PinBody(CachePrompt):
    seconds: Annotated[float, Meta(gt=0, le=7 * 24 * 3600)] = 600.0


class DropBody(CachePrompt):
    tiers: list[str] = []


def salt(serving: Serving, body: CachePrompt) -> str:
    """The salt that requests with this key and this `cache_salt` have."""
    found = next((key for key in serving.keys.keys if key.name == body.key), None)
    if body.key is not None and found is None:
        raise InputError(f"there is no key called {body.key!r}", param="key")
    return Context("", found or Key("open"), salt_of(serving, found) if found else "").salted(body.cache_salt or "")


async def order(serving: Serving, body: CachePrompt, action: str, **more: object) -> CacheOrder:
    tokens: list[int] = []
    if body.prompt:
        prompt = body.prompt
        params = SamplingParams(max_tokens=1)
        request = await off_loop(len(prompt), lambda: serving.frontend.prepare(prompt, params))
        tokens = request.prompt
    elif action != "drop":
        raise InputError("name the prompt whose pages are meant", param="prompt")
    return CacheOrder(action=action, tokens=tokens, salt=salt(serving, body), **more)  # type: ignore[arg-type]


def router(serving: Serving) -> APIRouter:
    routes = APIRouter(tags=["cache"])

    async def engine(model: str | None) -> EngineClient:
        """Of the model named, or of the default; loaded if need be."""
        await serving.use_model(model)
        return serving.frontend.client

    def answer(report: CacheReport) -> Response:
        return Response(json(report), media_type="application/json")

    async def parsed(request: Request, kind: type[CachePrompt]) -> CachePrompt:
        return decode(msgspec.json.Decoder(kind), await read_body(request, serving.max_body))

    @routes.get("/v1/cache", summary="The KV cache as it is", openapi_extra=answers(CacheReport))
    async def look(model: str | None = None) -> Response:
        frontend = serving.loaded(model)
        return answer((await answered(frontend.client.cache(CacheOrder())))[0])

    @routes.post("/v1/cache/warm", summary="Compute a prompt", openapi_extra=answers(CacheReport, takes=CachePrompt))
    async def warm(request: Request, model: str | None = None) -> Response:
        body = await parsed(request, CachePrompt)
        client = await engine(model)
        wanted = await order(serving, body, "look")
        made = serving.frontend.prepare(
            wanted.tokens, SamplingParams(max_tokens=1), request_id=f"warm-{uuid.uuid4().hex}", salt=wanted.salt
        )
        await serving.frontend.collect(made)
        report, _ = await client.cache(CacheOrder())
        report.tokens = len(wanted.tokens)
        return answer(report)

    @routes.post("/v1/cache/pin", summary="Keep a prompt's pages", openapi_extra=answers(CacheReport, takes=PinBody))
    async def pin(request: Request, model: str | None = None) -> Response:
        body = await parsed(request, PinBody)
        assert isinstance(body, PinBody)
        client = await engine(model)
        return answer((await client.cache(await order(serving, body, "pin", seconds=body.seconds)))[0])

    @routes.post("/v1/cache/drop", summary="Forget pages", openapi_extra=answers(CacheReport, takes=DropBody))
    async def drop(request: Request, model: str | None = None) -> Response:
        body = await parsed(request, DropBody)
        assert isinstance(body, DropBody)
        client = await engine(model)
        return answer((await client.cache(await order(serving, body, "drop", tiers=body.tiers)))[0])

    @routes.post("/v1/cache/export", summary="A prompt's pages as a file", openapi_extra={"responses": {}})
    async def export(request: Request, model: str | None = None) -> Response:
        body = await parsed(request, CachePrompt)
        client = await engine(model)
        _, data = await client.cache(await order(serving, body, "export"))
        name = f"prefix-{hashlib.blake2b(data, digest_size=6).hexdigest()}-{int(time.time())}.qkv"
        headers = {"content-disposition": f'attachment; filename="{name}"'}
        return Response(data, media_type="application/octet-stream", headers=headers)

    @routes.post("/v1/cache/import", summary="Take in an exported file", openapi_extra=answers(CacheReport))
    async def take_in(
        request: Request, key: str | None = None, cache_salt: str | None = None, model: str | None = None
    ) -> Response:
        data = await read_body(request, BUNDLE, "octet-stream")
        client = await engine(model)
        whose = salt(serving, CachePrompt(key=key, cache_salt=cache_salt))
        return answer((await client.cache(CacheOrder(action="import", data=data, salt=whose)))[0])

    return routes
