"""Callers without a key are refused before their messages are read, which may be as large as `--max-body` allows.

Refuses to know: what the calls do.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from quire.serve.core.api_keys import INFERENCE, Key, KeyRing
from quire.serve.http.auth import presented
from quire.types.errors import ForbiddenError, QuireError

CODES = {401: grpc.StatusCode.UNAUTHENTICATED, 403: grpc.StatusCode.PERMISSION_DENIED}


def key_of(keys: KeyRing, metadata: Any) -> Key:
    """The key that a call's metadata carries; raises unless it may be used here."""
    key = keys.find(presented(headers_of(metadata)))
    if INFERENCE not in key.scopes:
        raise ForbiddenError(f"key {key.name!r} lacks the scope {INFERENCE!r}")
    return key


def headers_of(metadata: Any) -> dict[bytes, bytes]:
    return {name.encode(): _bytes(value) for name, value in metadata}


class KeyInterceptor(grpc.aio.ServerInterceptor):
    def __init__(self, keys: KeyRing, service: str):
        self._keys = keys
        self._service = service  # that keys are for; health is for anybody

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        if handler_call_details.method.startswith(f"/{self._service}/"):
            try:
                key_of(self._keys, handler_call_details.invocation_metadata)
            except QuireError as error:
                return _refusal(error)
        return await continuation(handler_call_details)


def _refusal(error: QuireError) -> Any:
    async def refuse(messages: Any, call: Any) -> None:
        """Ends the call; a handler of streams is not handed any message that it does not ask for."""
        await call.abort(CODES[error.status], str(error))

    return grpc.stream_unary_rpc_method_handler(refuse)


def _bytes(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode("latin-1", "replace")
