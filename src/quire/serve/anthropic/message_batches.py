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
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from quire.serve.anthropic.messages_api import whole
from quire.serve.core import prepare_pool
from quire.serve.core.api_keys import OPEN_KEY, Key
from quire.serve.core.context import Context, enter
from quire.serve.core.generation import Serving
from quire.serve.http.auth import own_place, salt_of
from quire.serve.http.error_bodies import describe
from quire.serve.http.http_io import NotFoundError, json
from quire.types.errors import EngineDeadError, InputError, OverloadedError

logger = logging.getLogger("quire.serve")

AT_ONCE = 32  # requests of a batch in the engine together
MAX_REQUESTS = 100_000  # of a batch, as with Anthropic
MAX_BATCHES = 1000  # of one key, ended ones included
MAX_BYTES = 1 << 30  # of one key's batches: requests and results
MAX_DEATHS = 10  # engines a request may lose before it is given up
WINDOW = 24 * 3600  # seconds a batch may take
KEPT = 29 * 24 * 3600  # ... and its results are there, from its beginning
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
    """Batches of one server. Those of one key are worked off one after another, those of several side by side."""

    def __init__(self, serving: Serving, folder: Path):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._serving = serving
        self._folder = folder
        self._kept: dict[str, KeptBatch] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._turns: dict[str, asyncio.Lock] = {}
        for path in sorted(folder.glob("msgbatch_*.json")):
            try:
                kept = msgspec.json.decode(path.read_bytes(), type=KeptBatch)
            except msgspec.DecodeError:
                logger.warning("%s is damaged and left alone", path)
                continue
            self._kept[kept.batch.id] = kept
        keys = {key.name: key for key in (*serving.keys.keys, *([OPEN_KEY] if serving.keys.open else []))}
        for kept in sorted(self._kept.values(), key=lambda kept: kept.batch.created_at):
            if kept.batch.ended_at is None and (key := keys.get(kept.owner)) is not None:
                self._start(kept, key)

    def create(self, body: MessageBatchRequest, key: Key) -> MessageBatch:
        self._expire()
        names = {request.custom_id for request in body.requests}
        if len(names) < len(body.requests):
            raise InputError("two requests have the same custom_id", param="requests")
        mine = [kept for kept in self._kept.values() if kept.owner == key.name]
        # Ends of lines in JSON are only between its parts: a string has none.
        lines = b"".join([json(request).translate(_ONE_LINE) + b"\n" for request in body.requests])
        if len(mine) >= MAX_BATCHES or sum(kept.size for kept in mine) + len(lines) > MAX_BYTES:
            raise OverloadedError("there are too many batches of this key; delete some that have ended", retry_after=60)
        now = datetime.now(UTC)
        batch = MessageBatch(
            id=f"msgbatch_{uuid.uuid4().hex}",
            request_counts=MessageCounts(processing=len(body.requests)),
            created_at=now,
            expires_at=datetime.fromtimestamp(now.timestamp() + WINDOW, UTC),
        )
        kept = self._kept[batch.id] = KeptBatch(batch, key.name, len(lines))
        with _opened(self._path(batch.id, "requests"), "wb") as out:
            out.write(lines)
        self._save(kept)
        self._start(kept, key)
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
            self._save(kept)
            if id in self._tasks:
                self._tasks[id].cancel()
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

    def _start(self, kept: KeptBatch, key: Key) -> None:
        async def run() -> None:
            enter(Context(kept.batch.id, key, salt_of(self._serving, key)))  # not that of the request that ordered it
            prepare_pool.enter(self._serving.prepare_pool)
            await self._run(kept)

        task = self._tasks[kept.batch.id] = asyncio.create_task(run())
        task.add_done_callback(lambda _: self._tasks.pop(kept.batch.id, None))

    async def _run(self, kept: KeptBatch) -> None:
        batch = kept.batch
        rest, why = "canceled", b""  # what becomes of requests that are not reached
        requests: dict[str, BatchedMessage] = {}
        try:
            requests = await asyncio.to_thread(self._unanswered, kept)
            left = batch.expires_at.timestamp() - time.time()
            if batch.cancel_initiated_at is None:
                async with asyncio.timeout(left), self._turns.setdefault(kept.owner, asyncio.Lock()):
                    await self._work(kept, requests)
        except TimeoutError:
            rest = "expired"
        except asyncio.CancelledError:
            if batch.cancel_initiated_at is None:
                return  # the server stops; the next one goes on
        except Exception as error:
            rest, why = "errored", b'"error":' + describe(error).encode(PATH)
        self._finish(kept, requests, rest, why)

    async def _work(self, kept: KeptBatch, requests: dict[str, BatchedMessage]) -> None:
        """Answer the requests, a bounded number at a time; those that are answered are taken out."""
        pending: set[asyncio.Task[tuple[str, str, bytes]]] = set()
        waiting = iter([*requests.values()])
        more = True
        with _opened(self._path(kept.batch.id, "results"), "ab") as out:
            try:
                while more or pending:
                    while more and len(pending) < AT_ONCE:
                        request = next(waiting, None)
                        if request is None:
                            more = False
                        else:
                            pending.add(asyncio.create_task(self._answer(request)))
                    if pending:
                        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                        for task in done:
                            custom_id, kind, line = task.result()
                            self._note(kept, out, kind, line)
                            del requests[custom_id]
            finally:
                for task in pending:
                    task.cancel()
                if pending:
                    await asyncio.wait(pending)

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
            kind, body = "succeeded", b'"message":' + await self._patiently(raw)
        except Exception as error:
            body = b'"error":' + describe(error).encode(PATH)
        return request.custom_id, kind, _line(request.custom_id, kind, body)

    async def _patiently(self, raw: bytes) -> bytes:
        deaths = 0
        while True:  # it waits for its turn as long as it may; what bounds it is the batch's window
            try:
                with own_place(self._serving):
                    return await whole(self._serving, raw)
            except OverloadedError as error:
                await asyncio.sleep(error.retry_after)
            except EngineDeadError as error:
                deaths += 1
                if deaths > MAX_DEATHS:
                    raise
                await asyncio.sleep(error.retry_after)

    def _note(self, kept: KeptBatch, out: Any, kind: str, line: bytes) -> None:
        out.write(line)
        out.flush()
        counts = kept.batch.request_counts
        setattr(counts, kind, getattr(counts, kind) + 1)
        counts.processing -= 1
        kept.size += len(line)

    def _finish(self, kept: KeptBatch, requests: dict[str, BatchedMessage], rest: str, why: bytes) -> None:
        """What has no result by now has one that says so."""
        with _opened(self._path(kept.batch.id, "results"), "ab") as out:
            for custom_id in requests:
                self._note(kept, out, rest, _line(custom_id, rest, why))
        kept.batch.processing_status, kept.batch.ended_at = "ended", datetime.now(UTC)
        self._path(kept.batch.id, "requests").unlink(missing_ok=True)
        self._save(kept)

    # ---- keeping --------------------------------------------------------------------------------------------

    def _find(self, id: str, owner: str) -> KeptBatch:
        self._expire()
        kept = self._kept.get(id)
        if kept is None or kept.owner != owner:
            raise NotFoundError(f"no message batch {id[:64]!r} here")
        return kept

    def _path(self, id: str, kind: str) -> Path:
        return self._folder / f"{id}.{kind}"

    def _save(self, kept: KeptBatch) -> None:
        scratch = self._path(kept.batch.id, "scratch")
        with _opened(scratch, "wb") as out:
            out.write(json(kept))
        os.replace(scratch, self._path(kept.batch.id, "json"))

    def _expire(self) -> None:
        oldest = datetime.fromtimestamp(time.time() - KEPT, UTC)
        ended = [id for id, kept in self._kept.items() if kept.batch.ended_at and kept.batch.created_at < oldest]
        for id in ended:
            self._remove(id)

    def _remove(self, id: str) -> None:
        del self._kept[id]
        for kind in ("json", "requests", "results"):
            with suppress(OSError):
                self._path(id, kind).unlink(missing_ok=True)


class _Streams(msgspec.Struct):
    stream: bool | None = None


def _opened(path: Path, mode: str) -> Any:
    """A file that nobody else may read."""
    return open(path, mode, opener=lambda name, flags: os.open(name, flags, 0o600))


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
