"""The routes of /v1/conversations: items that several responses share and go on from.

Refuses to know: how a response is made.
"""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from quire.serve.core.fields import Metadata
from quire.serve.core.generation import Serving
from quire.serve.http.http_io import NotFoundError, decode, json, owner_of, read_body
from quire.serve.http.openapi import answers, queried
from quire.serve.openai.object_store import PAGED, ItemList, page_of_items
from quire.serve.openai.responses_bodies import InputItem
from quire.serve.openai.responses_input import items_of
from quire.serve.openai.responses_items import item_id
from quire.serve.openai.responses_store import ConversationRecord, Kept

MAX_ITEMS = 20  # that may be added at a time, as with OpenAI
NewItems = Annotated[list[InputItem], Meta(max_length=MAX_ITEMS)]


class ConversationRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/conversations."""

    items: NewItems | None = None
    metadata: Metadata | None = None


class MetadataUpdate(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    metadata: Metadata | None


class NewItemsRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/conversations/{id}/items."""

    items: NewItems


class Conversation(msgspec.Struct, kw_only=True):
    id: str
    created_at: int
    metadata: dict[str, str]
    object: Literal["conversation"] = "conversation"


class ConversationDeleted(msgspec.Struct):
    id: str
    object: Literal["conversation.deleted"] = "conversation.deleted"
    deleted: bool = True


class ConversationItem(msgspec.Struct):
    """Any item: a message, a call, what it returned, a thought."""

    id: str
    type: str


_CREATE = msgspec.json.Decoder(ConversationRequest)
_UPDATE = msgspec.json.Decoder(MetadataUpdate)
_ADD = msgspec.json.Decoder(NewItemsRequest)


def new_items(given: list[InputItem] | None, kept: Kept, owner: str) -> list[dict[str, Any]]:
    """Items as they are kept and shown."""
    items = items_of(given, kept, owner, "items")
    for number, item in enumerate(items):
        item.plain(number)  # complete?
        item.status = item.status or "completed"
    out: list[dict[str, Any]] = msgspec.to_builtins(items)
    return out


def router(serving: Serving, kept: Kept) -> APIRouter:
    routes = APIRouter(tags=["OpenAI"])

    def reply(value: Any) -> Response:
        return Response(json(value), media_type="application/json")

    def shown(record: ConversationRecord) -> Response:
        return reply(Conversation(id=record.id, created_at=record.created_at, metadata=record.metadata))

    async def body_of(request: Request) -> bytes:
        return await read_body(request, serving.max_body) or b"{}"

    def position(record: ConversationRecord, id: str) -> int:
        for place, item in enumerate(record.items):
            if item["id"] == id:
                return place
        raise NotFoundError(f"no item {id[:64]!r} in this conversation")

    @routes.post(
        "/v1/conversations",
        summary="Create a conversation",
        openapi_extra=answers(Conversation, takes=ConversationRequest),
    )
    async def create(request: Request) -> Response:
        body, owner = decode(_CREATE, await body_of(request)), owner_of(request)
        items = new_items(body.items, kept, owner)
        record = ConversationRecord(item_id("conv"), int(time.time()), body.metadata or {}, items)
        kept.keep_conversation(record, owner)
        return shown(record)

    @routes.get("/v1/conversations/{id}", summary="Describe a conversation", openapi_extra=answers(Conversation))
    async def describe_conversation(request: Request, id: str) -> Response:
        return shown(kept.conversation(id, owner_of(request)))

    @routes.post(
        "/v1/conversations/{id}",
        summary="Change a conversation's metadata",
        openapi_extra=answers(Conversation, takes=MetadataUpdate),
    )
    async def update(request: Request, id: str) -> Response:
        body, record = decode(_UPDATE, await body_of(request)), kept.conversation(id, owner_of(request))
        record.metadata = body.metadata or {}
        kept.keep_conversation(record, owner_of(request))
        return shown(record)

    @routes.delete(
        "/v1/conversations/{id}", summary="Forget a conversation", openapi_extra=answers(ConversationDeleted)
    )
    async def delete(request: Request, id: str) -> Response:
        kept.conversations.delete(id, owner_of(request), "conversation")
        return reply(ConversationDeleted(id))

    @routes.post(
        "/v1/conversations/{id}/items",
        summary="Add items to a conversation",
        openapi_extra=answers(ItemList, takes=NewItemsRequest),
    )
    async def add(request: Request, id: str) -> Response:
        body, owner = decode(_ADD, await body_of(request)), owner_of(request)
        record = kept.conversation(id, owner)
        added = new_items(body.items, kept, owner)
        record.items += added
        kept.keep_conversation(record, owner)
        ends = {"first_id": added[0]["id"], "last_id": added[-1]["id"]} if added else {}
        return reply(ItemList(data=added, **ends))

    @routes.get(
        "/v1/conversations/{id}/items",
        summary="List a conversation's items",
        openapi_extra=answers(ItemList) | queried(**PAGED),
    )
    async def items(request: Request, id: str) -> Response:
        return reply(page_of_items(kept.conversation(id, owner_of(request)).items, request))

    @routes.get("/v1/conversations/{id}/items/{item}", summary="Read an item", openapi_extra=answers(ConversationItem))
    async def read_item(request: Request, id: str, item: str) -> Response:
        record = kept.conversation(id, owner_of(request))
        return reply(record.items[position(record, item)])

    @routes.delete("/v1/conversations/{id}/items/{item}", summary="Remove an item", openapi_extra=answers(Conversation))
    async def delete_item(request: Request, id: str, item: str) -> Response:
        record = kept.conversation(id, owner_of(request))
        del record.items[position(record, item)]
        kept.keep_conversation(record, owner_of(request))
        return shown(record)

    return routes
