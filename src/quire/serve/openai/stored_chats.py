"""Chat completions that were made with `store`: listed, read, labelled and forgotten.

Refuses to know: how a completion is made.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.serve.core.fields import Metadata
from quire.serve.core.generation import Serving
from quire.serve.http.http_io import decode, json, owner_of, read_body
from quire.serve.http.openapi import answers, queried
from quire.serve.openai.object_store import MAX_OBJECTS, PAGED, ItemList, ObjectStore, page_of_items
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


class ChatStore:
    """Stored completions. What listings are filtered and ordered by is in memory."""

    def __init__(self, folder: Path | None):
        self._objects = ObjectStore(folder)
        self._about: dict[str, dict[str, Any]] = {}
        for id, owner in self._objects.ids():
            self._note(self.get(id, owner).completion)

    def keep(self, owner: str, completion: bytes, messages: list[dict[str, Any]]) -> None:
        made = msgspec.json.decode(completion)
        shown = [{"id": f"{made['id']}-{number}", **message} for number, message in enumerate(messages)]
        self._keep(owner, ChatRecord(made, shown))

    def label(self, id: str, owner: str, metadata: dict[str, str]) -> dict[str, Any]:
        found = self.get(id, owner)
        found.completion["metadata"] = metadata
        self._keep(owner, found)
        return found.completion

    def _keep(self, owner: str, record: ChatRecord) -> None:
        self._objects.keep(record.completion["id"], owner, json(record))
        self._note(record.completion)

    def _note(self, completion: dict[str, Any]) -> None:
        self._about[completion["id"]] = {name: completion.get(name) for name in ("id", "created", "model", "metadata")}
        if len(self._about) > 2 * MAX_OBJECTS:  # those that made room
            there = {id for id, _ in self._objects.ids()}
            self._about = {id: about for id, about in self._about.items() if id in there}

    def get(self, id: str, owner: str) -> ChatRecord:
        return _RECORD.decode(self._objects.get(id, owner, "completion"))

    def delete(self, id: str, owner: str) -> None:
        self._objects.delete(id, owner, "completion")

    def listing(self, owner: str, model: str | None, labels: dict[str, str]) -> list[dict[str, Any]]:
        """What is known of an owner's completions without reading them, oldest first."""
        mine = [self._about[id] for id, _ in self._objects.ids(owner)]
        found = [a for a in mine if model in (None, a["model"]) and labels.items() <= (a["metadata"] or {}).items()]
        return sorted(found, key=lambda about: (about["created"], about["id"]))


def router(serving: Serving, store: ChatStore) -> APIRouter:
    routes = APIRouter(tags=["OpenAI"])

    def reply(value: Any) -> Response:
        return Response(json(value), media_type="application/json")

    filters = {"model": {"type": "string"}, **PAGED}

    @routes.get(PATH, summary="List stored completions", openapi_extra=answers(ItemList) | queried(**filters))
    async def list_completions(request: Request) -> Response:
        owner, query = owner_of(request), request.query_params
        labels = {key[9:-1]: value for key, value in query.items() if key.startswith("metadata[") and key.endswith("]")}
        page = page_of_items(store.listing(owner, query.get("model"), labels), request, "asc")
        page.data = [store.get(about["id"], owner).completion for about in page.data]
        return reply(page)

    @routes.get(PATH + "/{id}", summary="Read a stored completion", openapi_extra=answers(ChatCompletion))
    async def read(request: Request, id: str) -> Response:
        return reply(store.get(id, owner_of(request)).completion)

    @routes.post(
        PATH + "/{id}",
        summary="Change a completion's metadata",
        openapi_extra=answers(ChatCompletion, takes=ChatUpdate),
    )
    async def update(request: Request, id: str) -> Response:
        body = decode(_UPDATE, await read_body(request, serving.max_body))
        return reply(store.label(id, owner_of(request), body.metadata or {}))

    @routes.delete(PATH + "/{id}", summary="Forget a completion", openapi_extra=answers(ChatDeleted))
    async def delete(request: Request, id: str) -> Response:
        store.delete(id, owner_of(request))
        return reply(ChatDeleted(id))

    @routes.get(
        PATH + "/{id}/messages",
        summary="What a completion answered",
        openapi_extra=answers(ItemList) | queried(**PAGED),
    )
    async def messages(request: Request, id: str) -> Response:
        return reply(page_of_items(store.get(id, owner_of(request)).messages, request, "asc"))

    return routes
