"""Files that clients upload and batches write, under /v1/files: on disk, bounded in number and size.

Refuses to know: what is in them.
"""

from __future__ import annotations

import asyncio
import logging
import re
import shutil
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import IO, Any, Literal

import msgspec
from fastapi import APIRouter
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.types import Message

from quire.serve.core.context import current
from quire.serve.core.generation import Serving
from quire.serve.core.stored_records import (
    DiskFullError,
    Shares,
    created,
    disk_full,
    open_folder,
    remembered,
    write_record,
)
from quire.serve.http.http_io import BODY_SECONDS, BodyTooLargeError, BodyTooSlowError, NotFoundError, json, owner_of
from quire.serve.http.openapi import answers, queried
from quire.types.errors import InputError, OverloadedError

logger = logging.getLogger("quire.serve")

MAX_FILE = 200 << 20  # bytes of one file, as with OpenAI's batches
MAX_STORE = 2 << 30  # bytes of all of them
MAX_FILES = 10_000
MAX_UPLOADS = 64  # under way at once; the first MiB of each is in memory
MIN_RATE = 256 << 10  # bytes a second that an upload has to keep up, after BODY_SECONDS of grace
MAX_PAGE = 10_000  # entries of one listing
PAGE_BYTES = 1 << 20  # ... and what they may come to; `has_more` says that others follow
PART = "upload_part"  # purpose of files that are parts of one to come, and in no listing
_ID = re.compile(r"(file|batch)-[0-9a-f]{32}")


