"""/v1/batches: files of requests that are worked off in the background, their answers files again.

A batch that the server's end cut short goes on at the next start, where it was. Refuses to know: whose turn it is
(background_lanes), how a line is answered (batch_lines), where files lie (file_store).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import tempfile
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.serve.core.generation import Serving
from quire.serve.core.stored_records import (
    PREFIX,
    DiskFullError,
    Shares,
    remembered,
    sweep_temporary,
    write_record,
)
from quire.serve.http.background_work import act_for
from quire.serve.http.http_io import NotFoundError, decode, json, owner_of, read_body
from quire.serve.http.openapi import answers, queried
from quire.serve.openai import file_store as files
from quire.serve.openai import upload_parts
from quire.serve.openai.batch_bodies import (
    Batch,
    BatchDeleted,
    BatchErrors,
    BatchList,
    BatchProblem,
    BatchRequest,
    Counts,
    Endpoint,
    OwnedBatch,
)
from quire.serve.openai.batch_lines import ENDPOINTS, answer_lines, lines_of, note_id, read_line
from quire.serve.openai.batch_outputs import Output, outputs_in, unanswered
from quire.serve.openai.file_store import PAGE, FileStore, page_of
from quire.types.errors import InputError, OverloadedError, QuireError

logger = logging.getLogger("quire.serve")

MAX_LINES = 50_000  # as with OpenAI
MAX_ACTIVE = 64  # batches not yet worked off
MAX_BATCHES = 10_000  # remembered
MAX_RECORDS = 16 << 20  # bytes of what is remembered of them
RECORD = 1024  # bytes that a record counts beside its own
WINDOW = 24 * 3600  # seconds a batch may take
KEPT = 30 * 24 * 3600  # seconds that one which is over is remembered, if it does not have to make room

_DECODER = msgspec.json.Decoder(BatchRequest)


class Batches:
    """Batches of one server, remembered beside the files."""

    def __init__(self, serving: Serving, store: FileStore):
        self._serving = serving
        self._store = store
        self._batches: dict[str, OwnedBatch] = {}
        self._sizes: dict[str, int] = {}  # what each record counts
        self._unsaved: dict[str, OwnedBatch] = {}  # whose record the disk had no room for
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._closing = False
        shared = store.bytes.shared
        self._active, self._count = Shares(MAX_ACTIVE, shared), Shares(MAX_BATCHES, shared)
        self._records = Shares(MAX_RECORDS, shared)
        found = [owned for path in store.folder.glob("batch-*.json") if (owned := remembered(path, OwnedBatch))]
        for owned in sorted(found, key=lambda owned: (owned.batch.created_at, owned.batch.id)):
            if not owned.batch.over:
                owned.outputs = owned.outputs or _new_outputs()  # as records of older versions are
            self._add(owned)
            if not owned.batch.over:
                self._begin(owned)
            elif any(store.unknown(id) for id in owned.outputs.values()):
                self._keep(owned, self._outputs(owned))  # the disk was full
        self._expire()

    def create(self, body: BatchRequest, owner: str) -> Batch:
        self._store.get(body.input_file_id, owner)
        if not self._active.fits(owner, 1):
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
        expiry = body.output_expires_after.seconds if body.output_expires_after else None
        owned = OwnedBatch(batch, owner, _new_outputs(), expiry)
        self._make_room(owner, len(json(owned)) + RECORD)
        write_record(self._path(batch.id), json(owned))
        self._add(owned)
        self._begin(owned)
        return batch

    def get(self, id: str, owner: str) -> Batch:
        self._expire()
        owned = self._batches.get(id)
        if owned is None or owned.owner != owner:
            raise NotFoundError(f"no batch {id[:64]!r} here")
        return owned.batch

    def listing(self, owner: str) -> list[Batch]:
        """Newest first."""
        self._expire()
        return [owned.batch for owned in reversed(self._batches.values()) if owned.owner == owner]

    def cancel(self, id: str, owner: str) -> Batch:
        batch = self.get(id, owner)
        if batch.over:
            raise InputError(f"batch {id} is {batch.status} already", param="id")
        if batch.status != "cancelling":
            batch.status, batch.cancelling_at = "cancelling", int(time.time())
            self._tasks[id].cancel()
        return batch

    def delete(self, id: str, owner: str) -> None:
        """Forget a batch that is over; its files stay."""
        if not self.get(id, owner).over:
            raise InputError(f"batch {id} is not over; cancel it first", param="id")
        self._forget(id)

    async def close(self) -> None:
        self._closing = True
        self._save_rest()
        for task in self._tasks.values():
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks.values())

    # ---- records --------------------------------------------------------------------------------------------

    def _path(self, id: str) -> Path:
        return self._store.path(f"{id}.json")

    def _add(self, owned: OwnedBatch) -> None:
        self._batches[owned.batch.id] = owned
        self._sizes[owned.batch.id] = 0
        self._count.take(owned.owner, 1)
        self._weigh(owned, json(owned))

    def _weigh(self, owned: OwnedBatch, record: bytes) -> None:
        """A record counts as storage, and as memory."""
        id, size = owned.batch.id, len(record) + RECORD
        for share in (self._records, self._store.bytes):
            share.take(owned.owner, size - self._sizes[id])
        self._sizes[id] = size

    def _save(self, owned: OwnedBatch) -> None:
        record = json(owned)
        self._weigh(owned, record)
        self._unsaved.pop(owned.batch.id, None)
        try:
            write_record(self._path(owned.batch.id), record)
        except (DiskFullError, OSError) as error:  # what is known in memory still is, and written when there is room
            logger.warning("%s could not be written down: %s", owned.batch.id, error)
            self._unsaved[owned.batch.id] = owned

    def _forget(self, id: str) -> None:
        owned = self._batches.pop(id)
        self._count.take(owned.owner, -1)
        for share in (self._records, self._store.bytes):
            share.take(owned.owner, -self._sizes[id])
        del self._sizes[id]
        self._unsaved.pop(id, None)
        self._path(id).unlink(missing_ok=True)

    def _save_rest(self) -> None:
        for owned in [*self._unsaved.values()]:
            self._save(owned)

    def _expire(self) -> None:
        self._save_rest()
        until = time.time() - KEPT
        for owned in [owned for owned in self._batches.values() if 0 < owned.batch.ended < until]:
            self._forget(owned.batch.id)

    def _make_room(self, owner: str, size: int) -> None:
        """The key's oldest batches that are over go, or it raises."""
        self._expire()
        over = (id for id, owned in [*self._batches.items()] if owned.owner == owner and owned.batch.over)
        while not (self._count.fits(owner, 1) and self._records.fits(owner, size)):
            if (oldest := next(over, None)) is None:
                raise OverloadedError("too many batches are waiting; try again later", retry_after=60)
            self._forget(oldest)
        self._store.room(owner, size, files=0)

    # ---- work -----------------------------------------------------------------------------------------------

    def _begin(self, owned: OwnedBatch) -> None:
        self._active.take(owned.owner, 1)
        self._tasks[owned.batch.id] = asyncio.create_task(self._run(owned))

    async def _run(self, owned: OwnedBatch) -> None:
        batch, saved = owned.batch, True
        try:
            if batch.status == "cancelling":  # when the server ended
                raise asyncio.CancelledError
            act_for(self._serving, owned.owner, batch.id)
            async with asyncio.timeout(batch.expires_at - time.time()), self._serving.lanes.turn(owned.owner):
                await self._validate(owned)
                batch.status, batch.in_progress_at = "in_progress", batch.in_progress_at or int(time.time())
                self._save(owned)
                await self._work(owned)
            batch.status, batch.completed_at = "completed", int(time.time())
        except TimeoutError:
            batch.status, batch.expired_at = "expired", int(time.time())
        except asyncio.CancelledError:
            saved = not self._closing or batch.status == "cancelling"
            if not self._closing:
                batch.status, batch.cancelled_at = "cancelled", int(time.time())
        except QuireError as error:
            self._fail(owned, error)
        except Exception:
            logger.exception("batch %s failed", batch.id)
            self._fail(owned, QuireError("internal error; the server's log has the details under this batch's id"))
        finally:
            del self._tasks[batch.id]
            self._active.take(owned.owner, -1)
            if batch.over and not batch.finalizing_at:  # it ended before it went on
                self._keep(owned, self._outputs(owned))
            if saved:
                self._save(owned)

    async def _validate(self, owned: OwnedBatch) -> None:
        batch, seen = owned.batch, set[str]()
        batch.request_counts = Counts()
        problems: list[BatchProblem] = []
        async with aclosing(self._lines(batch)) as lines:
            async for raw in lines:
                batch.request_counts.total += 1
                try:
                    line = read_line(raw, batch.endpoint)
                    note_id(line.custom_id, seen)
                except InputError as error:
                    problems.append(BatchProblem(error.code, str(error)[:200], batch.request_counts.total, error.param))
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
        self._store.get(batch.input_file_id, self._batches[batch.id].owner)  # it may have been deleted since
        return lines_of(self._store.path(batch.input_file_id), self._serving.max_body)

    def _outputs(self, owned: OwnedBatch) -> dict[bool, Output]:
        kinds = {True: "output", False: "error"}
        return {ok: Output(self._store, owned.outputs[kind], owned.owner) for ok, kind in kinds.items()}

    async def _work(self, owned: OwnedBatch) -> None:
        batch, counts = owned.batch, owned.batch.request_counts
        at_once = self._serving.lanes.at_once
        outputs = self._outputs(owned)
        done = {ok: await asyncio.to_thread(output.answered) for ok, output in outputs.items()}
        counts.completed, counts.failed = len(done[True]), len(done[False])
        try:
            async with (
                aclosing(self._lines(batch)) as lines,
                aclosing(unanswered(lines, done[True] | done[False])) as left,
                aclosing(answer_lines(self._serving, left, batch.endpoint, at_once)) as answered_lines,
            ):
                async for answered in answered_lines:
                    await outputs[answered.ok].write(answered.line)
                    counts.completed += answered.ok
                    counts.failed += not answered.ok
        finally:
            if self._closing and batch.status != "cancelling":
                for output in outputs.values():
                    output.close()  # to go on with
            else:
                self._keep(owned, outputs)

    def _keep(self, owned: OwnedBatch, outputs: dict[bool, Output]) -> None:
        batch = owned.batch
        batch.finalizing_at = batch.finalizing_at or int(time.time())
        batch.output_file_id = outputs[True].keep(f"{batch.id}_output.jsonl", owned.expiry)
        batch.error_file_id = outputs[False].keep(f"{batch.id}_error.jsonl", owned.expiry)

    def _fail(self, owned: OwnedBatch, error: QuireError) -> None:
        batch = owned.batch
        batch.status, batch.failed_at = "failed", int(time.time())
        batch.errors = batch.errors or BatchErrors([BatchProblem(error.code, str(error)[:1000])])


