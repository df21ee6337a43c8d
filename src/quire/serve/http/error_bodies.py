"""Errors as HTTP answers: one shape for each API family, the one its clients parse.

Mistakes of the caller are explained to the caller. Faults of ours go to the log with their traceback, and the caller
gets an id to quote. Refuses to know: which route failed.
"""

from __future__ import annotations

import logging
import math
import re
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.serve.core.request_warnings import collect, header_value
from quire.types.errors import InputError, ModelNotFoundError, QuireError

logger = logging.getLogger("quire.serve")

MAX_MESSAGE = 1000  # characters of an error message; messages quote input, and input may be long


class ErrorDetail(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    """What every 4xx and 5xx answer carries, but for the families in SHAPES."""

    error: ErrorDetail


class Failure(NamedTuple):
    """An error ready to send, as an answer of its own or as the last event of a stream."""

    status: int
    body: ErrorBody
    headers: dict[str, str]

    def encode(self, path: str) -> bytes:
        """The body, in the shape of the API family that `path` belongs to."""
        shape = next((shape for prefix, shape in SHAPES if path.startswith(prefix)), None)
        return msgspec.json.encode(self.body if shape is None else shape(self))

    def response(self, path: str) -> Response:
        # Where the rest of a body is not awaited, its sender must not hold the connection with it.
        headers = {**self.headers, "connection": "close"} if self.status in (408, 413) else self.headers
        return Response(self.encode(path), self.status, headers=headers, media_type="application/json")


_ANTHROPIC_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    408: "timeout_error", 413: "request_too_large", 429: "rate_limit_error", 500: "api_error", 503: "overloaded_error",
}  # fmt: skip


def _anthropic(failure: Failure) -> dict[str, Any]:
    kind = _ANTHROPIC_TYPES.get(failure.status, "invalid_request_error" if failure.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": failure.body.error.message}}


def _ollama(failure: Failure) -> dict[str, Any]:
    return {"error": failure.body.error.message}


# Path prefix → how its API family writes an error; OpenAI's shape where none fits.
SHAPES: tuple[tuple[str, Callable[[Failure], dict[str, Any]]], ...] = (
    ("/v1/messages", _anthropic),
    ("/api/", _ollama),
)


class ClientGoneError(Exception):
    """The client hung up; nobody is left to answer."""


def describe(error: Exception) -> Failure:
    """What to tell the client about `error`; writes to the log what the client must not see."""
    headers: dict[str, str] = {}
    if isinstance(error, HTTPException):
        headers.update(error.headers or {})
        return Failure(error.status_code, _body(error.status_code, str(error.detail)), headers)
    if isinstance(error, QuireError) and error.status != 500:
        param = "model" if isinstance(error, ModelNotFoundError) else getattr(error, "param", None)
        if (retry := getattr(error, "retry_after", None)) is not None:
            headers["Retry-After"] = str(max(1, math.ceil(retry)))
        if error.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return Failure(error.status, _body(error.status, str(error), param, error.code), headers)
    error_id = uuid.uuid4().hex[:16]
    logger.error("error id %s: %s", error_id, error, exc_info=error)
    message = f"internal error; the server's log has the details under error id {error_id}"
    return Failure(500, _body(500, message, code="internal_error"), headers)


def _body(status: int, message: str, param: str | None = None, code: str | None = None) -> ErrorBody:
    if len(message) > MAX_MESSAGE:
        message = message[:MAX_MESSAGE] + "..."
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return ErrorBody(ErrorDetail(message, kind, param, code))


_TYPES = {401: "authentication_error", 403: "permission_error", 408: "timeout_error", 429: "rate_limit_error"}


async def on_error(request: Request, error: Exception) -> Response:
    """Exception handler of the app for errors raised on purpose."""
    if isinstance(error, HTTPException) and error.status_code == 404:
        error = HTTPException(404, f"no such route: {request.method} {request.url.path}; /docs lists them")
    elif isinstance(error, HTTPException) and error.status_code == 405:
        message = f"{request.method} is not allowed on {request.url.path}; use {(error.headers or {}).get('Allow')}"
        error = HTTPException(405, message, error.headers)
    elif isinstance(error, RequestValidationError):
        first = error.errors()[0]
        name = str(first["loc"][-1])
        error = InputError(f"{name}: {first['msg']}", param=name)
    return describe(error).response(request.url.path)


class Guard:
    """Outermost layer, plain ASGI: every request has an id, what nobody expected becomes a 500 with an id of its own,
    and a client's hanging up ends quietly. It looks at nothing but the start of a response, so streams pass at the
    price of a function call."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = scope["quire.request_id"] = request_id_of(dict(scope["headers"]))
        started, warnings = False, collect()

        async def watched(message: Message) -> None:
            nonlocal started
            if (body := scope.get("quire.body")) is not None and body.gone:
                raise ClientGoneError
            if not started:
                started = True
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
                if warnings:
                    message["headers"].append((b"x-quire-warning", header_value(warnings)))
            await send(message)

        try:
            await self.app(scope, receive, watched)
        except (ClientGoneError, ClientDisconnect):
            pass
        except Exception as error:
            failure = describe(error)
            if not started:
                await failure.response(scope["path"])(scope, receive, watched)


_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


def request_id_of(headers: dict[bytes, bytes]) -> str:
    """The caller's own x-request-id, if it is one that fits a log line; else a new one."""
    given = headers.get(b"x-request-id", b"")
    return given.decode() if _REQUEST_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}"
