"""/v1/batches: files of requests that are worked off in the background, their answers files again.

Refuses to know: how a line is answered (batch_lines), where files lie (files).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import tempfile
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.serve.core.fields import refuse_unsupported, refused
from quire.serve.core.generation import Serving
from quire.serve.http.http_io import NotFoundError, decode, json, owner_of, read_body
from quire.serve.http.openapi import answers, queried
from quire.serve.openai import file_store as files
from quire.serve.openai.batch_lines import ENDPOINTS, answer_lines, read_line
from quire.serve.openai.file_store import PAGE, FileStore, lines_of, page_of, remembered
from quire.types.errors import InputError, OverloadedError, QuireError

logger = logging.getLogger("quire.serve")

MAX_LINES = 50_000  # as with OpenAI
MAX_ACTIVE = 64  # batches not yet worked off
MAX_BATCHES = 10_000
WINDOW = 24 * 3600  # seconds a batch may take

Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]


class BatchRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/batches."""

    input_file_id: str
    endpoint: Endpoint
    completion_window: Literal["24h"]
    metadata: dict[str, str] | None = None
    output_expires_after: Annotated[Any, refused()] = None


class BatchProblem(msgspec.Struct):
    code: str | None
    message: str
    line: int | None = None
    param: str | None = None


class BatchErrors(msgspec.Struct):
    data: list[BatchProblem]
    object: Literal["list"] = "list"


class Counts(msgspec.Struct):
    total: int = 0
    completed: int = 0
    failed: int = 0


class Batch(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    input_file_id: str
    completion_window: str = "24h"
    status: str = "validating"
    created_at: int
    expires_at: int
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    errors: BatchErrors | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    request_counts: Counts = msgspec.field(default_factory=Counts)
    metadata: dict[str, str] | None = None

    @property
    def over(self) -> bool:
        return self.status in ("completed", "failed", "expired", "cancelled")


class BatchList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Batch]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool = False


class OwnedBatch(msgspec.Struct):
    batch: Batch
    owner: str


STOPPED = InputError("the server stopped before the batch was done", code="server_stopped")

_DECODER = msgspec.json.Decoder(BatchRequest)


class Batches:
    """Batches of one server, worked off one after another. They are remembered beside the files."""

    def __init__(self, serving: Serving, store: FileStore):
        self._serving = serving
        self._store = store
        self._batches: dict[str, OwnedBatch] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._turn = asyncio.Lock()
        self._closing = False
        for path in sorted(store.folder.glob("batch-*.json")):
            if (owned := remembered(path, OwnedBatch)) is not None:
                self._batches[owned.batch.id] = owned
                if not owned.batch.over:
                    self._fail(owned, STOPPED)

    def create(self, body: BatchRequest, owner: str) -> Batch:
        self._store.get(body.input_file_id, owner)
        if len(self._tasks) >= MAX_ACTIVE or len(self._batches) >= MAX_BATCHES:
            raise OverloadedError("too many batches are waiting; try again later", retry_after=60)
        now = int(time.time())
        batch = Batch(
            id=f"batch-{uuid.uuid4().hex}",
            endpoint=body.endpoint,
            input_file_id=body.input_file_id,
            created_at=now,
            expires_at=now + WINDOW,
            metadata=body.metadata,
        )
        owned = self._batches[batch.id] = OwnedBatch(batch, owner)
        self._save(owned)
        self._tasks[batch.id] = asyncio.create_task(self._run(owned))
        return batch

    def get(self, id: str, owner: str) -> Batch:
        owned = self._batches.get(id)
        if owned is None or owned.owner != owner:
            raise NotFoundError(f"no batch {id[:64]!r} here")
        return owned.batch

    def listing(self, owner: str) -> list[Batch]:
        found = (owned.batch for owned in self._batches.values() if owned.owner == owner)
        return sorted(found, key=lambda batch: (-batch.created_at, batch.id))

    def cancel(self, id: str, owner: str) -> Batch:
        batch = self.get(id, owner)
        if batch.over:
            raise InputError(f"batch {id} is {batch.status} already", param="id")
        if batch.status != "cancelling":
            batch.status, batch.cancelling_at = "cancelling", int(time.time())
            self._tasks[id].cancel()
        return batch

    async def close(self) -> None:
        self._closing = True
        for task in self._tasks.values():
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks.values())

    async def _run(self, owned: OwnedBatch) -> None:
        batch = owned.batch
        try:
            async with asyncio.timeout(WINDOW), self._turn:
                await self._validate(owned)
                batch.status, batch.in_progress_at = "in_progress", int(time.time())
                self._save(owned)
                await self._work(owned)
            batch.status, batch.completed_at = "completed", int(time.time())
        except TimeoutError:
            batch.status, batch.expired_at = "expired", int(time.time())
        except asyncio.CancelledError:
            if self._closing:
                self._fail(owned, STOPPED)
            else:
                batch.status, batch.cancelled_at = "cancelled", int(time.time())
        except QuireError as error:
            self._fail(owned, error)
        except Exception:
            logger.exception("batch %s failed", batch.id)
            self._fail(owned, QuireError("internal error; the server's log has the details under this batch's id"))
        finally:
            del self._tasks[batch.id]
            self._save(owned)

    async def _validate(self, owned: OwnedBatch) -> None:
        batch, seen = owned.batch, set()
        problems: list[BatchProblem] = []
        async with aclosing(self._lines(batch)) as lines:
            async for raw in lines:
                batch.request_counts.total += 1
                try:
                    line = read_line(raw, batch.endpoint)
                    if line.custom_id in seen:
                        raise InputError(f"custom_id {line.custom_id!r} occurs twice", param="custom_id")
                    seen.add(line.custom_id)
                except InputError as error:
                    problems.append(
                        BatchProblem(error.code, str(error)[:1000], batch.request_counts.total, error.param)
                    )
                if batch.request_counts.total > MAX_LINES:
                    raise InputError(f"a batch takes at most {MAX_LINES} lines")
                if len(problems) >= 100:
                    break
        if not batch.request_counts.total:
            raise InputError("the file is empty", code="empty_file")
        if problems:
            batch.errors = BatchErrors(problems)
            raise InputError("the file has lines that are no requests")

    def _lines(self, batch: Batch) -> AsyncGenerator[bytes, None]:
        return lines_of(self._store.path(batch.input_file_id), self._serving.max_body)

    async def _work(self, owned: OwnedBatch) -> None:
        batch, counts = owned.batch, owned.batch.request_counts
        outputs = {True: _Output(self._store, "output"), False: _Output(self._store, "error")}
        try:
            async with (
                aclosing(self._lines(batch)) as lines,
                aclosing(answer_lines(self._serving, lines, batch.endpoint)) as done,
            ):
                async for answered in done:
                    await outputs[answered.ok].write(answered.line)
                    counts.completed += answered.ok
                    counts.failed += not answered.ok
        finally:
            batch.finalizing_at = int(time.time())
            batch.output_file_id = outputs[True].keep(f"{batch.id}_output.jsonl", owned.owner)
            batch.error_file_id = outputs[False].keep(f"{batch.id}_error.jsonl", owned.owner)

    def _fail(self, owned: OwnedBatch, error: QuireError) -> None:
        batch = owned.batch
        batch.status, batch.failed_at = "failed", int(time.time())
        batch.errors = batch.errors or BatchErrors([BatchProblem(error.code, str(error)[:1000])])
        self._save(owned)

    def _save(self, owned: OwnedBatch) -> None:
        self._store.path(f"{owned.batch.id}.json").write_bytes(json(owned))