class FileObject(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"
    expires_at: int | None = None


class FileList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[FileObject]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool = False


class FileDeleted(msgspec.Struct):
    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


class Owned(msgspec.Struct):
    """A file as it is remembered beside its content."""

    file: FileObject
    owner: str


class FileStore:
    """Files in a folder that nobody else may read, each beside what is known of it. What lies there when the store
    is opened is found again. Only the key that made a file finds it; `shared`: there may be others, and each has its
    share. What is `spared` at the start is left alone, though nothing is known of it."""

    def __init__(
        self,
        folder: Path,
        max_bytes: int = MAX_STORE,
        max_files: int = MAX_FILES,
        *,
        shared: bool = False,
        spared: Callable[[Path], set[str]] = lambda _: set(),
    ):
        self.folder = folder
        self._lock = open_folder(folder)
        self.bytes = Shares(max_bytes, shared)  # those of files under way included
        self._count = Shares(max_files, shared)  # those under way included
        self._arriving = Shares(MAX_UPLOADS, shared)
        self._files: dict[str, Owned] = {}
        found = [owned for path in folder.glob("file-*.json") if (owned := remembered(path, Owned)) is not None]
        for owned in sorted(found, key=lambda owned: (owned.file.created_at, owned.file.id)):
            if _ID.fullmatch(owned.file.id) and self.path(owned.file.id).is_file():
                self._files[owned.file.id] = owned
                self._take(owned.owner, owned.file.bytes, 1)
        self._sweep(spared(folder))

    def _sweep(self, spared: set[str]) -> None:
        """Remove what a server that was killed had not finished: contents without a record, records without content."""
        known = self._files.keys() | spared
        for path in self.folder.iterdir():
            kind = _ID.match(path.name)
            if path.suffix == ".tmp" or (kind and kind[1] == "file" and kind[0] not in known and _whole(path)):
                logger.info("%s was left behind and is removed", path)
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Another may use the folder."""
        self._lock.close()

    @property
    def used(self) -> int:
        return self.bytes.total

    def path(self, id: str) -> Path:
        return self.folder / id

    def room(self, owner: str, size: int, files: int = 1) -> None:
        """Raise unless `size` more bytes in so many more files fit."""
        if not self._fits(owner, size, files):
            self._expire()
        if not self._fits(owner, size, files):
            whose = "this key's share of the file store" if self.bytes.shared else "the file store"
            raise OverloadedError(f"{whose} is full; delete files that are no longer needed", retry_after=60)

    def _fits(self, owner: str, size: int, files: int) -> bool:
        return self._count.fits(owner, files) and self.bytes.fits(owner, size)

    def _take(self, owner: str, size: int, files: int) -> None:
        self.bytes.take(owner, size)
        self._count.take(owner, files)

    @contextmanager
    def arriving(self, owner: str) -> Iterator[tuple[str, Callable[[int], None]]]:
        """Room for a file under way: its id, and a function that takes so many bytes more, or raises. All is given
        back at the end; by then the file is adopted, or what there is of it is removed."""
        if not self._arriving.fits(owner, 1):
            raise OverloadedError("too many files are being sent; try again later", retry_after=5)
        self.room(owner, 0)
        id, taken = f"file-{uuid.uuid4().hex}", 0

        def take(size: int) -> None:
            nonlocal taken
            self.room(owner, size, files=0)
            taken += size
            self.bytes.take(owner, size)

        self._arriving.take(owner, 1)
        self._count.take(owner, 1)
        try:
            with disk_full():
                yield id, take
        finally:
            self._arriving.take(owner, -1)
            self._take(owner, -taken, -1)
            if id not in self._files:
                self.path(id).unlink(missing_ok=True)

    def write(self, id: str, source: IO[bytes]) -> int:
        """Copy a stream into the store, to be adopted; returns its size."""
        with created(self.path(id), buffering=1 << 20) as target:
            shutil.copyfileobj(source, target)
            return target.tell()

    def adopt(
        self,
        id: str,
        size: int,
        filename: str,
        purpose: str,
        owner: str,
        seconds: int | None = None,
        *,
        anyway: bool = False,
    ) -> FileObject:
        """Remember a file whose content is there already; `anyway`: for now, if the disk has no room for the record."""
        now = int(time.time())
        expires = now + seconds if seconds else None
        file = FileObject(
            id=id, bytes=size, created_at=now, filename=filename[:255], purpose=purpose, expires_at=expires
        )
        owned = Owned(file, owner)
        try:
            write_record(self.path(f"{id}.json"), json(owned))
        except DiskFullError:
            if not anyway:
                raise
        self._files[id] = owned
        self._take(owner, size, 1)
        return file

    def unknown(self, id: str) -> bool:
        """Whether there is a content that no file has."""
        return id not in self._files and self.path(id).exists()

    def get(self, id: str, owner: str) -> FileObject:
        self._expire()
        owned = self._files.get(id)
        if owned is None or owned.owner != owner:
            raise NotFoundError(f"no file {id[:64]!r} here")
        return owned.file

    def delete(self, id: str, owner: str) -> None:
        self.get(id, owner)
        self._remove(id)

    def discard(self, id: str) -> None:
        """Remove a file, if it is there."""
        if id in self._files:
            self._remove(id)

    def listing(self, owner: str) -> list[FileObject]:
        """Newest first."""
        self._expire()
        mine = (owned.file for owned in reversed(self._files.values()) if owned.owner == owner)
        return [file for file in mine if file.purpose != PART]

    def _expire(self) -> None:
        now = time.time()
        for id in [id for id, owned in self._files.items() if owned.file.expires_at and owned.file.expires_at < now]:
            self._remove(id)

    def _remove(self, id: str) -> None:
        owned = self._files.pop(id)
        self._take(owned.owner, -owned.file.bytes, -1)
        self.path(f"{id}.json").unlink(missing_ok=True)
        self.path(id).unlink(missing_ok=True)


def _whole(path: Path) -> bool:
    """Whether all of its name is an id's: nothing else in the folder is ours to remove."""
    return _ID.fullmatch(path.name.removesuffix(".json")) is not None


@asynccontextmanager
async def read_form(request: Request, limit: int, take: Callable[[int], None]) -> AsyncGenerator[dict[str, Any], None]:
    """The fields of a multipart form, refused as soon as it is known to be longer than `limit` bytes, when it comes
    too slowly, or when `take`, which is told of all bytes before they are written anywhere, refuses them."""
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise InputError("send the file as multipart/form-data", code="invalid_content_type")
    began, size = asyncio.get_running_loop().time(), 0

    async def receive() -> Message:
        nonlocal size
        message = await request.receive()
        more = len(message.get("body", b""))
        size += more
        if size > limit:
            raise BodyTooLargeError(f"the form is larger than the limit of {limit} bytes")
        take(more)
        deadline.reschedule(began + BODY_SECONDS + size / MIN_RATE)
        return message

    try:
        async with asyncio.timeout(BODY_SECONDS) as deadline:
            form = await Request(request.scope, receive).form(max_files=1, max_fields=8, max_part_size=4096)
    except TimeoutError:
        raise BodyTooSlowError(f"the form came too slowly, {size} bytes of it so far") from None
    try:
        yield dict(form)
    finally:
        await form.close()


async def upload(request: Request, store: FileStore) -> FileObject:
    owner = owner_of(request)
    with store.arriving(owner) as (id, take):
        async with read_form(request, MAX_FILE, take) as form:
            file, purpose, seconds = _fields(form)
            size = await asyncio.to_thread(store.write, id, file.file)
        return store.adopt(id, size, file.filename or "file", purpose, owner, seconds)


def _fields(form: dict[str, Any]) -> tuple[UploadFile, str, int | None]:
    """(the file, its purpose, the seconds it is kept)."""
    if strange := set(form) - {"file", "purpose", "expires_after[anchor]", "expires_after[seconds]"}:
        raise InputError(f"unknown field {min(strange)!r}", param=min(strange)[:64], code="unknown_parameter")
    file, purpose = form.get("file"), form.get("purpose")
    if not isinstance(file, UploadFile):
        raise InputError("required field 'file' is missing", param="file", code="missing_required_parameter")
    if purpose not in ("batch", "user_data", "assistants", "evals"):
        raise InputError("purpose must be batch, user_data, assistants or evals", param="purpose")
    return file, purpose, _expiry(form)


def _expiry(form: dict[str, Any]) -> int | None:
    anchor, seconds = form.get("expires_after[anchor]"), form.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise InputError("expires_after[anchor] must be created_at", param="expires_after[anchor]")
    text = str(seconds)
    if not (text.isascii() and text.isdigit() and len(text) < 8 and 3600 <= int(text) <= 2592000):
        raise InputError("expires_after[seconds] must be in [3600, 2592000]", param="expires_after[seconds]")
    return int(text)


PAGE = {
    "after": {"type": "string"},
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_PAGE},
    "order": {"type": "string", "enum": ["asc", "desc"]},
}


