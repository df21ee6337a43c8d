"""The HTTP/1.1 protocol with bounds: how long a head may be, how long it may take, how many may connect, how much of a
turn of the loop one connection's bytes may have, and one request of a connection at a time.

uvicorn's own parser has none of these; everything else is left to it. Refuses to know: requests, routes.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

HEAD_SECONDS = 30.0  # from the first byte of a request (or the connection) to the end of its headers
HEAD_PIECE = 8192  # bytes of a head that are parsed in one go; the parser copies a header's with each
PIECE = 1024  # ... of chunks
TURN = 64  # calls to and from the parser in one turn of the loop, for one connection; a piece may go beyond
MAX_HELD = 1 << 16  # bytes of a body before they are sent within a turn
TOO_LARGE = "the request line and headers are larger than {} bytes"


class Body:
    """The body of a response under way, written to the transport without the layers of an application between: what
    starts and ends it goes through them as usual. In the request's scope as `quire.body`."""

    __slots__ = ("_chunks", "_cycle", "_flow", "_outbox", "_size")

    def __init__(self, cycle: RequestResponseCycle, outbox: Outbox):
        self._cycle = weakref.ref(cycle)  # whose scope holds this: not to be garbage that only a collector finds
        self._flow = cycle.flow
        self._outbox = outbox
        self._chunks: list[bytes] = []
        self._size = 0

    @property
    def open(self) -> bool:
        """Whether it was started, in chunks."""
        cycle = self._cycle()
        return cycle is not None and cycle.response_started and cycle.chunked_encoding is True

    @property
    def gone(self) -> bool:
        """Whether the connection is closed, or closing: nobody would read what is written."""
        cycle = self._cycle()
        if cycle is not None and cycle.transport.is_closing():
            cycle.disconnected = True
        return cycle is None or cycle.disconnected

    @property
    def paused(self) -> bool:
        """Whether the client reads too slowly; `drain` waits until it has caught up, or is gone."""
        return self._flow.write_paused

    async def drain(self) -> None:
        await self._flow.drain()

    def write(self, data: bytes) -> None:
        """One chunk, which leaves when all that can run now has run, or when there are MAX_HELD bytes, so that a reader
        that lags is noticed. A client that is gone is not told: `receive` says that it is."""
        if not self._chunks:
            self._outbox.add(self)
        self._chunks.append(b"%x\r\n%b\r\n" % (len(data), data))
        self._size += len(data)
        if self._size >= MAX_HELD:
            self.flush()

    def flush(self) -> None:
        """Send what was written, before anything else is sent."""
        chunks, self._chunks, self._size = self._chunks, [], 0
        if chunks and (cycle := self._cycle()) is not None and not self.gone:
            cycle.transport.write(b"".join(chunks))


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


class ReadFlow(FlowControl):
    """Flow control that does not read on while more is held than may be."""

    full = False

    def resume_reading(self) -> None:
        if not self.full:
            super().resume_reading()


