"""Requests in a file, one a line: each is parsed and answered as if it had come over HTTP.

Used by /v1/batches and by `quire batch`. Refuses to know: where lines come from and where answers go.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from quire.serve.core.background_lanes import AT_ONCE
from quire.serve.core.generation import Serving
from quire.serve.http.background_work import patiently, side_by_side
from quire.serve.http.error_bodies import describe
from quire.serve.http.http_io import BodyTooLargeError, decode, json
from quire.serve.openai import chat_completions as chat
from quire.serve.openai import completions, embeddings, responses
from quire.types.errors import InputError

ENDPOINTS: dict[str, Callable[[Serving, bytes], Awaitable[bytes]]] = {
    "/v1/chat/completions": chat.whole,
    "/v1/completions": completions.whole,
    "/v1/embeddings": embeddings.whole,
    "/v1/responses": responses.whole,
}


class BatchLine(msgspec.Struct, forbid_unknown_fields=True):
    """One line of a batch."""

    custom_id: Annotated[str, Meta(min_length=1, max_length=512)]
    method: str
    url: str
    body: msgspec.Raw


class Answered(NamedTuple):
    custom_id: str
    ok: bool
    line: bytes  # without its end


class _Named(msgspec.Struct):
    custom_id: str = ""


_LINE = msgspec.json.Decoder(BatchLine)
_NAMED = msgspec.json.Decoder(_Named)


def custom_id_of(raw: bytes) -> str:
    """What a line is called, be the rest of it a request or not; nothing where it does not say."""
    try:
        return _NAMED.decode(raw).custom_id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""


def note_id(custom_id: str, seen: set[str]) -> None:
    """Answers are told apart by these, so that no two lines may have the same."""
    if custom_id in seen:
        raise InputError(f"custom_id {custom_id[:64]!r} occurs twice", param="custom_id")
    seen.add(custom_id)


def read_line(raw: bytes, endpoint: str | None) -> BatchLine:
    """A line, checked as far as that goes without a model."""
    line = decode(_LINE, raw)
    if line.method != "POST":
        raise InputError(f"method must be POST, got {line.method[:16]!r}", param="method")
    wanted = [endpoint] if endpoint else [*ENDPOINTS]
    if line.url not in wanted:
        raise InputError(f"url must be {' or '.join(wanted)}, got {line.url[:64]!r}", param="url")
    return line


async def lines_of(path: Path, longest: int) -> AsyncGenerator[bytes, None]:
    """Lines of a file, read in a thread; one that is too long raises."""
    with path.open("rb") as source:
        while block := await asyncio.to_thread(source.readlines, 1 << 20):
            for line in block:
                if len(line) > longest:
                    raise BodyTooLargeError(f"a line of {len(line)} bytes is longer than the limit of {longest}")
                if line.strip():
                    yield line


async def answer_line(serving: Serving, raw: bytes, endpoint: str | None = None) -> Answered:
    """The record OpenAI's batches write for a line, whatever became of it."""
    custom_id = custom_id_of(raw)
    try:
        status, body = 200, await _answer(serving, read_line(raw, endpoint))
    except Exception as error:
        failure = describe(error)
        status, body = failure.status, failure.encode("")
    response = b'{"status_code":%d,"request_id":"req_%b","body":%b}' % (status, uuid.uuid4().hex.encode(), body)
    record = b'{"id":"batch_req_%b","custom_id":%b,"response":%b,"error":null}'
    name = json(custom_id or None)
    return Answered(custom_id, status == 200, record % (uuid.uuid4().hex.encode(), name, response))


async def _answer(serving: Serving, line: BatchLine) -> bytes:
    raw = bytes(line.body)
    if decode(_STREAMS, raw).stream:
        raise InputError("a batch is not streamed; leave stream out", param="stream")
    return await patiently(serving, ENDPOINTS[line.url], raw)


class _Streams(msgspec.Struct):
    stream: bool | None = None


_STREAMS = msgspec.json.Decoder(_Streams)


def answer_lines(
    serving: Serving,
    lines: AsyncIterator[bytes],
    endpoint: str | None = None,
    at_once: Callable[[], int] = lambda: AT_ONCE,
) -> AsyncGenerator[Answered, None]:
    """Answers in the order they are ready, so many under way as `at_once` says then. Closing it ends them all."""
    return side_by_side(lines, lambda line: answer_line(serving, line, endpoint), at_once)
