"""Chat completions that were made with `store`: listed, read, labelled and forgotten.

Refuses to know: how a completion is made.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.serve.core.fields import Metadata
from quire.serve.core.generation import Serving
from quire.serve.http.http_io import decode, json, owner_of, read_body
from quire.serve.http.openapi import answers, queried
from quire.serve.openai.object_store import PAGED, ItemList, ObjectStore, page_of_items
from quire.serve.openai.response_bodies import ChatCompletion

PATH = "/v1/chat/completions"


class ChatRecord(msgspec.Struct):
    completion: dict[str, Any]
    messages: list[dict[str, Any]]


class ChatUpdate(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/chat/completions/{id}."""

    metadata: Metadata | None


class ChatDeleted(msgspec.Struct):
    id: str
    object: Literal["chat.completion.deleted"] = "chat.completion.deleted"
    deleted: bool = True


_UPDATE = msgspec.json.Decoder(ChatUpdate)
_RECORD = msgspec.json.Decoder(ChatRecord)


def record(id: str, completion: bytes, messages: list[dict[str, Any]]) -> bytes:
    """A completion as it is stored, with what it answers."""
    shown = [{"id": f"{id}-{number}", **message} for number, message in enumerate(messages)]
    return b'{"completion":%b,"messages":%b}' % (completion, json(shown))


def router(serving: Serving, store: ObjectStore) -> APIRouter:
    routes = APIRouter(tags=["OpenAI"])

    def find(request: Request, id: str) -> ChatRecord:
        return _RECORD.decode(store.get(id, owner_of(request), "completion"))

    def reply(value: Any) -> Response:
        return Response(json(value), media_type="application/json")

    filters = {"model": {"type": "string"}, **PAGED}

    @routes.get(PATH, summary="List stored completions", openapi_extra=answers(ItemList) | queried(**filters))
    async def list_completions(request: Request) -> Response:
        owner, query = owner_of(request), request.query_params
        labels = {key[9:-1]: value for key, value in query.items() if key.startswith("metadata[") and key.endswith("]")}
        found = []
        for id, _ in store.ids(owner):
            completion = _RECORD.decode(store.get(id, owner, "completion")).completion
            wanted = query.get("model") in (None, completion["model"])
            if wanted and labels.items() <= (completion.get("metadata") or {}).items():
                found.append(completion)
        found.sort(key=lambda completion: (completion["created"], completion["id"]))
        return reply(page_of_items(found, request, "asc"))

    @routes.get(PATH + "/{id}", summary="Read a stored completion", openapi_extra=answers(ChatCompletion))
    async def read(request: Request, id: str) -> Response:
        return reply(find(request, id).completion)

    @routes.post(
        PATH + "/{id}",
        summary="Change a completion's metadata",
        openapi_extra=answers(ChatCompletion, takes=ChatUpdate),
    )
    async def update(request: Request, id: str) -> Response:
        body = decode(_UPDATE, await read_body(request, serving.max_body))
        found = find(request, id)
        found.completion["metadata"] = body.metadata or {}
        store.keep(id, owner_of(request), json(found))
        return reply(found.completion)

    @routes.delete(PATH + "/{id}", summary="Forget a completion", openapi_extra=answers(ChatDeleted))
    async def delete(request: Request, id: str) -> Response:
        store.delete(id, owner_of(request), "completion")
        return reply(ChatDeleted(id))

    @routes.get(
        PATH + "/{id}/messages",
        summary="What a completion answered",
        openapi_extra=answers(ItemList) | queried(**PAGED),
    )
    async def messages(request: Request, id: str) -> Response:
        return reply(page_of_items(find(request, id).messages, request, "asc"))

    return routes
