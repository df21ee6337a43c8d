"""Bytes in, bytes out: bounded bodies, strict JSON, event streams that end when the client does.

Refuses to know: what the bytes mean.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.serve.core.context import current
from quire.serve.core.generation import DirectOut
from quire.serve.http.bounded_protocol import Body
from quire.serve.http.error_bodies import ClientGoneError, Failure, describe
from quire.serve.http.field_values import values_of
from quire.serve.http.unknown_fields import MAX_NAMED, meant, without_unknown
from quire.types.errors import InputError

T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)

json = msgspec.json.encode


class BodyTooLargeError(InputError):
    status = 413
    code = "request_too_large"


class BodyTooSlowError(InputError):
    status = 408
    code = "request_timeout"


class MediaTypeError(InputError):
    status = 415
    code = "unsupported_media_type"


BODY_SECONDS = 60.0  # for the whole body; it holds a place in the queue meanwhile


class NotFoundError(InputError):
    """Something kept for a caller is not, or not for this caller."""

    status = 404
    code = "not_found"


def owner_of(request: Request) -> str:
    """Whose things a request may see: those made with the same key."""
    return current().key.name


async def read_body(request: Request, limit: int, media: str = "json") -> bytes:
    """The whole body, refused if it says to be something else, or as soon as it is known to be longer than `limit`."""
    given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    # Ollama reads whatever it is sent as JSON, and its documentation shows curl without a header.
    if given and not re.fullmatch(rf"application/(.*\+)?{media}", given) and not request.url.path.startswith("/api/"):
        raise MediaTypeError(f"the body must be application/{media}, not {given[:64]!r}; set the Content-Type header")
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared[:20]) > limit:
        raise BodyTooLargeError(f"request body of {declared[:20]} bytes is larger than the limit of {limit}")
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in request.stream():
                size += len(chunk)
                if size > limit:
                    raise BodyTooLargeError(f"request body is larger than the limit of {limit} bytes")
                chunks.append(chunk)
    except TimeoutError:
        raise BodyTooSlowError(f"the request body did not arrive within {BODY_SECONDS:g} s") from None
    return b"".join(chunks)


def decode(decoder: msgspec.json.Decoder[S], body: bytes) -> S:
    """Parse a body, or raise an InputError that names the field and what is wrong with it."""
    try:
        try:
            return decoder.decode(body)
        except msgspec.ValidationError as error:
            if current().strict_fields or "contains unknown field" not in str(error):
                raise
            pruned, ignored = without_unknown(body, decoder.type)
            current().ignored.update(ignored[: MAX_NAMED - len(current().ignored)])
            return decoder.decode(pruned)
    except msgspec.ValidationError as error:
        raise _field_error(str(error), decoder.type) from None
    except msgspec.DecodeError as error:
        if number := _NOT_A_NUMBER.search(body):
            name = number[1].decode()
            raise InputError(
                f"{name}: {number[2].decode()} is not JSON and not a number this server takes", param=name
            ) from None
        raise InputError(f"the request body is not valid JSON: {error}", code="invalid_json") from None
    except UnicodeDecodeError as error:
        raise InputError(f"the request body is not valid UTF-8: {error.reason}", code="invalid_json") from None
    except RecursionError:
        raise InputError("the request body is nested too deeply", code="invalid_json") from None


_NOT_A_NUMBER = re.compile(rb'"(\w{1,64})"\s*:\s*(-?(?:NaN|Infinity))\b')
_PROBLEM = re.compile(r"(?P<problem>.*?)(?: - at (?:`key` in )?`\$\.?(?P<path>.*)`)?", re.DOTALL)
_FIELD = re.compile(r"Object (?P<fault>missing required|contains unknown) field `(?P<name>.*)`", re.DOTALL)


def _field_error(text: str, kind: type[msgspec.Struct]) -> InputError:
    """msgspec's "Expected `int`, got `str` - at `$.n`" → an error whose param is the field's path."""
    match = _PROBLEM.fullmatch(text)
    problem, path = (match["problem"], (match["path"] or "").replace("[...]", "")) if match else (text, "")
    if field := _FIELD.fullmatch(problem):
        name = f"{path}.{field['name']}" if path else field["name"]
        if field["fault"] == "missing required":
            return InputError(f"required field {name!r} is missing", param=name, code="missing_required_parameter")
        near = None if path else meant(name, kind)
        hint = f"; did you mean {near!r}?" if near else ""
        return InputError(f"unknown field {name!r}{hint}", param=name[:64], code="unknown_parameter")
    problem = re.sub("^Invalid (enum )?value", "unsupported value", problem.replace("`", ""))
    if (".content[" in path and path.endswith("].type")) or path.endswith(".images"):
        problem += "; only parts of text are supported"
    elif problem.startswith("unsupported value") and (values := values_of(kind, path)):
        problem += f"; must be one of {', '.join(values)}"
    code = "invalid_type" if ", got " in problem else "invalid_value"
    return InputError(f"{path or 'request body'}: {problem}", param=path or None, code=code)


async def until_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Do `work`, cancelling it if the client hangs up first (ClientGoneError). The body must have been read."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.wait((task, gone))


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A stream of ready bytes. An error before the first of them is an ordinary HTTP error; a later one is the last
    event, written by `failed`. When the client hangs up, `events` is closed, and with it the work behind it."""

    media_type = "text/event-stream"
    last = b"data: [DONE]\n\n"

    def __init__(self, events: AsyncGenerator[bytes, None], out: DirectOut | None = None):
        """`out`: where what makes the events may write past them, once the first is sent, while the next is awaited."""
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self.events = events
        self.out = out or DirectOut()

    def failed(self, failure: Failure, path: str) -> bytes:
        return b"data: " + failure.encode(path) + b"\n\n"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await until_gone(receive, self._send(scope, send))

    async def _send(self, scope: Scope, send: Send) -> None:
        async with aclosing(self.events) as events:
            event = await anext(events)
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                await send({"type": "http.response.body", "body": event, "more_body": True})
                body = scope.get("quire.body")
                if body is not None and body.open:
                    await self._write(events, body)
                else:  # not our own protocol below, or not in chunks
                    async for event in events:
                        await send({"type": "http.response.body", "body": event, "more_body": True})
            except ClientGoneError:
                raise
            except Exception as error:
                last = self.failed(describe(error), scope["path"])
                await send({"type": "http.response.body", "body": last, "more_body": True})
            await send({"type": "http.response.body", "body": self.last, "more_body": False})

    async def _write(self, events: AsyncGenerator[bytes, None], body: Body) -> None:
        self.out.body = body
        try:
            async for event in events:
                body.write(event)
                if body.paused:
                    await body.drain()
        finally:
            self.out.body = None
            body.flush()


class NamedEvents(EventStream):
    """Events with names; no mark follows the last of them."""

    last = b""

    def failed(self, failure: Failure, path: str) -> bytes:
        return b"event: error\ndata: " + failure.encode(path) + b"\n\n"


class JsonLines(EventStream):
    """One JSON object a line."""

    media_type = "application/x-ndjson"
    last = b""

    def failed(self, failure: Failure, path: str) -> bytes:
        return failure.encode(path) + b"\n"
