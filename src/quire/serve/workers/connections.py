"""Connections of one port on their way to the API workers: the main process accepts them and hands each to the worker
that has the fewest. So load is even on every system, and the bound on how many may be open is one.

A descriptor goes over a socket with one byte, which says whether there are too many connections. Refuses to know: what
is said on them.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from quire.serve.core.shared_counts import SharedCounts

if TYPE_CHECKING:
    from quire.serve.http.bounded_protocol import BoundedProtocol

log = logging.getLogger("quire.serve")

AT_ONCE = 64  # connections accepted, or taken, in one turn of the loop
RETRY_S = 0.02  # after which one that nobody could take is offered again
PAUSE_S = 1.0  # without accepting, where the system has no descriptor left
WELCOME, CROWDED = b"1", b"0"


class Taker(Protocol):
    """A worker as connections see it."""

    @property
    def open(self) -> int:
        """Connections that it has, those on their way to it included."""
        ...

    def give(self, connection: socket.socket, word: bytes) -> bool:
        """Whether it took the connection."""
        ...


class Acceptor:
    """`takers`: the workers that answer now."""

    def __init__(self, listener: socket.socket, takers: Callable[[], Sequence[Taker]], most: int):
        self._listener = listener
        self._takers = takers
        self._most = most
        self._waiting: socket.socket | None = None  # accepted, and taken by nobody yet
        self._loop = asyncio.get_running_loop()
        self._retry: asyncio.TimerHandle | None = None
        listener.setblocking(False)
        self._loop.add_reader(listener.fileno(), self._accept)

    def _accept(self) -> None:
        for _ in range(AT_ONCE):
            try:
                connection = self._waiting or self._listener.accept()[0]
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                log.error("no connections are accepted for %g s: %s", PAUSE_S, error)
                self._pause(PAUSE_S)
                return
            self._waiting = None
            takers = sorted(self._takers(), key=lambda taker: taker.open)
            word = CROWDED if sum(taker.open for taker in takers) >= self._most else WELCOME
            if not any(taker.give(connection, word) for taker in takers):
                self._waiting = connection
                self._pause(RETRY_S)
                return
            connection.close()  # here

    def _pause(self, seconds: float) -> None:
        self._loop.remove_reader(self._listener.fileno())
        self._retry = self._loop.call_later(seconds, self._resume)

    def _resume(self) -> None:
        self._loop.add_reader(self._listener.fileno(), self._accept)
        self._accept()

    def close(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
        self._loop.remove_reader(self._listener.fileno())
        if self._waiting is not None:
            self._waiting.close()


def give(way: socket.socket, connection: socket.socket, word: bytes) -> bool:
    """Send a connection on its way; False: not now."""
    try:
        socket.send_fds(way, [word], [connection.fileno()])
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.ENOBUFS, errno.ETOOMANYREFS, errno.EPIPE, errno.ECONNRESET):
            raise
        return False
    return True


class Receiver:
    """The worker's end: connections that come over `way` get a protocol each. `counts` is told when one has ended."""

    def __init__(
        self,
        way: socket.socket,
        protocol: Callable[[], BoundedProtocol],
        counts: SharedCounts,
        ssl: object = None,
    ):
        self._way = way
        self._protocol = protocol
        self._counts = counts
        self._ssl = ssl
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        way.setblocking(False)
        self._loop.add_reader(way.fileno(), self._take)

    def _take(self) -> None:
        for _ in range(AT_ONCE):
            try:
                word, descriptors, _, _ = socket.recv_fds(self._way, 1, 1)
            except (BlockingIOError, InterruptedError):
                return
            if not word:  # the main process is gone
                self.close()
                return
            if not descriptors:  # this process has no room for another
                self._counts.add("ended", 1)
            for descriptor in descriptors:
                task = self._loop.create_task(self._serve(socket.socket(fileno=descriptor), word == CROWDED))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _serve(self, connection: socket.socket, crowded: bool) -> None:
        protocol = self._protocol()
        protocol.crowded, protocol.on_lost = crowded, lambda: self._counts.add("ended", 1)
        connection.setblocking(False)
        try:
            await self._loop.connect_accepted_socket(lambda: protocol, connection, ssl=self._ssl)  # type: ignore[arg-type]
        except OSError as error:  # of TLS above all
            log.debug("a connection came to nothing: %s", error)
            connection.close()
            protocol.lost()

    def close(self) -> None:
        self._loop.remove_reader(self._way.fileno())
