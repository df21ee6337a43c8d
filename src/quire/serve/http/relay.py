"""What an API worker does not answer itself it passes on to the main process, which keeps what is one for the whole
server: files, batches, stored answers, models and their administration, metrics, the page.

Plain ASGI in front of the gate, which the request meets there. Refuses to know: what is asked.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from httptools import HttpParserError, HttpResponseParser
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.serve.core.server_state import KeptElsewhere
from quire.serve.http.error_bodies import ClientGoneError
from quire.types.errors import EngineDeadError

PIECE = 1 << 16
# Of one connection, or of who answers on it: nothing to pass on.
OWN_HEADERS = frozenset(
    {
        *(b"connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"te", b"expect", b"proxy-connection"),
        *(b"x-request-id", b"date", b"server"),
    }
)


class Relay:
    """`own`: paths whose POST the application answers. `main`: the socket of the main process."""

    def __init__(self, app: ASGIApp, own: Collection[str], main: Path):
        self.app = app
        self._own = own
        self._main = main

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if scope["method"] != "POST" or scope["path"] not in self._own:
            await self._pass_on(scope, receive, send)
            return
        try:
            await self.app(scope, receive, send)
        except KeptElsewhere as elsewhere:
            await self._pass_on(scope, _read_again(elsewhere.body, receive), send)

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        with socket.socket(socket.AF_UNIX) as connection:  # a stream would drop the answer once it cannot send any more
            connection.setblocking(False)
            try:
                await asyncio.get_running_loop().sock_connect(connection, str(self._main))
            except OSError:
                raise EngineDeadError("the server's main process does not answer; try again later") from None
            sending = asyncio.ensure_future(_send_request(scope, receive, connection))
            try:
                await _Answer(connection, send).pass_back(bodiless=scope["method"] == "HEAD")
            finally:
                sending.cancel()
                with suppress(asyncio.CancelledError, OSError):
                    await sending


def _read_again(body: bytes, receive: Receive) -> Receive:
    """A body that was read, and what comes behind it."""
    left = [body]

    async def again() -> Message:
        if left:
            return {"type": "http.request", "body": left.pop(), "more_body": False}
        return await receive()

    return again


async def _send_request(scope: Scope, receive: Receive, connection: socket.socket) -> None:
    """The request to its end, as it comes; then, should the client hang up, that too. OSError: it has answered, and
    reads no more."""
    loop = asyncio.get_running_loop()
    query = b"?" + scope["query_string"] if scope["query_string"] else b""
    headers = [(name, value) for name, value in scope["headers"] if name not in OWN_HEADERS]
    sized = any(name == b"content-length" for name, _ in headers)
    chunked = not sized and any(name == b"transfer-encoding" for name, _ in scope["headers"])
    headers += [(b"x-request-id", scope["quire.request_id"].encode()), (b"connection", b"close")]
    if chunked:
        headers.append((b"transfer-encoding", b"chunked"))
    lines = [b"%b %b%b HTTP/1.1" % (scope["method"].encode(), scope["raw_path"], query)]
    lines += [b"%b: %b" % header for header in headers]
    await loop.sock_sendall(connection, b"\r\n".join(lines) + b"\r\n\r\n")
    while (message := await receive())["type"] == "http.request":
        if body := message.get("body", b""):
            await loop.sock_sendall(connection, b"%x\r\n%b\r\n" % (len(body), body) if chunked else body)
        if not message.get("more_body", False) and chunked:
            await loop.sock_sendall(connection, b"0\r\n\r\n")
            chunked = False
    connection.shutdown(socket.SHUT_RDWR)  # the client is gone


class _Answer:
    """The main process's response, parsed and passed back as it comes."""

    def __init__(self, connection: socket.socket, send: Send):
        self._connection = connection
        self._send = send
        self._parser = HttpResponseParser(self)
        self._headers: list[tuple[bytes, bytes]] = []
        self._messages: list[Message] = []
        self._begun = self._done = False

    async def pass_back(self, *, bodiless: bool) -> None:
        while not self._done and (data := await self._read()):
            try:
                self._parser.feed_data(data)
            except HttpParserError:
                break
            messages, self._messages = self._messages, []
            for message in messages:
                await self._send(message)
        if not self._begun:
            raise EngineDeadError("the server's main process ended before it answered; try again later")
        if not (self._done or bodiless):
            raise ClientGoneError  # half of an answer: the connection says so by its end
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _read(self) -> bytes:
        try:
            return await asyncio.get_running_loop().sock_recv(self._connection, PIECE)
        except OSError:  # it closed without having read everything; what it said came before
            return b""

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() not in OWN_HEADERS:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._begun = True
        status = self._parser.get_status_code()
        self._messages.append({"type": "http.response.start", "status": status, "headers": self._headers})

    def on_body(self, body: bytes) -> None:
        self._messages.append({"type": "http.response.body", "body": body, "more_body": True})

    def on_message_complete(self) -> None:
        self._done = True