class BoundedProtocol(HttpToolsProtocol):
    """Requests of a connection are parsed one at a time, each when the one before is answered; what came with it is
    held until then. Every message ends at an empty line, or where its length says, so what is fed to the parser
    ends there too: a head is counted, and timed, from its first byte."""

    max_header: ClassVar[int]
    max_connections: ClassVar[int]
    outbox: ClassVar[Outbox]
    flow: ReadFlow
    crowded = False  # too many connections, by the word of who accepted this one
    on_lost: Callable[[], None] | None = None  # told once that this one is over

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._held = bytearray()  # read, not parsed
        self._scheduled = False  # whether what is held will be parsed in the loop's next turn
        self._tail = b""  # the last bytes that were parsed: an empty line may begin there
        self._unseen = 0  # bytes of a head, or since the last byte of a chunked body, that nobody was shown yet
        self._left = 0  # bytes of a body whose length is known
        self._inside = False  # between the end of a head and that of its message
        self._done = True  # between messages
        self._calls = 0  # to and from the parser, in this turn
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = ReadFlow(transport)
        if self.crowded or len(self.connections) > self.max_connections:
            self._refuse(503, "too many connections")
        else:
            self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._held.clear()
        super().connection_lost(exc)
        self.lost()

    def lost(self) -> None:
        """It is over, or came to nothing."""
        on_lost, self.on_lost = self.on_lost, None
        if on_lost is not None:
            on_lost()

    def data_received(self, data: bytes) -> None:
        self._held += data
        if not self._scheduled:
            self._parse()
        self.flow.full = len(self._held) > self.max_header
        if self.flow.full:
            self.flow.pause_reading()

    def _parse(self) -> None:
        """Parse what is held: as far as one request goes, and no more than one turn of the loop is worth."""
        self._scheduled = False
        self._calls = 0
        while self._held and not self.transport.is_closing():
            if self._done and not (self.cycle is None or self.cycle.response_complete):
                break  # on_response_complete goes on
            if self._calls >= TURN:
                self._go_on()
                break
            piece = self._piece()
            if self._left:
                self._left -= len(piece)
            else:
                self._unseen += len(piece)
            self._calls += 1
            super().data_received(piece)
            if self._unseen > self.max_header:
                self._refuse(431, TOO_LARGE.format(self.max_header))
        if self.transport.is_closing():
            self._held.clear()
        if self.flow.full and len(self._held) <= self.max_header:
            self.flow.full = False
            if self.cycle is None or len(self.cycle.body) <= HIGH_WATER_LIMIT:
                self.flow.resume_reading()

    def _piece(self) -> bytes:
        """What to parse next, taken from what is held: up to where a message may end."""
        size = self._left or (PIECE if self._inside else HEAD_PIECE)
        if not self._left:
            if self._done:
                self._done, self._tail, self._unseen = False, b"", 0
                if self._timer is None:
                    self._start_timer()
            window = self._tail + self._held[:size]
            end = window.find(b"\r\n\r\n")
            if end >= 0:
                size = end + 4 - len(self._tail)
        piece = bytes(self._held[:size])
        del self._held[:size]
        self._tail = b"" if self._left else (self._tail + piece)[-3:]
        return piece

    def _go_on(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self.loop.call_soon(self._parse)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._calls += 1
        if not self._inside:  # else it is a trailer, which nobody reads
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._stop_timer()
        if self._unseen > self.max_header:
            self._refuse(431, TOO_LARGE.format(self.max_header))
        if self.transport.is_closing():
            return
        self._inside, self._unseen = True, 0
        self._left = next((int(value) for name, value in self.headers if name == b"content-length"), 0)
        super().on_headers_complete()
        self.scope["quire.body"] = Body(self.cycle, self.outbox)  # type: ignore[typeddict-unknown-key]
        if self.parser.should_upgrade():  # to nothing that is spoken here: the answer is the last
            self.cycle.keep_alive = False

    def _unsupported_upgrade_warning(self) -> None:
        """Nothing: it would tell operators to install what is not used, at any stranger's wish."""

    def on_body(self, body: bytes) -> None:
        self._unseen = 0
        self._calls += 1
        if not self.transport.is_closing():
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._inside, self._done, self._left = False, True, 0
        self._stop_timer()
        if not self.transport.is_closing():
            super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if not self._done:  # a body that nobody reads has as long as a head
            self._start_timer()
        if self._held:
            self._go_on()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(HEAD_SECONDS, self._refuse, 408, "the request took too long to arrive")

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, status: int, message: str) -> None:
        """Close the connection, with an answer unless the request has one, or the beginning of one."""
        if self.transport.is_closing():
            return
        if not (self._inside and self.cycle is not None and self.cycle.response_started):
            body = b'{"error":{"message":"%b","type":"invalid_request_error","param":null,"code":null}}'
            body %= message.encode()
            head = b"content-type: application/json\r\nretry-after: 1\r\nconnection: close\r\n"
            size = b"content-length: %d\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[status] + head + size + body)
        self.transport.close()


def bounded_protocol(max_header: int, max_connections: int) -> type[BoundedProtocol]:
    """The protocol of one server, for which uvicorn wants a class."""

    class ServerProtocol(BoundedProtocol):
        pass

    ServerProtocol.max_header, ServerProtocol.max_connections = max_header, max_connections
    ServerProtocol.outbox = Outbox()
    return ServerProtocol
