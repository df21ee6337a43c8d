"""The HTTP/1.1 protocol with bounds: how long a head may be, how long it may take, how many may connect.

uvicorn's own parser has none of these; everything else is left to it. Refuses to know: requests, routes.
"""

from __future__ import annotations

import asyncio
import weakref
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

HEAD_SECONDS = 30.0  # from the first byte of a request (or the connection) to the end of its headers


class Body:
    """The body of a response under way, written to the transport without the layers of an application between: what
    starts and ends it goes through them as usual. In the request's scope as `quire.body`."""

    __slots__ = ("_cycle", "_data", "_flow", "_outbox")

    def __init__(self, cycle: RequestResponseCycle, outbox: Outbox):
        self._cycle = weakref.ref(cycle)  # whose scope holds this: not to be garbage that only a collector finds
        self._flow = cycle.flow
        self._outbox = outbox
        self._data = b""

    @property
    def open(self) -> bool:
        """Whether it was started, in chunks."""
        cycle = self._cycle()
        return cycle is not None and cycle.response_started and cycle.chunked_encoding is True

    @property
    def paused(self) -> bool:
        """Whether the client reads too slowly; `drain` waits until it has caught up, or is gone."""
        return self._flow.write_paused

    async def drain(self) -> None:
        await self._flow.drain()

    def write(self, data: bytes) -> None:
        """One chunk, which leaves when all that can run now has run. A client that is gone is not told: `receive` says
        that it is."""
        chunk = b"%x\r\n%b\r\n" % (len(data), data)
        if self._data:
            self._data += chunk
        else:
            self._data = chunk
            self._outbox.add(self)

    def flush(self) -> None:
        """Send what was written, before anything else is sent."""
        data, self._data = self._data, b""
        if data and (cycle := self._cycle()) is not None and not cycle.disconnected:
            cycle.transport.write(data)


class Outbox:
    """Bodies of many streams that have something to send. A step of the engine brings a token to each, and a system
    call for each is what that costs: one after the other they find each other's code and the readers awake."""

    def __init__(self) -> None:
        self._bodies: list[Body] = []

    def add(self, body: Body) -> None:
        if not self._bodies:
            asyncio.get_running_loop().call_soon(self._flush)
        self._bodies.append(body)

    def _flush(self) -> None:
        bodies, self._bodies = self._bodies, []
        for body in bodies:
            body.flush()


def bounded_protocol(max_header: int, max_connections: int) -> type[HttpToolsProtocol]:
    outbox = Outbox()

    class BoundedProtocol(HttpToolsProtocol):
        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs)
            self._head: int | None = 0  # bytes of an unfinished head; None between its end and the next one
            self._timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > max_connections:
                self._refuse(503, "too many connections")
            else:
                self._start_timer()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self.transport.is_closing():
                return
            super().data_received(data)
            if self._head is not None:
                self._head += len(data)
                if self._head > max_header:
                    self._refuse(431, f"the request line and headers are larger than {max_header} bytes")

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._head = 0
            if self._timer is None:
                self._start_timer()

        def on_headers_complete(self) -> None:
            self._head = None
            self._stop_timer()
            size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
            if size > max_header:
                self._refuse(431, f"the request line and headers are larger than {max_header} bytes")
            elif not self.transport.is_closing():
                super().on_headers_complete()
                self.scope["quire.body"] = Body(self.cycle, outbox)  # type: ignore[typeddict-unknown-key]

        def on_body(self, body: bytes) -> None:
            if not self.transport.is_closing():
                super().on_body(body)

        def on_message_complete(self) -> None:
            if not self.transport.is_closing():
                super().on_message_complete()

        def _start_timer(self) -> None:
            self._timer = self.loop.call_later(HEAD_SECONDS, self._refuse, 408, "the request took too long to arrive")

        def _stop_timer(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _refuse(self, status: int, message: str) -> None:
            if self.transport.is_closing():
                return
            body = b'{"error":{"message":"%b","type":"invalid_request_error","param":null,"code":null}}'
            body %= message.encode()
            head = b"content-type: application/json\r\nretry-after: 1\r\nconnection: close\r\n"
            size = b"content-length: %d\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[status] + head + size + body)
            self.transport.close()

    return BoundedProtocol
