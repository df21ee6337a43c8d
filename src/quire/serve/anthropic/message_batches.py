"""/v1/messages/batches: many messages in one request, answered in the background, their results a file of lines.

    <folder>/msgbatch_ID.json           what is known of a batch
    <folder>/msgbatch_ID.requests       its requests, one a line
    <folder>/msgbatch_ID.results        their results, in the order they were ready

What lies there when the server starts is gone on with where it stopped. Refuses to know: how a message is answered.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Annotated, Literal

import msgspec
from msgspec import Meta

from quire.serve.anthropic.messages_api import whole
from quire.serve.core.generation import Serving
from quire.serve.core.stored_records import (
    DiskFullError,
    Shares,
    created,
    disk_full,
    remembered,
    write_all,
    write_record,
)
from quire.serve.http.background_work import act_for, patiently, side_by_side
from quire.serve.http.error_bodies import describe
from quire.serve.http.http_io import NotFoundError, json
from quire.types.errors import InputError, OverloadedError

logger = logging.getLogger("quire.serve")

MAX_REQUESTS = 100_000  # of a batch, as with Anthropic
MAX_BATCHES = 10_000  # ended ones included
MAX_BYTES = 2 << 30  # of requests and results
WINDOW = 24 * 3600  # seconds a batch may take
KEPT = 29 * 24 * 3600  # ... and its results are there, from its beginning
DISK_SECONDS = 30.0  # between attempts to write to a disk that is full
_ONE_LINE = bytes.maketrans(b"\r\n", b"  ")
PATH = "/v1/messages/batches"


class BatchedMessage(msgspec.Struct, forbid_unknown_fields=True):
    custom_id: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    params: msgspec.Raw


class MessageBatchRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Body of POST /v1/messages/batches."""

    requests: Annotated[list[BatchedMessage], Meta(min_length=1, max_length=MAX_REQUESTS)]


class MessageCounts(msgspec.Struct, kw_only=True):
    processing: int = 0
    succeeded: int = 0
    errored: int = 0
    canceled: int = 0
    expired: int = 0


class MessageBatch(msgspec.Struct, kw_only=True):
    id: str
    type: Literal["message_batch"] = "message_batch"
    processing_status: Literal["in_progress", "canceling", "ended"] = "in_progress"
    request_counts: MessageCounts
    created_at: datetime
    expires_at: datetime
    ended_at: datetime | None = None
    cancel_initiated_at: datetime | None = None
    archived_at: datetime | None = None
    results_url: str | None = None


class KeptBatch(msgspec.Struct):
    """A batch as it is remembered beside its requests."""

    batch: MessageBatch
    owner: str
    size: int = 0  # bytes of its requests and results


