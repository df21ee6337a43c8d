"""Responses and conversations that may be read again, continued and referred to.

All of it is kept as JSON: as objects it would take many times the bytes that are counted. Refuses to know: how a
response came to be.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from quire.serve.http.http_io import json
from quire.serve.openai.object_store import MAX_BYTES, MAX_OBJECT, MAX_OBJECTS, ObjectStore
from quire.serve.openai.responses_bodies import InputItem
from quire.serve.openai.responses_objects import ResponseFailure, ResponseObject
from quire.types.errors import InputError

MAX_WHERE = 1 << 16  # items whose places are remembered


class ResponseRecord(msgspec.Struct):
    """One response. `history` is the whole conversation up to and with its answer, `items` what was new before it."""

    response: msgspec.Raw
    items: msgspec.Raw
    history: msgspec.Raw
    events: list[str] = []  # of one that was made in the background: what its stream said


class ConversationRecord(msgspec.Struct):
    id: str
    created_at: int
    metadata: dict[str, str]
    items: list[dict[str, Any]]


_HISTORY = msgspec.json.Decoder(list[InputItem])
_ITEMS = msgspec.json.Decoder(list[dict[str, Any]])
_RESPONSE = msgspec.json.Decoder(ResponseObject)


class Kept:
    """What one server keeps for the responses API. With a folder it outlives the server."""

    def __init__(self, folder: Path | None = None, max_objects: int = MAX_OBJECTS, max_bytes: int = MAX_BYTES):
        self.responses = ObjectStore(folder and folder / "responses", max_objects, max_bytes)
        self.conversations = ObjectStore(folder and folder / "conversations", max_objects, max_bytes)
        self._where: dict[str, tuple[ObjectStore, str]] = {}  # item → what holds it
        self._take_stock()

    def _take_stock(self) -> None:
        """Find the items of what an earlier server kept; what it had under way is over."""
        for id, owner in self.responses.ids():
            record = self._record(id, owner)
            assert record is not None
            response = _RESPONSE.decode(record.response)
            if response.status in ("queued", "in_progress"):
                response.status = "failed"
                response.error = ResponseFailure("server_error", "the server ended before the response did")
                record.response = msgspec.Raw(json(response))
                self.responses.keep(id, owner, json(record))
            self._index(self.responses, id, _ITEMS.decode(record.items) + msgspec.to_builtins(response.output))
        for id, owner in self.conversations.ids():
            found = self.conversations.find(id, owner)
            if found is not None:
                self._index(self.conversations, id, msgspec.json.decode(found, type=ConversationRecord).items)

    # ---- responses ------------------------------------------------------------------------------------------

    def keep(
        self, response: ResponseObject, owner: str, items: list[Any], history: list[Any], events: list[bytes]
    ) -> None:
        record = ResponseRecord(
            msgspec.Raw(json(response)),
            msgspec.Raw(json(items)),
            msgspec.Raw(json([*history, *items, *response.output])),
            [event.decode() for event in events],
        )
        data = json(record)
        if len(data) > MAX_OBJECT:  # what was said matters more than how it was streamed
            record.events = []
            data = json(record)
        self.responses.keep(response.id, owner, data)
        self._index(self.responses, response.id, msgspec.to_builtins([*items, *response.output]))

    def response(self, id: str, owner: str) -> ResponseRecord:
        return msgspec.json.decode(self.responses.get(id, owner, "response"), type=ResponseRecord)

    def _record(self, id: str, owner: str) -> ResponseRecord | None:
        found = self.responses.find(id, owner)
        return None if found is None else msgspec.json.decode(found, type=ResponseRecord)

    def before(self, id: str, owner: str) -> list[InputItem]:
        """The conversation that goes on from a response."""
        record = self._record(id, owner)
        if record is None:
            problem = f"no stored response {id[:64]!r}; it was never kept or has made room"
            raise InputError(problem, param="previous_response_id", code="previous_response_not_found")
        return _HISTORY.decode(record.history)

    # ---- conversations --------------------------------------------------------------------------------------

    def conversation(self, id: str, owner: str) -> ConversationRecord:
        return msgspec.json.decode(self.conversations.get(id, owner, "conversation"), type=ConversationRecord)

    def keep_conversation(self, record: ConversationRecord, owner: str) -> None:
        data = json(record)
        if len(data) > MAX_OBJECT:
            raise InputError(f"a conversation takes at most {MAX_OBJECT} bytes; begin another", param="conversation")
        self.conversations.keep(record.id, owner, data)
        self._index(self.conversations, record.id, record.items)

    # ---- items ----------------------------------------------------------------------------------------------

    def item(self, id: str, owner: str) -> InputItem | None:
        """An item of any response or conversation of this owner's."""
        store, holder = self._where.get(id, (None, ""))
        if store is None or (found := store.find(holder, owner)) is None:
            return None
        if store is self.conversations:
            items = msgspec.json.decode(found, type=ConversationRecord).items
        else:
            items = _ITEMS.decode(msgspec.json.decode(found, type=ResponseRecord).history)
        match = next((item for item in items if item.get("id") == id), None)
        return None if match is None else msgspec.convert(match, InputItem)

    def _index(self, store: ObjectStore, holder: str, items: list[dict[str, Any]]) -> None:
        for item in items:
            self._where[item["id"]] = store, holder
        while len(self._where) > MAX_WHERE:
            del self._where[next(iter(self._where))]
