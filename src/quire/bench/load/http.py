"""A small HTTP client that costs little enough to offer thousands of requests a second from one core.

Connections are kept and used again; the parser is httptools, the one the server uses too. It notes when each piece of
an event stream arrives. Refuses to know: what was asked, and when it was due.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from contextlib import suppress
from typing import Any, cast
from urllib.parse import urlsplit

import msgspec

from quire.types.errors import ConfigError


class Answer(msgspec.Struct):
    """What came back. Times are of `perf_counter`; `times` has one entry per event that carried text."""

    sent: float = 0.0
    status: int = 0  # 0: no answer; `error` says why
    retry_after: str | None = None
    times: list[float] = []
    end: float = 0.0
    tokens: int = 0  # as the server counts them, or events with text where it does not say
    cached: int = 0
    error: str = ""
    body: bytes = b""  # of answers that are no stream


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: msgspec.Raw | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw | None = None


_decode = msgspec.json.Decoder(_Event).decode


class _Connection(asyncio.Protocol):
    """One connection, one exchange at a time."""

    def __init__(self, pool: Pool):
        import httptools

        self._new_parser = httptools.HttpResponseParser
        self._pool = pool
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[None] | None = None
        self._answer = Answer()
        self.used = 0
        self.touched = False  # whether any byte of the current answer has arrived

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own does not say so

    def exchange(self, request: bytes, answer: Answer) -> asyncio.Future[None]:
        assert self._transport is not None
        self._done = asyncio.get_running_loop().create_future()
        self._answer, self._rest, self._stream = answer, b"", False
        self._parser: Any = self._new_parser(self)
        self.used += 1
        self.touched = False
        answer.sent = time.perf_counter()
        self._transport.write(request)
        return self._done

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    @property
    def open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def data_received(self, data: bytes) -> None:
        self.touched = True
        try:
            self._parser.feed_data(data)
        except Exception as error:
            self._end(ConnectionError(f"unreadable answer: {error}"))
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._pool.lost(self)
        self._end(error or ConnectionError("the server closed the connection"))

    def _end(self, error: Exception | None = None) -> None:
        if self._done is not None and not self._done.done():
            self._answer.end = time.perf_counter()
            if error is None:
                self._done.set_result(None)
            else:
                self._done.set_exception(error)

    # ---- the parser's callbacks -----------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        match name.lower():
            case b"retry-after":
                self._answer.retry_after = value.decode("latin-1")
            case b"content-type":
                self._stream = value.startswith(b"text/event-stream")

    def on_headers_complete(self) -> None:
        self._answer.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        if not self._stream:
            self._answer.body += data
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and (text := line[5:].strip()) != b"[DONE]":
                self._event(text)

    def _event(self, text: bytes) -> None:
        answer = self._answer
        try:
            event = _decode(text)
        except msgspec.DecodeError as error:
            answer.error = f"event that is no JSON of this API: {error}"
            return
        if event.error is not None:
            answer.error = bytes(event.error).decode("utf-8", "replace")[:300]
        for choice in event.choices:
            delta = choice.delta
            if choice.text or (delta and (delta.content or delta.reasoning_content or delta.tool_calls)):
                answer.times.append(time.perf_counter())
                break
        if event.usage is not None:
            answer.tokens = event.usage.completion_tokens
            details = event.usage.prompt_tokens_details
            answer.cached = (details.cached_tokens or 0) if details else 0

    def on_message_complete(self) -> None:
        if not self._parser.should_keep_alive():
            self.close()
        if self._stream and not self._answer.tokens:
            self._answer.tokens = len(self._answer.times)
        self._end()


class Pool:
    """Connections to one server; at most `limit` at once, callers beyond that wait."""

    def __init__(self, url: str, *, api_key: str | None = None, limit: int = 1000):
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{url!r} is no URL of a server; write it like http://127.0.0.1:8000")
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._base = parts.path.rstrip("/")
        authority = parts.netloc.rpartition("@")[2]
        key = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._head = f"Host: {authority}\r\nUser-Agent: quire-bench\r\nAccept: */*\r\n{key}"
        self._idle: list[_Connection] = []
        self._all: set[_Connection] = set()
        self._room = asyncio.Semaphore(limit)

    def request(self, path: str, body: bytes | None = None) -> bytes:
        """The bytes of a request, ready to send any number of times."""
        if body is None:
            return f"GET {self._base}{path} HTTP/1.1\r\n{self._head}\r\n".encode()
        head = f"POST {self._base}{path} HTTP/1.1\r\n{self._head}Content-Type: application/json\r\n"
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body

    async def send(self, request: bytes, timeout: float) -> Answer:
        """One exchange. Never raises for what the server or the network does: the answer says what happened."""
        answer = Answer()
        async with self._room:
            connection: _Connection | None = None
            try:
                async with asyncio.timeout(timeout):
                    connection = await self._connection()
                    try:
                        await connection.exchange(request, answer)
                    except ConnectionError:
                        if connection.used == 1 or connection.touched:
                            raise
                        connection = await self._connect()  # an idle one the server had closed meanwhile
                        await connection.exchange(request, answer)
            except TimeoutError:
                answer.error = f"no end within {timeout:g} s"
            except OSError as error:
                answer.error = str(error) or type(error).__name__
            finally:
                answer.end = answer.end or time.perf_counter()
                if connection is not None:
                    self._put_back(connection, answer)
        return answer

    def lost(self, connection: _Connection) -> None:
        self._all.discard(connection)
        with suppress(ValueError):
            self._idle.remove(connection)

    def close(self) -> None:
        for connection in list(self._all):
            connection.close()

    def _put_back(self, connection: _Connection, answer: Answer) -> None:
        if answer.error or not connection.open:
            connection.close()
        else:
            self._idle.append(connection)

    async def _connection(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.open:
                return connection
        return await self._connect()

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(lambda: _Connection(self), self._host, self._port, ssl=self._tls)
        self._all.add(connection)
        return connection
