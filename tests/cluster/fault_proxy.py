"""A TCP proxy that does what networks do, switched while it runs: latency with jitter, a rate, packets that go nowhere
in one direction or both, resets, and peers that are gone without a word.

    client ◄──to_client── FaultProxy ──to_target──► target

TCP repairs loss and order, so neither is visible above it but as latency, or as silence: what a black hole swallowed
comes late, when it ends, as by retransmission, ends of connections included. What waits here is bounded, so that a
reader that is slow, or cut off, fills the buffers of whoever writes to it.
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from contextlib import suppress

CHUNK_BYTES = 1 << 16
TRICKLE_S = 0.02  # between pieces, where there is a rate
CHUNKS_HELD = 64  # of one direction of a connection
NO_LINGER = struct.pack("ii", 1, 0)  # a close is a reset


class Direction:
    """`delay`, `jitter`: seconds; `rate`: bytes a second, 0 for no limit."""

    def __init__(self, seed: int) -> None:
        self.delay = self.jitter = 0.0
        self.rate = 0.0
        self._random = random.Random(seed)
        self._passes = asyncio.Event()
        self._passes.set()

    def block(self) -> None:
        self._passes.clear()

    def unblock(self) -> None:
        self._passes.set()

    def due(self) -> float:
        return asyncio.get_running_loop().time() + self.delay + self._random.random() * self.jitter

    async def passage(self, due: float) -> None:
        """Until what is due then is on the other side."""
        await asyncio.sleep(due - asyncio.get_running_loop().time())
        await self._passes.wait()

    async def write(self, data: bytes, writer: asyncio.StreamWriter) -> None:
        """Bit by bit, where there is a rate."""
        piece = max(1, int(self.rate * TRICKLE_S)) if self.rate else len(data)
        for start in range(0, len(data), piece):
            if self.rate:
                await asyncio.sleep(TRICKLE_S)
                await self._passes.wait()
            writer.write(data[start : start + piece])
            await writer.drain()


class FaultProxy:
    def __init__(self, target: str, seed: int = 0):
        """`target`: tcp://HOST:PORT, or HOST:PORT."""
        host, _, port = target.removeprefix("tcp://").rpartition(":")
        self._target = host, int(port)
        self.to_target, self.to_client = Direction(seed), Direction(seed + 1)
        self.connections = 0  # that were ever made
        self._open: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = set()  # to the client, to the target
        self._silenced: set[asyncio.StreamWriter] = set()  # to targets that hear nothing of the end
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.port = 0

    async def __aenter__(self) -> FaultProxy:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=CHUNK_BYTES)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.reset()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    # ---- faults ---------------------------------------------------------------------------------------------

    def partition(self) -> None:
        self.to_target.block()
        self.to_client.block()

    def heal(self) -> None:
        self.to_target.unblock()
        self.to_client.unblock()

    def reset(self) -> None:
        """All connections, for both ends."""
        for pair in list(self._open):
            for writer in pair:
                _reset(writer)

    def half_open(self) -> None:
        """Clients are gone; their targets are told nothing, now or later."""
        for client, target in list(self._open):
            self._silenced.add(target)
            _reset(client)

    # ---- connections ----------------------------------------------------------------------------------------

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        pair = None
        try:
            await self.to_target.passage(self.to_target.due())  # of the first packet
            there, back = await asyncio.open_connection(*self._target, limit=CHUNK_BYTES)
            self.connections += 1
            pair = writer, back
            self._open.add(pair)
            await asyncio.gather(self._pump(reader, back, self.to_target), self._pump(there, writer, self.to_client))
        except OSError:
            _reset(writer)
        finally:
            self._tasks.discard(task)
            if pair is not None:
                self._open.discard(pair)
                for one in pair:
                    one.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: Direction) -> None:
        held: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(CHUNKS_HELD)

        async def receive() -> None:
            data, due = b"-", 0.0
            while data:
                with suppress(ConnectionError):
                    data = b""
                    data = await reader.read(CHUNK_BYTES)
                due = max(due, way.due())  # what comes later is never sooner there
                await held.put((due, data))

        receiving = asyncio.create_task(receive())
        try:
            data = b"-"
            while data:
                due, data = await held.get()
                await way.passage(due)
                if data:
                    await way.write(data, writer)
                elif writer in self._silenced:
                    await asyncio.Event().wait()
                else:
                    writer.write_eof()
        except (ConnectionError, RuntimeError):
            pass  # the other end went, which the other direction tells of
        finally:
            receiving.cancel()


def _reset(writer: asyncio.StreamWriter) -> None:
    if (sock := writer.get_extra_info("socket")) is not None:
        with suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
    writer.transport.abort()
