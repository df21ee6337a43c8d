"""Routes of /v1/messages/batches. Refuses to know: how batches are worked off and kept."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from quire.serve.anthropic.message_batches import PATH, MessageBatch, MessageBatches, MessageBatchRequest
from quire.serve.anthropic.message_bodies import AnthropicError
from quire.serve.core.generation import Serving
from quire.serve.core.stored_records import PREFIX, open_folder
from quire.serve.http.http_io import decode, json, owner_of, read_body
from quire.serve.http.openapi import answers, queried
from quire.types.errors import InputError

MAX_PAGE = 1000
PAGE = {
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_PAGE},
    "after_id": {"type": "string"},
    "before_id": {"type": "string"},
}
_DECODER = msgspec.json.Decoder(MessageBatchRequest)


class MessageBatchList(msgspec.Struct, kw_only=True):
    data: list[MessageBatch]
    has_more: bool
    first_id: str | None
    last_id: str | None


class MessageBatchDeleted(msgspec.Struct):
    id: str
    type: Literal["message_batch_deleted"] = "message_batch_deleted"


def page_of(batches: list[MessageBatch], request: Request) -> MessageBatchList:
    """The page that a request asks for, newest first."""
    query = request.query_params
    limit = query.get("limit", "20")
    if not (limit.isascii() and limit.isdigit() and len(limit) < 5 and 1 <= int(limit) <= MAX_PAGE):
        raise InputError(f"limit must be in [1, {MAX_PAGE}]", param="limit")
    places = {batch.id: place for place, batch in enumerate(batches)}
    size = int(limit)
    if (before := query.get("before_id")) is not None:
        end = places.get(before, 0)
        page, more = batches[max(0, end - size) : end], end > size
    else:
        after = query.get("after_id")
        start = 0 if after is None else places.get(after, len(batches) - 1) + 1
        page, more = batches[start : start + size], len(batches) > start + size
    ends = (page[0].id, page[-1].id) if page else (None, None)
    return MessageBatchList(data=page, has_more=more, first_id=ends[0], last_id=ends[1])


def router(serving: Serving) -> APIRouter:
    kept = serving.options.files
    held = None if kept else tempfile.TemporaryDirectory(prefix=PREFIX)
    folder = Path(kept or held.name)  # type: ignore[union-attr]
    batches: list[MessageBatches] = []

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        # A folder that was given is locked by what holds the files in it.
        with contextlib.nullcontext() if held is None else open_folder(folder):
            batches.append(MessageBatches(serving, folder))
            try:
                yield
            finally:
                await batches.pop().close()
                if held is not None:
                    with contextlib.suppress(OSError):
                        held.cleanup()

    routes = APIRouter(tags=["Anthropic"], lifespan=lifespan)

    def told(request: Request, batch: MessageBatch) -> MessageBatch:
        url = f"{request.base_url}{PATH[1:]}/{batch.id}/results" if batch.ended_at is not None else None
        return msgspec.structs.replace(batch, results_url=url)

    def reply(answer: msgspec.Struct) -> Response:
        return Response(json(answer), media_type="application/json")

    @routes.post(
        PATH,
        summary="Create a batch of messages",
        openapi_extra=answers(MessageBatch, takes=MessageBatchRequest, error=AnthropicError),
    )
    async def create(request: Request) -> Response:
        body = decode(_DECODER, await read_body(request, serving.max_body))
        return reply(told(request, await batches[0].create(body, owner_of(request))))

    @routes.get(
        PATH,
        summary="List batches of messages",
        openapi_extra=answers(MessageBatchList, error=AnthropicError) | queried(**PAGE),
    )
    async def list_batches(request: Request) -> Response:
        found = [told(request, batch) for batch in batches[0].listing(owner_of(request))]
        return reply(page_of(found, request))

    @routes.get(
        f"{PATH}/{{id}}",
        summary="Describe a batch of messages",
        openapi_extra=answers(MessageBatch, error=AnthropicError),
    )
    async def describe_batch(request: Request, id: str) -> Response:
        return reply(told(request, batches[0].get(id, owner_of(request))))

    @routes.post(
        f"{PATH}/{{id}}/cancel",
        summary="Cancel a batch of messages",
        openapi_extra=answers(MessageBatch, error=AnthropicError),
    )
    async def cancel(request: Request, id: str) -> Response:
        return reply(told(request, batches[0].cancel(id, owner_of(request))))

    @routes.delete(
        f"{PATH}/{{id}}",
        summary="Delete a batch of messages",
        openapi_extra=answers(MessageBatchDeleted, error=AnthropicError),
    )
    async def delete(request: Request, id: str) -> Response:
        batches[0].delete(id, owner_of(request))
        return reply(MessageBatchDeleted(id))

    @routes.get(
        f"{PATH}/{{id}}/results",
        summary="Read the results of a batch of messages",
        openapi_extra=answers(None, media="application/x-jsonl", error=AnthropicError),
    )
    async def results(request: Request, id: str) -> Response:
        return FileResponse(batches[0].results(id, owner_of(request)), media_type="application/x-jsonl")

    return routes
