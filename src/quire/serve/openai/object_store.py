"""Things kept for callers: in memory, or in a folder that outlives the server; bounded, and each key sees its own.

When there is no more room, the oldest of whoever holds most makes room. Refuses to know: what is kept.
"""

from __future__ import annotations

import logging
import os
import re
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import msgspec
from starlette.requests import Request

from quire.serve.http.http_io import NotFoundError, json
from quire.types.errors import InputError

logger = logging.getLogger("quire.serve")

MAX_OBJECTS = 1024
MAX_BYTES = 64 << 20
MAX_OBJECT = 8 << 20  # bytes of one: reading it must not hold up others
PAGE = 20  # things in one listing, where the caller does not say
MAX_PAGE = 100
PAGED = {
    "after": {"type": "string"},
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_PAGE},
    "order": {"type": "string", "enum": ["asc", "desc"]},
}
_ID = re.compile(r"[a-z]{2,16}[-_][0-9a-f]{32}")


class ItemList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool = False


def page_of_items(items: list[dict[str, Any]], request: Request, order: str = "desc") -> ItemList:
    """The page of a listing that a request asks for; items come oldest first. `order`: where it does not say."""
    after, limit, asked = map(request.query_params.get, ("after", "limit", "order"))
    if asked not in (None, "asc", "desc"):
        raise InputError("order must be asc or desc", param="order")
    if (asked or order) == "desc":
        items = items[::-1]
    if after is not None:
        places = [place for place, item in enumerate(items) if item["id"] == after]
        items = items[places[0] + 1 :] if places else []
    limit = str(PAGE) if limit is None else limit
    if not (limit.isascii() and limit.isdigit() and len(limit) < 4 and 1 <= int(limit) <= MAX_PAGE):
        raise InputError(f"limit must be in [1, {MAX_PAGE}]", param="limit")
    size = int(limit)
    page = items[:size]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {}
    return ItemList(data=page, has_more=len(items) > size, **ends)


class _Entry(msgspec.Struct):
    owner: str
    size: int
    data: bytes | None  # None: it is in the folder


class ObjectStore:
    """JSON by id. Only the key that made a thing finds it. In a folder, each is a file of mode 0600: a line that says
    whose it is, and the thing."""

    def __init__(self, folder: Path | None = None, max_objects: int = MAX_OBJECTS, max_bytes: int = MAX_BYTES):
        self._folder = folder
        self._max = max_objects
        self._max_bytes = max_bytes
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._held: dict[str, int] = {}  # bytes by owner
        if folder is not None:
            folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.mkdir(mode=0o700, exist_ok=True)
            self._load(folder)

    def _load(self, folder: Path) -> None:
        """What an earlier server kept; what it was writing when it ended is swept away."""
        for path in folder.glob("*.part"):
            path.unlink(missing_ok=True)
        found = [path for path in folder.glob("*.json") if _ID.fullmatch(path.stem)]
        for path in sorted(found, key=lambda path: path.stat().st_mtime):
            try:
                line, _, data = path.read_bytes().partition(b"\n")
                owner = msgspec.json.decode(line, type=str)
                msgspec.json.decode(data)
            except (msgspec.DecodeError, UnicodeDecodeError):
                logger.warning("%s is damaged and left alone", path)
                continue
            self._add(path.stem, _Entry(owner, len(data), None))

    def keep(self, id: str, owner: str, data: bytes) -> None:
        """Keep a thing, in place of an earlier one of this id; one that is too large is not kept."""
        self._remove(id)
        if len(data) > min(MAX_OBJECT, self._max_bytes):
            return
        written = self._folder is not None and self._written(self._folder, id, json(owner) + b"\n" + data)
        self._add(id, _Entry(owner, len(data), None if written else data))

    def _written(self, folder: Path, id: str, data: bytes) -> bool:
        """Whether the folder has it now; if not, memory must do."""
        part = folder / f"{id}.part"
        try:
            with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(data)
            part.replace(folder / f"{id}.json")
        except OSError as error:
            logger.warning("%s cannot be written (%s): it will not outlive the server", part, error)
            with suppress(OSError):
                part.unlink(missing_ok=True)
            return False
        return True

    def find(self, id: str, owner: str) -> bytes | None:
        entry = self._entries.get(id)
        if entry is None or entry.owner != owner:
            return None
        self._entries.move_to_end(id)
        if entry.data is not None:
            return entry.data
        assert self._folder is not None
        try:
            return (self._folder / f"{id}.json").read_bytes().partition(b"\n")[2]
        except FileNotFoundError:  # somebody has tidied up
            self._remove(id)
            return None

    def get(self, id: str, owner: str, what: str) -> bytes:
        found = self.find(id, owner)
        if found is None:
            raise NotFoundError(f"no stored {what} {id[:64]!r}; it was never kept or has made room")
        return found

    def delete(self, id: str, owner: str, what: str) -> None:
        self.get(id, owner, what)
        self._remove(id)

    def ids(self, owner: str | None = None) -> list[tuple[str, str]]:
        """(id, owner) of all, or of one owner's, least recently used first."""
        return [(id, entry.owner) for id, entry in self._entries.items() if owner in (None, entry.owner)]

    def _add(self, id: str, entry: _Entry) -> None:
        self._entries[id] = entry
        self._held[entry.owner] = self._held.get(entry.owner, 0) + entry.size
        while len(self._entries) > self._max or sum(self._held.values()) > self._max_bytes:
            heaviest = max(self._held, key=lambda owner: self._held[owner])
            self._remove(next(id for id, entry in self._entries.items() if entry.owner == heaviest))

    def _remove(self, id: str) -> None:
        entry = self._entries.pop(id, None)
        if entry is None:
            return
        self._held[entry.owner] -= entry.size
        if not self._held[entry.owner]:
            del self._held[entry.owner]
        if self._folder is not None:
            (self._folder / f"{id}.json").unlink(missing_ok=True)
