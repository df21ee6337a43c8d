"""A client's end of a connection to an engine process: one msgpack frame a message, over a unix socket in a directory
that only this user can enter. The client listens, the engine comes.

Refuses to know: who started the engine, what ends it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from quire.types.errors import EngineDeadError, from_wire
from quire.types.messages import MAX_FRAME, EngineInfo, Failed, Heartbeat, ToClient, ToEngine

POLL_INTERVAL_S = 0.25  # between looks at whether the engine is still there


class PairLink:
    info: EngineInfo

    def __init__(self, path: Path):
        import zmq

        self.address = f"ipc://{path}"
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME)
        self._socket.bind(self.address)
        self._wake_lock = threading.Lock()
        self._wake_in, self._wake_out = os.pipe()
        os.set_blocking(self._wake_in, False)
        os.set_blocking(self._wake_out, False)
        self._poller = zmq.Poller()
        for source in (self._socket, self._wake_in):
            self._watch(source)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToClient)
        self.heard = time.monotonic()

    def _watch(self, source: Any) -> None:
        """Have receive() return once it is readable."""
        import zmq

        self._poller.register(source, zmq.POLLIN)

    def _ended(self) -> str:
        """Why the engine is gone; empty: it is not."""
        raise NotImplementedError

    def send(self, *messages: ToEngine) -> None:
        import zmq

        try:
            for message in messages:
                self._socket.send(self._encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again:  # no engine is connected: queues have no limit of their own
            raise EngineDeadError("the engine process is gone") from None

    def receive(self, timeout: float | None) -> list[ToClient]:
        waited = 0.0
        while True:
            slice_ = POLL_INTERVAL_S if timeout is None else min(POLL_INTERVAL_S, timeout - waited)
            ready = dict(self._poller.poll(int(max(0.0, slice_) * 1000)))
            ended = self._ended()  # looked at before the socket is read, so that its last words are heard
            messages = self._drain()
            if ended and not messages:
                raise EngineDeadError(ended)
            if self._wake_in in ready:
                os.read(self._wake_in, 4096)
            waited += slice_
            # What came after the poll gave up and before the socket was read must not wait, let alone be lost.
            if ready or messages or (timeout is not None and waited >= timeout):
                return messages

    def _drain(self) -> list[ToClient]:
        """What the engine has said since; its heartbeats are noted and go no further."""
        import zmq

        messages: list[ToClient] = []
        while self._socket.poll(0):
            message = self._decoder.decode(self._socket.recv(zmq.NOBLOCK))
            self.heard = time.monotonic()
            if isinstance(message, Failed):
                raise from_wire(message.kind, message.message)
            if not isinstance(message, Heartbeat):
                messages.append(message)
        return messages

    def wake(self) -> None:
        with self._wake_lock:
            if self._wake_out >= 0:
                with contextlib.suppress(BlockingIOError):  # full of wakes already
                    os.write(self._wake_out, b"w")

    def _release(self) -> None:
        self._socket.close()
        self._context.term()
        with self._wake_lock:
            os.close(self._wake_in)
            os.close(self._wake_out)
            self._wake_out = -1