class _Output:
    """A file of answers, there once the first is written."""

    def __init__(self, store: FileStore, kind: str):
        self._store = store
        self._id = f"file-{uuid.uuid4().hex}"
        self._kind = kind
        self._target: Any = None

    async def write(self, line: bytes) -> None:
        if self._target is None:
            path = self._store.path(self._id)
            self._target = open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")  # noqa: SIM115
        self._store.room(self._target.tell() + len(line))
        await asyncio.to_thread(self._target.write, line + b"\n")

    def keep(self, name: str, owner: str) -> str | None:
        if self._target is None:
            return None
        size = self._target.tell()
        self._target.close()
        return self._store.adopt(self._id, size, name, "batch_output", owner).id


def router(serving: Serving) -> APIRouter:
    """Files too, since batches live on them."""
    kept = serving.options.files
    held = None if kept else tempfile.TemporaryDirectory(prefix="quire-files-")
    store = FileStore(Path(kept or held.name))  # type: ignore[union-attr]
    batches: list[Batches] = []

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        batches.append(Batches(serving, store))
        try:
            yield
        finally:
            await batches.pop().close()
            if held is not None:
                with contextlib.suppress(OSError):
                    held.cleanup()

    routes = APIRouter(tags=["OpenAI"], lifespan=lifespan)
    routes.include_router(files.router(serving, store))

    def reply(batch: msgspec.Struct) -> Response:
        return Response(json(batch), media_type="application/json")

    @routes.post("/v1/batches", summary="Create a batch", openapi_extra=answers(Batch, takes=BatchRequest))
    async def create(request: Request) -> Response:
        body = decode(_DECODER, await read_body(request, serving.max_body))
        refuse_unsupported(body)
        return reply(batches[0].create(body, owner_of(request)))

    @routes.get("/v1/batches", summary="List batches", openapi_extra=answers(BatchList) | queried(**PAGE))
    async def list_batches(request: Request) -> Response:
        page, about = page_of(batches[0].listing(owner_of(request)), request)
        return reply(BatchList(data=page, **about))

    @routes.get("/v1/batches/{id}", summary="Describe a batch", openapi_extra=answers(Batch))
    async def describe_batch(request: Request, id: str) -> Response:
        return reply(batches[0].get(id, owner_of(request)))

    @routes.post("/v1/batches/{id}/cancel", summary="Cancel a batch", openapi_extra=answers(Batch))
    async def cancel(request: Request, id: str) -> Response:
        return reply(batches[0].cancel(id, owner_of(request)))

    return routes


assert set(ENDPOINTS) == set(Endpoint.__args__)  # type: ignore[attr-defined]