class MessageBatches:
    """Batches of one server, in a folder; each key has its share of the room."""

    def __init__(self, serving: Serving, folder: Path):
        self._serving = serving
        self._folder = folder
        self._kept: dict[str, KeptBatch] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        shared = len(serving.keys.keys) > 1
        self._count, self._bytes = Shares(MAX_BATCHES, shared), Shares(MAX_BYTES, shared)
        found = [kept for path in folder.glob("msgbatch_*.json") if (kept := remembered(path, KeptBatch)) is not None]
        for kept in sorted(found, key=lambda kept: (kept.batch.created_at, kept.batch.id)):
            kept.size = sum(path.stat().st_size for path in self._contents(kept.batch.id))
            self._add(kept)
            if kept.batch.ended_at is None:
                self._start(kept)
        for path in [*folder.glob("msgbatch_*.requests"), *folder.glob("msgbatch_*.results")]:
            if not path.with_suffix(".json").exists():  # a killed server had not finished it
                path.unlink()

    async def create(self, body: MessageBatchRequest, owner: str) -> MessageBatch:
        self._expire()
        names = {request.custom_id for request in body.requests}
        if len(names) < len(body.requests):
            raise InputError("two requests have the same custom_id", param="requests")
        # Ends of lines in JSON are only between its parts: a string has none.
        lines = b"".join([json(request).translate(_ONE_LINE) + b"\n" for request in body.requests])
        if not (self._count.fits(owner, 1) and self._bytes.fits(owner, len(lines))):
            raise OverloadedError("there are too many batches of this key; delete some that have ended", retry_after=60)
        now = datetime.now(UTC)
        batch = MessageBatch(
            id=f"msgbatch_{uuid.uuid4().hex}",
            request_counts=MessageCounts(processing=len(body.requests)),
            created_at=now,
            expires_at=datetime.fromtimestamp(now.timestamp() + WINDOW, UTC),
        )
        kept = KeptBatch(batch, owner, len(lines))
        self._add(kept)
        try:
            await asyncio.to_thread(self._write_requests, kept, lines)
        except BaseException:
            self._remove(batch.id)
            raise
        self._start(kept)
        return batch

    def get(self, id: str, owner: str) -> MessageBatch:
        return self._find(id, owner).batch

    def listing(self, owner: str) -> list[MessageBatch]:
        """Newest first."""
        self._expire()
        found = [kept.batch for kept in self._kept.values() if kept.owner == owner]
        return sorted(found, key=lambda batch: (batch.created_at, batch.id), reverse=True)

    def cancel(self, id: str, owner: str) -> MessageBatch:
        kept = self._find(id, owner)
        batch = kept.batch
        if batch.ended_at is None and batch.cancel_initiated_at is None:
            batch.processing_status, batch.cancel_initiated_at = "canceling", datetime.now(UTC)
            if id in self._tasks:
                self._tasks[id].cancel()
            with suppress(DiskFullError):  # it is written down when it has ended
                self._save(kept)
        return batch

    def delete(self, id: str, owner: str) -> None:
        if self._find(id, owner).batch.ended_at is None:
            raise InputError(f"batch {id} has not ended; cancel it first", param="id")
        self._remove(id)

    def results(self, id: str, owner: str) -> Path:
        if self._find(id, owner).batch.ended_at is None:
            raise NotFoundError(f"batch {id} has not ended, so that there are no results yet")
        return self._path(id, "results")

    async def close(self) -> None:
        tasks = [*self._tasks.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    # ---- working off ----------------------------------------------------------------------------------------

    def _start(self, kept: KeptBatch) -> None:
        task = self._tasks[kept.batch.id] = asyncio.create_task(self._run(kept))
        task.add_done_callback(lambda _: self._tasks.pop(kept.batch.id, None))

    async def _run(self, kept: KeptBatch) -> None:
        while True:
            try:
                await self._work_off(kept)
                return
            except DiskFullError:
                logger.warning("message batch %s waits for room on the disk", kept.batch.id)
            try:
                await asyncio.sleep(DISK_SECONDS)
            except asyncio.CancelledError:
                if kept.batch.cancel_initiated_at is None:
                    return

    async def _work_off(self, kept: KeptBatch) -> None:
        batch = kept.batch
        rest, why = "canceled", b""  # what becomes of requests that are not reached
        requests: dict[str, BatchedMessage] | None = None
        try:
            requests = await asyncio.to_thread(self._unanswered, kept)
            act_for(self._serving, kept.owner, batch.id)
            left = batch.expires_at.timestamp() - time.time()
            if batch.cancel_initiated_at is None:
                async with asyncio.timeout(left), self._serving.lanes.turn(kept.owner):
                    await self._answer_all(kept, requests)
        except TimeoutError:
            rest = "expired"
        except asyncio.CancelledError:
            if batch.cancel_initiated_at is None:
                return  # the server stops; the next one goes on
        except DiskFullError:
            raise
        except Exception as error:
            rest, why = "errored", b'"error":' + describe(error).encode(PATH)
            requests = requests or {}
        if requests is None:  # it was cancelled while they were read
            requests = await asyncio.to_thread(self._unanswered, kept)
        self._finish(kept, requests, rest, why)

    async def _answer_all(self, kept: KeptBatch, requests: dict[str, BatchedMessage]) -> None:
        """Those that are answered are taken out."""
        answers = side_by_side(_each([*requests.values()]), self._answer, self._serving.lanes.at_once)
        with self._results(kept) as out:
            async with aclosing(answers) as answered:
                async for custom_id, kind, line in answered:
                    if not self._bytes.fits(kept.owner, len(line)):
                        raise OverloadedError("there is no room for more results of this key; delete some batches")
                    self._note(kept, out, kind, line)
                    del requests[custom_id]

    def _unanswered(self, kept: KeptBatch) -> dict[str, BatchedMessage]:
        """Requests without a result, by custom_id; a line that was cut off when the server died is dropped."""
        path, answered = self._path(kept.batch.id, "results"), set()
        if path.is_file():
            *lines, cut = path.read_bytes().split(b"\n")
            answered = {msgspec.json.decode(line)["custom_id"] for line in lines}
            if cut:
                os.truncate(path, sum(len(line) + 1 for line in lines))
            kept.batch.request_counts = _counted(lines, kept.batch.request_counts)
        raw = self._path(kept.batch.id, "requests").read_bytes().splitlines()
        requests = (msgspec.json.decode(line, type=BatchedMessage) for line in raw)
        return {request.custom_id: request for request in requests if request.custom_id not in answered}

    async def _answer(self, request: BatchedMessage) -> tuple[str, str, bytes]:
        """(whose it is, what became of it, its line)."""
        kind = "errored"
        try:
            raw = bytes(request.params)
            if msgspec.json.decode(raw, type=_Streams).stream:
                raise InputError("a batch is not streamed; leave stream out", param="stream")
            kind, body = "succeeded", b'"message":' + await patiently(self._serving, whole, raw)
        except Exception as error:
            body = b'"error":' + describe(error).encode(PATH)
        return request.custom_id, kind, _line(request.custom_id, kind, body)

    def _note(self, kept: KeptBatch, out: IO[bytes], kind: str, line: bytes) -> None:
        with disk_full():
            write_all(out, line)
        counts = kept.batch.request_counts
        setattr(counts, kind, getattr(counts, kind) + 1)
        counts.processing -= 1
        self._weigh(kept, len(line))

    def _finish(self, kept: KeptBatch, requests: dict[str, BatchedMessage], rest: str, why: bytes) -> None:
        """What has no result by now has one that says so."""
        with self._results(kept) as out:
            for custom_id in requests:
                self._note(kept, out, rest, _line(custom_id, rest, why))
        kept.batch.processing_status, kept.batch.ended_at = "ended", datetime.now(UTC)
        self._save(kept)
        asked = self._path(kept.batch.id, "requests")
        with suppress(FileNotFoundError):
            self._weigh(kept, -asked.stat().st_size)
            asked.unlink()

    # ---- keeping --------------------------------------------------------------------------------------------

    def _find(self, id: str, owner: str) -> KeptBatch:
        self._expire()
        kept = self._kept.get(id)
        if kept is None or kept.owner != owner:
            raise NotFoundError(f"no message batch {id[:64]!r} here")
        return kept

    def _path(self, id: str, kind: str) -> Path:
        return self._folder / f"{id}.{kind}"

    def _contents(self, id: str) -> list[Path]:
        return [path for kind in ("requests", "results") if (path := self._path(id, kind)).is_file()]

    def _results(self, kept: KeptBatch) -> IO[bytes]:
        path = self._path(kept.batch.id, "results")
        with disk_full():
            return path.open("ab", buffering=0) if path.exists() else created(path)

    def _write_requests(self, kept: KeptBatch, lines: bytes) -> None:
        with disk_full(), created(self._path(kept.batch.id, "requests")) as out:
            write_all(out, lines)
        self._save(kept)

    def _save(self, kept: KeptBatch) -> None:
        write_record(self._path(kept.batch.id, "json"), json(kept))

    def _add(self, kept: KeptBatch) -> None:
        self._kept[kept.batch.id] = kept
        self._count.take(kept.owner, 1)
        self._bytes.take(kept.owner, kept.size)

    def _weigh(self, kept: KeptBatch, more: int) -> None:
        kept.size += more
        self._bytes.take(kept.owner, more)

    def _expire(self) -> None:
        oldest = datetime.fromtimestamp(time.time() - KEPT, UTC)
        ended = [id for id, kept in self._kept.items() if kept.batch.ended_at and kept.batch.created_at < oldest]
        for id in ended:
            self._remove(id)

    def _remove(self, id: str) -> None:
        kept = self._kept.pop(id)
        self._count.take(kept.owner, -1)
        self._bytes.take(kept.owner, -kept.size)
        for kind in ("json", "requests", "results"):
            with suppress(OSError):
                self._path(id, kind).unlink(missing_ok=True)


class _Streams(msgspec.Struct):
    stream: bool | None = None


async def _each(requests: list[BatchedMessage]) -> AsyncIterator[BatchedMessage]:
    for request in requests:
        yield request


def _line(custom_id: str, kind: str, body: bytes) -> bytes:
    inner = b'{"type":%b%b}' % (json(kind), b"," + body if body else b"")
    return b'{"custom_id":%b,"result":%b}\n' % (json(custom_id), inner)


def _counted(lines: list[bytes], before: MessageCounts) -> MessageCounts:
    """The counts that results on disk amount to."""
    total = sum(getattr(before, name) for name in before.__struct_fields__)
    found = MessageCounts(processing=total - len(lines))
    for line in lines:
        kind = msgspec.json.decode(line)["result"]["type"]
        setattr(found, kind, getattr(found, kind) + 1)
    return found