def _new_outputs() -> dict[str, str]:
    return {kind: f"file-{uuid.uuid4().hex}" for kind in ("output", "error")}


def router(serving: Serving) -> APIRouter:
    """Files and uploads too, since batches live on them."""
    kept = serving.options.files
    if not kept:
        sweep_temporary()
    held = None if kept else tempfile.TemporaryDirectory(prefix=PREFIX)
    folder = Path(kept or held.name)  # type: ignore[union-attr]
    store = FileStore(folder, shared=len(serving.keys.keys) > 1, spared=outputs_in)
    batches: list[Batches] = []

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        batches.append(Batches(serving, store))
        try:
            yield
        finally:
            await batches.pop().close()
            store.close()
            if held is not None:
                with contextlib.suppress(OSError):
                    held.cleanup()

    routes = APIRouter(tags=["OpenAI"], lifespan=lifespan)
    routes.include_router(files.router(serving, store))
    routes.include_router(upload_parts.router(serving, store))

    def reply(batch: msgspec.Struct) -> Response:
        return Response(json(batch), media_type="application/json")

    @routes.post("/v1/batches", summary="Create a batch", openapi_extra=answers(Batch, takes=BatchRequest))
    async def create(request: Request) -> Response:
        body = decode(_DECODER, await read_body(request, serving.max_body))
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

    @routes.delete("/v1/batches/{id}", summary="Forget a batch that is over", openapi_extra=answers(BatchDeleted))
    async def delete(request: Request, id: str) -> Response:
        batches[0].delete(id, owner_of(request))
        return reply(BatchDeleted(id))

    return routes


assert set(ENDPOINTS) == set(Endpoint.__args__)  # type: ignore[attr-defined]
