"""/v1/uploads: a file in parts, which a connection's or the server's end does not lose.

Parts are files of the store until the upload is complete, so they count for their key and go when their time is up.
Refuses to know: what is in them.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import time
import uuid
from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter
from msgspec import Meta
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import Response

from quire.serve.core.context import current
from quire.serve.core.fields import noted, unused
from quire.serve.core.generation import Serving
from quire.serve.core.stored_records import Shares, created, remembered, write_record
from quire.serve.http.http_io import NotFoundError, decode, json, owner_of, read_body
from quire.serve.http.openapi import answers
from quire.serve.openai.file_store import MAX_FILE, PART, FileObject, FileStore, read_form
from quire.types.errors import InputError, OverloadedError

MAX_PENDING = 1024
MAX_PARTS = 1024  # of one upload
PART_BYTES = 64 << 20  # as with OpenAI
KEPT = 3600  # seconds an upload may take

Seconds = Annotated[int, Meta(ge=3600, le=2592000)]


class ExpiresAfter(msgspec.Struct, forbid_unknown_fields=True):
    anchor: Literal["created_at"]
    seconds: Seconds


class UploadRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/uploads."""

    bytes: Annotated[int, Meta(ge=1, le=MAX_FILE)]
    filename: Annotated[str, Meta(min_length=1, max_length=255)]
    mime_type: Annotated[str, unused("a label")]
    purpose: Literal["batch", "user_data", "assistants", "evals"]
    expires_after: ExpiresAfter | None = None


class CompleteRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/uploads/{id}/complete."""

    part_ids: Annotated[list[str], Meta(min_length=1, max_length=MAX_PARTS)]
    md5: Annotated[str, noted("of the whole, in hexadecimal digits")] | None = None


class Upload(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["upload"] = "upload"
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: Literal["pending", "completed", "cancelled", "expired"] = "pending"
    file: FileObject | None = None


class UploadPart(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["upload.part"] = "upload.part"
    created_at: int
    upload_id: str


class OwnedUpload(msgspec.Struct):
    upload: Upload
    owner: str
    seconds: int | None
    parts: list[str] = []


_CREATE, _COMPLETE = msgspec.json.Decoder(UploadRequest), msgspec.json.Decoder(CompleteRequest)


class Uploads:
    """Uploads of one server that are not complete yet, remembered beside the files."""

    def __init__(self, store: FileStore):
        self._store = store
        self._uploads: dict[str, OwnedUpload] = {}
        self._count = Shares(MAX_PENDING, store.bytes.shared)
        for path in store.folder.glob("upload-*.json"):
            if (owned := remembered(path, OwnedUpload)) is not None:
                self._uploads[owned.upload.id] = owned
                self._count.take(owned.owner, 1)

    def create(self, body: UploadRequest, owner: str) -> Upload:
        self._expire()
        if not self._count.fits(owner, 1):
            raise OverloadedError("too many uploads are not complete; complete or cancel some", retry_after=60)
        self._store.room(owner, body.bytes)
        now = int(time.time())
        upload = Upload(
            id=f"upload-{uuid.uuid4().hex}",
            bytes=body.bytes,
            created_at=now,
            expires_at=now + KEPT,
            filename=body.filename,
            purpose=body.purpose,
        )
        owned = OwnedUpload(upload, owner, body.expires_after.seconds if body.expires_after else None)
        self._save(owned)
        self._uploads[upload.id] = owned
        self._count.take(owner, 1)
        return upload

    async def add(self, request: Request, id: str, owner: str) -> UploadPart:
        owned = self._get(id, owner)
        if len(owned.parts) >= MAX_PARTS:
            raise InputError(f"an upload takes at most {MAX_PARTS} parts", param="upload_id")
        with self._store.arriving(owner) as (part, take):
            async with read_form(request, PART_BYTES + 4096, take) as form:
                data = form.get("data")
                if not isinstance(data, UploadFile):
                    raise InputError(
                        "required field 'data' is missing", param="data", code="missing_required_parameter"
                    )
                size = await asyncio.to_thread(self._store.write, part, data.file)
            self._get(id, owner)  # it may have been cancelled meanwhile
            if self._held(owned) + size > owned.upload.bytes:
                raise InputError(f"the parts come to more than the {owned.upload.bytes} bytes announced", param="data")
            left = max(1, owned.upload.expires_at - int(time.time()))
            self._store.adopt(part, size, "part", PART, owner, left)
        owned.parts.append(part)
        self._save(owned)
        return UploadPart(id=_public(part), created_at=int(time.time()), upload_id=id)

    async def complete(self, body: CompleteRequest, id: str, owner: str) -> Upload:
        owned = self._get(id, owner)
        files = [_file(part) for part in body.part_ids]
        if unknown := [part for part in body.part_ids if _file(part) not in owned.parts]:
            raise InputError(f"no part {unknown[0][:64]!r} of this upload", param="part_ids")
        size = sum(self._store.get(file, owner).bytes for file in files)
        if size != owned.upload.bytes:
            raise InputError(f"the parts have {size} bytes, {owned.upload.bytes} were announced", param="part_ids")
        with self._store.arriving(owner) as (whole, take):
            take(size)
            found = await asyncio.to_thread(self._join, files, whole)
            if body.md5 is not None and body.md5.lower() != found:
                raise InputError(f"the parts have the md5 {found}, not the one given", param="md5")
            self._get(id, owner)
            upload = owned.upload
            upload.file = self._store.adopt(whole, size, upload.filename, upload.purpose, owner, owned.seconds)
        upload.status = "completed"
        self._forget(id)
        return upload

    def cancel(self, id: str, owner: str) -> Upload:
        upload = self._get(id, owner).upload
        upload.status = "cancelled"
        self._forget(id)
        return upload

    def _join(self, files: list[str], whole: str) -> str:
        """Write the parts one after another; returns the md5 of it all."""
        with created(self._store.path(whole), buffering=1 << 20) as target:
            for file in files:
                with self._store.path(file).open("rb") as source:
                    shutil.copyfileobj(source, target)
        with self._store.path(whole).open("rb") as joined:
            return hashlib.file_digest(joined, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()

    def _held(self, owned: OwnedUpload) -> int:
        return sum(self._store.get(part, owned.owner).bytes for part in owned.parts)

    def _get(self, id: str, owner: str) -> OwnedUpload:
        self._expire()
        owned = self._uploads.get(id)
        if owned is None or owned.owner != owner:
            raise NotFoundError(f"no upload {id[:64]!r} under way here")
        return owned

    def _expire(self) -> None:
        now = time.time()
        for id in [id for id, owned in self._uploads.items() if owned.upload.expires_at <= now]:
            self._forget(id)

    def _save(self, owned: OwnedUpload) -> None:
        write_record(self._store.path(f"{owned.upload.id}.json"), json(owned))

    def _forget(self, id: str) -> None:
        owned = self._uploads.pop(id)
        self._count.take(owned.owner, -1)
        for part in owned.parts:
            self._store.discard(part)
        self._store.path(f"{id}.json").unlink(missing_ok=True)


def _public(file: str) -> str:
    return file.replace("file-", "part-", 1)


def _file(part: str) -> str:
    return part.replace("part-", "file-", 1)


_FORM = {
    "type": "object",
    "required": ["data"],
    "additionalProperties": False,
    "properties": {"data": {"type": "string", "format": "binary"}},
}


def router(serving: Serving, store: FileStore) -> APIRouter:
    routes = APIRouter(tags=["OpenAI"])
    uploads = Uploads(store)
    takes_form = {"required": True, "content": {"multipart/form-data": {"schema": _FORM}}}

    def reply(body: msgspec.Struct) -> Response:
        return Response(json(body), media_type="application/json")

    @routes.post("/v1/uploads", summary="Begin an upload in parts", openapi_extra=answers(Upload, takes=UploadRequest))
    async def create(request: Request) -> Response:
        body = decode(_CREATE, await read_body(request, serving.max_body))
        return reply(uploads.create(body, owner_of(request)))

    @routes.post(
        "/v1/uploads/{id}/parts", summary="Add a part", openapi_extra={**answers(UploadPart), "requestBody": takes_form}
    )
    async def add(request: Request, id: str) -> Response:
        if (permit := current().permit) is not None:
            serving.admission.start(permit)  # it waits for its sender, not for the engine
        return reply(await uploads.add(request, id, owner_of(request)))

    @routes.post(
        "/v1/uploads/{id}/complete",
        summary="Make a file of the parts",
        openapi_extra=answers(Upload, takes=CompleteRequest),
    )
    async def complete(request: Request, id: str) -> Response:
        body = decode(_COMPLETE, await read_body(request, serving.max_body))
        return reply(await uploads.complete(body, id, owner_of(request)))

    @routes.post("/v1/uploads/{id}/cancel", summary="Cancel an upload", openapi_extra=answers(Upload))
    async def cancel(request: Request, id: str) -> Response:
        return reply(uploads.cancel(id, owner_of(request)))

    return routes