def page_of(items: list[Any], request: Request) -> tuple[list[Any], dict[str, Any]]:
    """(the page of a listing that a request asks for, what to say of it); items come newest first."""
    after, limit, order = map(request.query_params.get, ("after", "limit", "order"))
    if order not in (None, "asc", "desc"):
        raise InputError("order must be asc or desc", param="order")
    if order == "asc":
        items = items[::-1]
    if after is not None:
        places = [place for place, item in enumerate(items) if item.id == after]
        items = items[places[0] + 1 :] if places else []
    size = MAX_PAGE
    if limit is not None:
        if not (limit.isascii() and limit.isdigit() and len(limit) < 6 and 1 <= int(limit) <= MAX_PAGE):
            raise InputError(f"limit must be in [1, {MAX_PAGE}]", param="limit")
        size = int(limit)
    page: list[Any] = []
    room = PAGE_BYTES
    for item in items[:size]:
        room -= len(json(item))
        if page and room < 0:
            break
        page.append(item)
    ends = {"first_id": page[0].id, "last_id": page[-1].id} if page else {}
    return page, {"has_more": len(items) > len(page), **ends}


_FORM = {
    "type": "object",
    "required": ["file", "purpose"],
    "additionalProperties": False,
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"type": "string", "enum": ["batch", "user_data", "assistants", "evals"]},
        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 2592000},
    },
}


def router(serving: Serving, store: FileStore) -> APIRouter:
    routes = APIRouter(tags=["OpenAI"])
    takes_form = {"required": True, "content": {"multipart/form-data": {"schema": _FORM}}}

    @routes.post("/v1/files", summary="Upload a file", openapi_extra={**answers(FileObject), "requestBody": takes_form})
    async def create(request: Request) -> Response:
        if (permit := current().permit) is not None:
            serving.admission.start(permit)  # it waits for its sender, not for the engine
        return Response(json(await upload(request, store)), media_type="application/json")

    @routes.get(
        "/v1/files",
        summary="List files",
        openapi_extra=answers(FileList) | queried(purpose={"type": "string"}, **PAGE),
    )
    async def list_files(request: Request) -> Response:
        purpose = request.query_params.get("purpose")
        found = [file for file in store.listing(owner_of(request)) if purpose in (None, file.purpose)]
        page, about = page_of(found, request)
        return Response(json(FileList(data=page, **about)), media_type="application/json")

    @routes.get("/v1/files/{id}", summary="Describe a file", openapi_extra=answers(FileObject))
    async def describe_file(request: Request, id: str) -> Response:
        return Response(json(store.get(id, owner_of(request))), media_type="application/json")

    @routes.delete("/v1/files/{id}", summary="Delete a file", openapi_extra=answers(FileDeleted))
    async def delete(request: Request, id: str) -> Response:
        store.delete(id, owner_of(request))
        return Response(json(FileDeleted(id)), media_type="application/json")

    @routes.get(
        "/v1/files/{id}/content",
        summary="Read a file",
        openapi_extra=answers(None, media="application/octet-stream"),
    )
    async def content(request: Request, id: str) -> Response:
        store.get(id, owner_of(request))
        return FileResponse(store.path(id), media_type="application/octet-stream")

    return routes
