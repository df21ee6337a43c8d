"""HTTP/2 connections within bounds, on their way to grpc's own server.

grpc holds a client to its limits (bytes of metadata, streams at once) only once that client has acknowledged them;
until then each of its connections may make grpc keep 16 MiB of header fields, which take three times that. So grpc's
settings are acknowledged here, in the client's place, before any request of it is let through. Headers and connections
are counted too; everything else passes as it came. Refuses to know: what frames carry.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from typing import cast

HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME = struct.Struct(">HBBBI")  # length (its first 16 bits, its last 8), type, flags, stream
HEADERS, SETTINGS, GOAWAY, CONTINUATION = 1, 4, 7, 9  # types
ACK, END_HEADERS = 1, 4  # flags
PROTOCOL_ERROR, ENHANCE_YOUR_CALM = 1, 11  # errors
ACKNOWLEDGED = FRAME.pack(0, 0, SETTINGS, ACK, 0)
HELLO_SECONDS = 30.0  # from a connection to its settings
TURN = 512  # frames of one connection in one turn of the loop


class RefusedError(Exception):
    """A connection that is to be closed, with HTTP/2's code for why."""

    def __init__(self, code: int, why: str):
        super().__init__(why)
        self.code = code


class ClientFrames:
    """What a client sends, and what of it goes on to the server."""

    def __init__(self, max_header: int):
        self._max_header = max_header
        self._held = bytearray()
        self._left = 0  # bytes of the payload under way
        self._greeted = False  # whether the hello came
        self._settings = False  # ... and the frame after it
        self._acknowledged = False  # whether it acknowledged the server's settings itself
        self._block = 0  # bytes of headers that are not over
        self.open = False  # whether requests may follow
        self.more = False  # whether frames are held that `take` may give

    def feed(self, data: bytes) -> None:
        self._held += data

    def take(self) -> bytes:
        """The next frames, not too many of them, to go on to the server; raises if there shall be no more."""
        held, passed, begin, at = self._held, bytearray(), 0, 0
        self.more = False
        for _ in range(TURN):
            step = min(self._left, len(held) - at)
            at, self._left = at + step, self._left - step
            if self._left:
                break
            if self._settings and not self.open:
                passed += held[begin:at] + ACKNOWLEDGED
                begin, self.open = at, True
            if not self._greeted:
                if held[: len(HELLO)] != HELLO[: len(held)]:
                    raise RefusedError(PROTOCOL_ERROR, "gRPC is spoken here, over HTTP/2")
                if len(held) < len(HELLO):
                    break
                at, self._greeted = len(HELLO), True
            if len(held) - at < FRAME.size:
                break
            high, low, kind, flags, _ = FRAME.unpack_from(held, at)
            self._left = high << 8 | low
            if self._passes(kind, flags):
                at += FRAME.size
            else:
                passed += held[begin:at]
                begin = at = at + FRAME.size
        else:
            self.more = True
        passed += held[begin:at]
        del held[:at]
        return bytes(passed)

    def _passes(self, kind: int, flags: int) -> bool:
        if not self._settings:
            if kind != SETTINGS or flags & ACK:
                raise RefusedError(PROTOCOL_ERROR, "a connection begins with its settings")
            self._settings = True
        elif kind == SETTINGS and flags & ACK and not self._left and not self._acknowledged:
            self._acknowledged = True
            return False
        elif kind in (HEADERS, CONTINUATION):
            self._block += FRAME.size + self._left
            if self._block > self._max_header:
                raise RefusedError(ENHANCE_YOUR_CALM, f"headers are larger than {self._max_header} bytes")
            if flags & END_HEADERS:
                self._block = 0
        return True


