"""KV cache events over ZMQ, in vLLM's format: as the prefix cache changes, and again for those who missed some.

    PUB     [topic, sequence number (8 bytes, big-endian), KVEventBatch in msgpack]
    ROUTER  ["", first number wanted] ─► ["", number, batch] of each that is still kept, then ["", -1, ""]

The prefix index tells of a change by an append to a queue; a thread makes and sends the batches. Token ids go out in
the clear: the endpoint belongs on a network of one's own. Refuses to know: who listens, how pages are named.
"""

from __future__ import annotations

import struct
import threading
import time
from collections import deque

import msgspec
import zmq

from quire.types.errors import ConfigError
from quire.types.hashing import Root
from quire.types.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent, KVEventBatch

KEPT_BATCHES = 10_000  # for those who missed them
KEPT_BYTES = 64 << 20  # ... of them all
BATCH_TOKENS = 8192  # told of in one batch, or those of one page: some 40 kB
BATCH_EVENTS = 1024
QUEUED_BATCHES = 4096  # of a subscriber that lags; then it misses some
HEARTBEAT_MS = 5000
HEARTBEAT_TIMEOUT_MS = 30_000  # after which a subscriber that does not answer, or read, is disconnected
WAIT_S = 0.1  # between looks for requests of what was missed
END = (-1).to_bytes(8, "big", signed=True)


class KVEventPublisher:
    """Listens to a prefix index (`published`, `removed`, `cleared`), and publishes what it hears."""

    def __init__(self, endpoint: str, *, replay: str | None = None, topic: str = "", medium: str = "GPU"):
        self._topic = topic.encode()
        self._medium = medium
        self._changes: deque[tuple[bytes, bytes, bytes] | bytes | None] = deque()  # stored, removed, all cleared
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._next = 0
        self._woken = threading.Event()
        self._closed = False
        self._encoder = msgspec.msgpack.Encoder()
        self._context = zmq.Context()
        self._publisher = self._bind(zmq.PUB, endpoint, QUEUED_BATCHES)
        self._replay = None if replay is None else self._bind(zmq.ROUTER, replay, KEPT_BATCHES + 1)
        self.endpoint = self._publisher.getsockopt_string(zmq.LAST_ENDPOINT)
        self._thread = threading.Thread(target=self._run, name="quire-kv-events", daemon=True)
        self._thread.start()

    def _bind(self, kind: int, endpoint: str, queued: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, queued)
        socket.setsockopt(zmq.LINGER, 1000)
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            socket.close(0)
            raise ConfigError(f"KV events cannot be published at {endpoint}: {error}") from None
        return socket

    def published(self, name: bytes, parent: bytes, tokens: bytes) -> None:
        self._changes.append((name, parent, tokens))
        self._woken.set()

    def removed(self, name: bytes) -> None:
        self._changes.append(name)
        self._woken.set()

    def cleared(self) -> None:
        self._changes.append(None)
        self._woken.set()

    def close(self) -> None:
        """What was heard of is published first."""
        self._closed = True
        self._woken.set()
        self._thread.join()
        for socket in (self._publisher, self._replay):
            if socket is not None:
                socket.close()
        self._context.term()

    def _run(self) -> None:
        while not self._closed or self._changes:
            self._woken.wait(WAIT_S)
            self._woken.clear()
            left = len(self._changes)
            while left:
                events = self._batch(left)
                left -= len(events)
                self._publish(self._encoder.encode(KVEventBatch(time.time(), events)))
            while self._replay is not None and self._replay.poll(0):
                self._send_again(self._replay)

    def _batch(self, most: int) -> list[KVEvent]:
        """The next events, as many as one batch takes."""
        events: list[KVEvent] = []
        tokens = 0
        while len(events) < min(most, BATCH_EVENTS) and tokens < BATCH_TOKENS:
            event = self._event(self._changes.popleft())
            tokens += len(event.token_ids) if isinstance(event, BlockStored) else 0
            events.append(event)
        return events

    def _publish(self, payload: bytes) -> None:
        self._kept.append((self._next, payload))
        self._kept_bytes += len(payload)
        while len(self._kept) > KEPT_BATCHES or self._kept_bytes > KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popleft()[1])
        self._publisher.send_multipart([self._topic, self._next.to_bytes(8, "big"), payload])
        self._next += 1

    def _event(self, change: tuple[bytes, bytes, bytes] | bytes | None) -> KVEvent:
        if change is None:
            return AllBlocksCleared()
        if isinstance(change, bytes):
            return BlockRemoved([_short(change)], self._medium)
        name, parent, packed = change
        tokens = list(struct.unpack(f"{len(packed) // 8}q", packed))
        before = None if isinstance(parent, Root) else _short(parent)
        return BlockStored([_short(name)], before, tokens, len(tokens), None, self._medium, None)

    def _send_again(self, replay: zmq.Socket[bytes]) -> None:
        """What is kept from a number on; what is no request for it is dropped."""
        client, *rest = replay.recv_multipart()
        if len(rest) != 2 or len(rest[1]) != 8:
            return
        first = int.from_bytes(rest[1], "big")
        for number, payload in self._kept:
            if number >= first:
                replay.send_multipart([client, b"", number.to_bytes(8, "big"), payload])
        replay.send_multipart([client, b"", END, b""])


def _short(name: bytes) -> int:
    """A page's name in 64 bits, as vLLM shortens its hashes."""
    return int.from_bytes(name[-8:], "big")
