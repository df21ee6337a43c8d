"""What the main process and an API worker say to each other: msgpack frames over a pair of sockets that the worker
inherits. Frames are bounded and decoded into structs; where the pair breaks, the other end is gone.

Refuses to know: what is done about it.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Generic, Literal, TypeVar

import msgspec

from quire.observe.ledger import EntryReport
from quire.observe.metrics import Counted
from quire.serve.core.api_keys import Key
from quire.types.messages import AdapterInfo
from quire.types.serving import ServeOptions

MAX_FRAME = 16 << 20
LENGTH = 4  # bytes, before each frame


class Start(msgspec.Struct, tag=True):
    """The first word to a worker. `files`: of the model, and of which kind."""

    number: int  # its row in the shared counts
    model_name: str
    files: str
    kind: Literal["gguf", "safetensors"]
    options: ServeOptions
    keys: list[Key]
    rows: int


class EngineComes(msgspec.Struct, tag=True):
    """The engine will connect to this path."""

    path: str


class EngineLost(msgspec.Struct, tag=True):
    why: str


class AdaptersAre(msgspec.Struct, tag=True):
    adapters: list[AdapterInfo]


class Tell(msgspec.Struct, tag=True):
    """Send a Report that carries this number."""

    number: int


class CutOff(msgspec.Struct, tag=True):
    """End what is open, each with an error that its client can read."""


class Stop(msgspec.Struct, tag=True):
    """Nothing is open: end."""


class Up(msgspec.Struct, tag=True):
    """The worker answers requests from now on."""


class Unable(msgspec.Struct, tag=True):
    """The worker could not start, and why; `error` is the class in types.errors."""

    error: str
    message: str


class Report(msgspec.Struct, tag=True):
    """What was counted since the last one, and how it is."""

    number: int  # of the Tell that it answers; 0: none
    counted: Counted
    requests: list[EntryReport]
    lag: list[int]
    lag_total: float
    preparing: int
    memory: int


ToWorker = Start | EngineComes | EngineLost | AdaptersAre | Tell | CutOff | Stop
FromWorker = Up | Unable | Report
Received = TypeVar("Received")


class Channel(asyncio.Protocol, Generic[Received]):
    """One end. `on_message` is called with each frame as it arrives, before anything that came later is looked at."""

    def __init__(self, kind: object, on_message: Callable[[Received], None], on_lost: Callable[[], None]):
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._encoder = msgspec.msgpack.Encoder()
        self._on_message, self._on_lost = on_message, on_lost
        self._held = bytearray()
        self._transport: asyncio.Transport | None = None

    async def open(self, end: socket.socket) -> None:
        await asyncio.get_running_loop().create_connection(lambda: self, sock=end)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._held += data
        while len(self._held) >= LENGTH:
            size = int.from_bytes(self._held[:LENGTH])
            if size > MAX_FRAME:
                self.close()
                return
            if len(self._held) < LENGTH + size:
                return
            frame = bytes(self._held[LENGTH : LENGTH + size])
            del self._held[: LENGTH + size]
            self._on_message(self._decoder.decode(frame))

    def connection_lost(self, error: Exception | None) -> None:
        self._on_lost()

    def send(self, message: msgspec.Struct) -> None:
        if self._transport is not None and not self._transport.is_closing():
            frame = self._encoder.encode(message)
            self._transport.write(len(frame).to_bytes(LENGTH) + frame)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()
