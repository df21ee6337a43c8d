"""Uploads: no more than fits however many come at once, in the time their size is worth, and nobody waits for them."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import httpx
import pytest
from fake_frontend import FakeFrontend
from starlette.requests import ClientDisconnect, Request

from quire.serve import create_app, create_serving
from quire.serve.core.stored_records import LOCK, DiskFullError
from quire.serve.http.http_io import BodyTooSlowError
from quire.serve.openai.file_store import FileObject, FileStore, upload
from quire.types.errors import InputError, OverloadedError
from quire.types.serving import ServeOptions

SCOPE: dict[str, Any] = {
    "type": "http", "method": "POST", "path": "/v1/files", "query_string": b"",
    "headers": [(b"host", b"localhost"), (b"content-type", b"multipart/form-data; boundary=B")],
}  # fmt: skip
GONE = {"type": "http.disconnect"}


def form(content: bytes, purpose: str = "batch") -> bytes:
    field = b'--B\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n' + purpose.encode()
    file = b'\r\n--B\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n' + content
    return field + file + b"\r\n--B--\r\n"


def part(body: bytes, more: bool = False) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


async def sent(store: FileStore, *messages: dict[str, Any], before_last: Callable[[], Any] | None = None) -> FileObject:
    """Upload what comes in these messages; the last may have something to wait for."""
    left = list(messages)

    async def receive() -> dict[str, Any]:
        if before_last and len(left) == 1:
            await before_last()
        return left.pop(0)

    return await upload(Request(SCOPE, receive), store)


async def turns() -> None:
    """Let everybody on the loop go as far as they can."""
    for _ in range(100):
        await asyncio.sleep(0)


def held(folder: Path) -> int:
    """Bytes of files there."""
    return sum(path.stat().st_size for path in folder.iterdir() if path.suffix != ".json" and path.name != LOCK)


async def test_uploads_at_once_stay_within_the_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, start, copy = FileStore(tmp_path, max_bytes=2600), threading.Event(), shutil.copyfileobj

    def late_copy(source: IO[bytes], target: IO[bytes]) -> None:
        assert start.wait(30)
        copy(source, target)

    monkeypatch.setattr(shutil, "copyfileobj", late_copy)
    uploads = [asyncio.create_task(sent(store, part(form(b"x" * 1000)), before_last=turns)) for _ in range(6)]
    await turns()
    await turns()
    start.set()
    done = await asyncio.gather(*uploads, return_exceptions=True)
    refused = [result for result in done if isinstance(result, OverloadedError) and "full" in str(result)]
    assert len(refused) == 4
    assert (store.used, held(tmp_path)) == (2000, 2000)
    store.delete(store.listing("open")[0].id, "open")
    assert (await sent(store, part(form(b"y" * 1000)))).bytes == 1000  # what was reserved was given back


async def test_bytes_are_counted_before_the_upload_is_complete(tmp_path: Path) -> None:
    store, whole, asked = FileStore(tmp_path, max_bytes=2600), form(b"x" * 2000), asyncio.Event()
    rest = asyncio.Event()

    async def stall() -> None:
        asked.set()
        await rest.wait()

    first = asyncio.create_task(sent(store, part(whole[:1800], more=True), part(whole[1800:]), before_last=stall))
    await asked.wait()
    with pytest.raises(OverloadedError, match="full"):
        await sent(store, part(form(b"y" * 1000)))
    rest.set()
    assert (await first).bytes == store.used == 2000


@pytest.mark.parametrize("failure", ["client", "field", "disk"])
async def test_failed_uploads_leave_nothing(failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(source: IO[bytes], target: IO[bytes]) -> None:
        target.write(source.read(10))
        raise OSError(28, "No space left on device")

    store, whole = FileStore(tmp_path), form(b"x" * 1000, "fun" if failure == "field" else "batch")
    if failure == "disk":
        monkeypatch.setattr(shutil, "copyfileobj", full_disk)
    messages = [part(whole[:500], more=True), GONE] if failure == "client" else [part(whole)]
    with pytest.raises({"client": ClientDisconnect, "field": InputError, "disk": DiskFullError}[failure]):
        await sent(store, *messages)
    assert store.used == 0 and list(tmp_path.iterdir()) == [tmp_path / LOCK]


def test_uploads_under_way_are_bounded_in_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.serve.openai.file_store.MAX_UPLOADS", 2)
    store = FileStore(tmp_path, max_files=2)
    with store.arriving("me"):
        with store.arriving("me") as (_, take):
            take(10)  # the last place is its own
            with pytest.raises(OverloadedError, match="too many"), store.arriving("me"):
                pass
        store.adopt("file-a", 1, "a", "batch", "me")
        with pytest.raises(OverloadedError, match="full"), store.arriving("me"):
            pass
    assert store.used == 1


@pytest.mark.timeout(60)
async def test_a_stalled_upload_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.serve.openai.file_store.BODY_SECONDS", 0.05)
    store = FileStore(tmp_path)
    with pytest.raises(BodyTooSlowError) as slow:
        await sent(store, part(form(b"x")[:40], more=True), GONE, before_last=asyncio.Event().wait)
    assert (slow.value.status, store.used) == (408, 0)


@pytest.mark.parametrize(("rate", "kept"), [(1, True), (1 << 50, False)])
async def test_time_grows_with_what_has_come(
    rate: int, kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.serve.openai.file_store.BODY_SECONDS", 0.0)
    monkeypatch.setattr("quire.serve.openai.file_store.MIN_RATE", rate)
    store, whole = FileStore(tmp_path), form(b"x" * 1000)
    slowly = sent(store, part(whole[:900], more=True), part(whole[900:]), before_last=turns)
    if kept:
        assert (await slowly).bytes == 1000
    else:
        with pytest.raises(BodyTooSlowError):
            await slowly


async def test_stalled_uploads_keep_nobody_out(tmp_path: Path) -> None:
    serving = create_serving(FakeFrontend(), ServeOptions(max_queue=1, files=str(tmp_path)))  # type: ignore[arg-type]
    app, asked, rest, answers = create_app(serving), asyncio.Event(), asyncio.Event(), []

    async def receive() -> dict[str, Any]:
        asked.set()
        await rest.wait()
        return part(form(b"x"))

    async def send(message: Any) -> None:
        answers.append(message)

    stalled = asyncio.create_task(app(dict(SCOPE), receive, send))
    await asked.wait()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        body = {"model": FakeFrontend.model_name, "prompt": "hi", "max_tokens": 1}
        assert (await client.post("/v1/completions", json=body)).status_code == 200
    assert (serving.admission.waiting, serving.admission.inflight) == (0, 1)
    rest.set()
    await stalled
    assert answers[0]["status"] == 200
    assert (serving.admission.waiting, serving.admission.inflight) == (0, 0)