class FrameGate:
    """Listens, and passes on to a server at a unix socket."""

    def __init__(self, path: str, max_header: int, max_connections: int):
        self.path = path
        self.max_header = max_header
        self.max_connections = max_connections
        self.clients: set[ClientSide] = set()
        self._server: asyncio.Server | None = None

    async def start(self, listener: socket.socket, tls: ssl.SSLContext | None) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: ClientSide(self), sock=listener, ssl=tls)

    def close(self) -> None:
        """Take no more connections; those that are there stay."""
        if self._server is not None:
            self._server.close()

    def abort(self) -> None:
        for client in list(self.clients):
            client.transport.abort()


class ClientSide(asyncio.Protocol):
    """A client's connection."""

    transport: asyncio.Transport

    def __init__(self, gate: FrameGate):
        self._gate = gate
        self._frames = ClientFrames(gate.max_header)
        self._server: asyncio.Transport | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._spoken = False  # whether the server has settings that can be acknowledged
        self._full = False  # whether it is slow to read

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._gate.clients.add(self)
        if len(self._gate.clients) > self._gate.max_connections:
            self._refuse(RefusedError(ENHANCE_YOUR_CALM, "too many connections"))
            return
        late = RefusedError(PROTOCOL_ERROR, "the connection's settings took too long to arrive")
        self._timer = asyncio.get_running_loop().call_later(HELLO_SECONDS, self._refuse, late)
        self._connecting = asyncio.ensure_future(self._connect())

    async def _connect(self) -> None:
        try:
            loop = asyncio.get_running_loop()
            await loop.create_unix_connection(lambda: ServerSide(self), self._gate.path)
        except OSError:
            self.transport.abort()

    def server_there(self, transport: asyncio.Transport) -> None:
        self._server = transport
        if self.transport.is_closing():
            transport.abort()

    def server_spoke(self, data: bytes) -> None:
        self.transport.write(data)
        if not self._spoken:
            self._spoken = True
            self._pass_on()

    def server_full(self, full: bool) -> None:
        self._full = full
        if not self.transport.is_closing():
            self._flow()

    def data_received(self, data: bytes) -> None:
        self._frames.feed(data)
        if not self._frames.more:
            self._pass_on()

    def _pass_on(self) -> None:
        """Pass on what is held, and read on once that is done."""
        if self.transport.is_closing():
            return
        if self._server is not None and self._spoken:
            try:
                self._server.write(self._frames.take())
            except RefusedError as error:
                self._refuse(error)
                return
            if self._frames.open and self._timer is not None:
                self._timer.cancel()
                self._timer = None
            if self._frames.more:
                asyncio.get_running_loop().call_soon(self._pass_on)
        self._flow()

    def _flow(self) -> None:
        wanted = self._spoken and not (self._full or self._frames.more)
        if wanted and not self.transport.is_reading():
            self.transport.resume_reading()
        elif not wanted and self.transport.is_reading():
            self.transport.pause_reading()

    def _refuse(self, error: RefusedError) -> None:
        why = str(error).encode()
        payload = struct.pack(">II", 0, error.code) + why
        self.transport.write(FRAME.pack(0, len(payload), GOAWAY, 0, 0) + payload)
        self.transport.close()

    def pause_writing(self) -> None:
        if self._server is not None:
            self._server.pause_reading()

    def resume_writing(self) -> None:
        if self._server is not None and not self._server.is_closing():
            self._server.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._gate.clients.discard(self)
        if self._timer is not None:
            self._timer.cancel()
        if self._server is not None:
            self._server.abort()


class ServerSide(asyncio.Protocol):
    """The connection to grpc's server that belongs to a client's."""

    def __init__(self, client: ClientSide):
        self._client = client

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._client.server_there(cast(asyncio.Transport, transport))

    def data_received(self, data: bytes) -> None:
        if not self._client.transport.is_closing():
            self._client.server_spoke(data)

    def pause_writing(self) -> None:
        self._client.server_full(True)

    def resume_writing(self) -> None:
        self._client.server_full(False)

    def connection_lost(self, exc: Exception | None) -> None:
        self._client.transport.close()
