"""Responses that may be read again and continued: in memory, bounded in number and size, the oldest make room.

Refuses to know: how a response came to be.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from quire.serve.http.http_io import NotFoundError

MAX_RESPONSES = 1024
MAX_BYTES = 64 << 20


@dataclass(frozen=True)
class Stored:
    """One response, all of it JSON: as objects it would take many times the bytes that are counted."""

    response: bytes
    messages: bytes  # the whole conversation, the answer included
    items: bytes  # the listing of the input
    owner: str

    @property
    def size(self) -> int:
        return len(self.response) + len(self.messages) + len(self.items)


class ResponseStore:
    """Only the key that made a response finds it."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES):
        self._kept: OrderedDict[str, Stored] = OrderedDict()
        self._max = max_responses
        self._max_bytes = max_bytes
        self._bytes = 0

    def keep(self, id: str, stored: Stored) -> None:
        if stored.size > self._max_bytes:
            return
        self._kept[id] = stored
        self._bytes += stored.size
        while len(self._kept) > self._max or self._bytes > self._max_bytes:
            self._bytes -= self._kept.popitem(last=False)[1].size

    def find(self, id: str, owner: str) -> Stored | None:
        found = self._kept.get(id)
        if found is None or found.owner != owner:
            return None
        self._kept.move_to_end(id)
        return found

    def get(self, id: str, owner: str) -> Stored:
        found = self.find(id, owner)
        if found is None:
            raise NotFoundError(f"no stored response {id!r}; it was never kept or has made room")
        return found

    def delete(self, id: str, owner: str) -> None:
        self._bytes -= self.get(id, owner).size
        del self._kept[id]
