"""The routes of /v1/responses: make a response, read it, follow it, stop it, count what it would take.

Refuses to know: how a response is made.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.serve.core.fields import refuse_unsupported
from quire.serve.core.generation import Serving, hold_session, set_targets
from quire.serve.core.turns import render
from quire.serve.http.http_io import NamedEvents, decode, json, owner_of, read_body, until_gone
from quire.serve.http.openapi import answers, generates, queried
from quire.serve.openai import conversations_api
from quire.serve.openai.object_store import PAGED, ItemList, page_of_items
from quire.serve.openai.responses_bodies import LOGPROBS, ResponseRequest
from quire.serve.openai.responses_input import conversation_of
from quire.serve.openai.responses_items import replayed
from quire.serve.openai.responses_objects import InputTokens, ResponseDeleted, ResponseObject
from quire.serve.openai.responses_run import Background, Run
from quire.serve.openai.responses_store import Kept
from quire.types.errors import InputError

_DECODER = msgspec.json.Decoder(ResponseRequest)
_FOLLOW = {
    "stream": {"type": "boolean"},
    "starting_after": {"type": "integer", "minimum": 0},
    "include_obfuscation": {"type": "boolean"},
}


async def parse(serving: Serving, raw: bytes, *, engine: bool = True) -> ResponseRequest:
    body = decode(_DECODER, raw)
    serving.find_model(body.model)
    refuse_unsupported(body)
    hold_session(body.session_id, body.session_ttl)
    set_targets(body.slo)
    if body.stream_options is not None and not body.stream:
        raise InputError("stream_options needs stream to be true", param="stream_options")
    if body.top_logprobs is not None and LOGPROBS not in (body.include or ()):
        raise InputError(f"top_logprobs needs include to hold {LOGPROBS}", param="top_logprobs")
    if body.background and body.store is False:
        raise InputError("a response in the background has to be stored; leave store out", param="background")
    await serving.use_model(body.model, engine=engine and not body.background)
    return body


async def whole(serving: Serving, raw: bytes) -> bytes:
    """A body to its answer, without HTTP: what batches use."""
    arrived = time.perf_counter()
    body = await parse(serving, raw)
    if body.background:
        raise InputError("a batch is in the background already; leave background out", param="background")
    run = Run(serving, body, None, "")
    return await run.whole(await run.start(arrived))


def needs_kept(body: ResponseRequest) -> bool:
    """Whether it is to be kept, or goes on from or refers to what was."""
    items = body.input if isinstance(body.input, list) else []
    refers = any(item.kind == "item_reference" for item in items)
    return body.store is not False or bool(body.previous_response_id) or conversation_of(body) is not None or refers


def followed(request: Request) -> int | None:
    """After which event a reader wants the stream of a response; None: it wants the response."""
    stream, after = map(request.query_params.get, ("stream", "starting_after"))
    if stream not in (None, "true", "false", "True", "False", "1", "0"):
        raise InputError("stream must be true or false", param="stream")
    if after is not None and not (after.isascii() and after.isdigit() and len(after) < 16):
        raise InputError("starting_after must be the number of an event", param="starting_after")
    if stream not in ("true", "True", "1"):
        if after is not None:
            raise InputError("starting_after needs stream to be true", param="starting_after")
        return None
    return -1 if after is None else int(after)


async def _listed(events: list[bytes]) -> AsyncGenerator[bytes, None]:
    yield b"".join(events)


def router(serving: Serving) -> APIRouter:
    """Conversations too, since responses go on from them."""
    kept = Kept(Path(serving.options.files) if serving.options.files else None)
    background = Background()

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await background.close()

    routes = APIRouter(tags=["OpenAI"], lifespan=lifespan)
    routes.include_router(conversations_api.router(serving, kept))

    def reply(data: bytes) -> Response:
        return Response(data, media_type="application/json")

    @routes.post("/v1/responses", summary="Create a response", openapi_extra=generates(ResponseRequest, ResponseObject))
    async def create(request: Request) -> Response:
        arrived, raw = time.perf_counter(), await read_body(request, serving.max_body)
        body = await parse(serving, raw)
        if needs_kept(body):
            serving.need_store(raw)
        run = Run(serving, body, kept, owner_of(request))
        if body.background:
            run.turn().offered()  # what can be told now is not left to the background
            made = background.start(run)
            return NamedEvents(made.follow(-1)) if body.stream else reply(json(run.response))
        talk = await run.start(arrived)
        if body.stream:
            return NamedEvents(run.stream(talk))
        return reply(await until_gone(request.receive, run.whole(talk)))

    @routes.post(
        "/v1/responses/input_tokens",
        summary="Count the tokens that a response would answer",
        openapi_extra=answers(InputTokens, takes=ResponseRequest),
    )
    async def input_tokens(request: Request) -> Response:
        body = await parse(serving, await read_body(request, serving.max_body), engine=False)
        tokens, _ = await render(serving, Run(serving, body, kept, owner_of(request)).turn())
        return reply(json(InputTokens(len(tokens))))

    @routes.get(
        "/v1/responses/{id}",
        summary="Read a stored response, or follow it",
        openapi_extra=answers(ResponseObject, media="text/event-stream") | queried(**_FOLLOW),
    )
    async def read(request: Request, id: str) -> Response:
        after, live = followed(request), background.find(id, owner_of(request))
        if live is not None:
            return reply(json(live.run.response)) if after is None else NamedEvents(live.follow(after))
        record = kept.response(id, owner_of(request))
        if after is None:
            return reply(bytes(record.response))
        events = [event.encode() for event in record.events]
        if not events:
            events = replayed(msgspec.json.decode(record.response, type=ResponseObject))
        return NamedEvents(_listed(events[after + 1 :]))

    @routes.post(
        "/v1/responses/{id}/cancel", summary="Stop a response in the background", openapi_extra=answers(ResponseObject)
    )
    async def cancel(request: Request, id: str) -> Response:
        if (live := background.find(id, owner_of(request))) is not None:
            await background.cancel(live)
            return reply(json(live.run.response))
        response = msgspec.json.decode(kept.response(id, owner_of(request)).response, type=ResponseObject)
        if not response.background:
            raise InputError("only responses in the background can be cancelled", param="id")
        return reply(json(response))

    @routes.delete("/v1/responses/{id}", summary="Forget a response", openapi_extra=answers(ResponseDeleted))
    async def delete(request: Request, id: str) -> Response:
        if (live := background.find(id, owner_of(request))) is not None:
            await background.cancel(live)
        kept.responses.delete(id, owner_of(request), "response")
        return reply(json(ResponseDeleted(id)))

    @routes.get(
        "/v1/responses/{id}/input_items",
        summary="What a response answered",
        openapi_extra=answers(ItemList) | queried(**PAGED),
    )
    async def input_items(request: Request, id: str) -> Response:
        items = msgspec.json.decode(kept.response(id, owner_of(request)).items, type=list[dict[str, Any]])
        return reply(json(page_of_items(items, request)))

    return routes
