"""The TCP connector: pages over ZeroMQ, encrypted and authenticated both ways by CURVE with the replicas' own keys.

    target: a DEALER for each source ──CURVE over TCP──► source: one ROUTER, which answers along the same connection

CURVE's nonces make a frame that is replayed on a link void; who lacks the replicas' key is refused and counted. A
source that is gone is known by its connection. Refuses to know: what pages are for.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from collections.abc import Hashable, Iterator
from typing import Any

import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from quire.runtime.connectors.page_connector import PageConnector
from quire.types import membership
from quire.types.membership import CurveKeys

log = logging.getLogger(__name__)

POLL_MS = 1000
MAX_BURST = 8  # messages of one link that are read before others' are, and before anything is sent
MAX_FRAME = 64 << 20  # bytes of one part of a message
MAX_PEERS = 256  # links that are kept open; the one that was opened first goes
ZAP_ENDPOINT = "inproc://zeromq.zap.01"  # where a socket asks who may connect (ZeroMQ RFC 27)
LOST = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


class TcpConnector(PageConnector):
    def __init__(self, host: str, keys: CurveKeys, *args: Any, **kwargs: Any):
        """`host`: the address that peers reach this process by."""
        super().__init__(*args, **kwargs)
        self._keys = keys
        self._context = zmq.Context()
        self._zap_socket = self._context.socket(zmq.REP)
        self._zap_socket.bind(ZAP_ENDPOINT)
        self._router = self._socket(zmq.ROUTER)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a message to who is gone is an error
        self._router.setsockopt(zmq.CURVE_SERVER, 1)
        self.address = f"tcp://{host}:{self._router.bind_to_random_port(f'tcp://{host}')}"
        self._links: dict[str, tuple[zmq.Socket[bytes], zmq.Socket[bytes]]] = {}  # to sources, and their monitors
        self._outbox: queue.SimpleQueue[tuple[str | bytes, list[bytes]]] = queue.SimpleQueue()
        self._wake_in, self._wake_out = os.pipe()
        os.set_blocking(self._wake_in, False)
        os.set_blocking(self._wake_out, False)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="quire-pages", daemon=True)
        self._thread.start()

    def close(self) -> None:
        if not self._closing.is_set():
            super().close()
            self._closing.set()
            self._wake_thread()
            self._thread.join()
            self._end_threads()
            os.close(self._wake_in)
            os.close(self._wake_out)

    def _send_to(self, address: str, frames: list[bytes]) -> None:
        self._outbox.put((address, frames))
        self._wake_thread()

    def _send(self, route: Hashable, frames: list[bytes]) -> None:
        assert isinstance(route, bytes)
        self._outbox.put((route, frames))
        self._wake_thread()

    def _wake_thread(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):  # full of wakes already, or closed
            os.write(self._wake_out, b"w")

    # ---- the connector's thread -----------------------------------------------------------------------------

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        made = self._context.socket(kind)
        for name, value in (
            (zmq.LINGER, 200),
            (zmq.SNDHWM, 0),  # the send window bounds what waits
            (zmq.RCVHWM, 0),
            (zmq.MAXMSGSIZE, MAX_FRAME),
            (zmq.CONNECT_TIMEOUT, membership.LINK_TIMEOUT_MS),  # else the kernel's, of minutes
            (zmq.HANDSHAKE_IVL, membership.LINK_TIMEOUT_MS),
            (zmq.HEARTBEAT_IVL, membership.LINK_HEARTBEAT_MS),
            (zmq.HEARTBEAT_TIMEOUT, membership.LINK_TIMEOUT_MS),
        ):
            made.setsockopt(name, value)
        made.curve_publickey = self._keys.public.encode()
        made.curve_secretkey = self._keys.secret.encode()
        return made

    def _run(self) -> None:
        while True:
            closing = self._closing.is_set()
            self._flush()
            if closing:
                break
            poller = zmq.Poller()
            for source in (
                self._router,
                self._zap_socket,
                self._wake_in,
                *(s for pair in self._links.values() for s in pair),
            ):
                poller.register(source, zmq.POLLIN)
            ready = dict(poller.poll(self._advance()))
            if self._wake_in in ready:
                os.read(self._wake_in, 4096)
            if self._zap_socket in ready:
                self._authenticate()
            for route, *frames in _arrived(self._router):
                self._receive(route, frames)
            for address, (link, monitor) in list(self._links.items()):
                for frames in _arrived(link):
                    self._receive(address, frames)
                if monitor.poll(0):
                    recv_monitor_message(monitor)
                    self._unlink(address)
                    self._lost(address)
        for address in list(self._links):
            self._unlink(address)
        self._router.close()
        self._zap_socket.close(linger=0)
        self._context.term()

    def _advance(self) -> int:
        """What is to be done between messages; milliseconds until it is asked for again."""
        return POLL_MS

    def _flush(self) -> None:
        for _ in range(self._outbox.qsize()):
            to, frames = self._outbox.get()
            if isinstance(to, str):
                with contextlib.suppress(zmq.Again):  # its loss is told by its monitor
                    self._link(to).send_multipart(frames, zmq.NOBLOCK)
                continue
            try:
                self._router.send_multipart([to, *frames], zmq.NOBLOCK)
            except zmq.ZMQError as error:
                if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                    raise
                self._left(to)

    def _link(self, address: str) -> zmq.Socket[bytes]:
        if address not in self._links:
            if len(self._links) >= MAX_PEERS:
                self._unlink(next(iter(self._links)))
            link = self._socket(zmq.DEALER)
            link.curve_serverkey = self._keys.public.encode()
            monitor = link.get_monitor_socket(LOST)
            link.connect(address)
            self._links[address] = link, monitor
        return self._links[address][0]

    def _unlink(self, address: str) -> None:
        link, monitor = self._links.pop(address)
        link.disable_monitor()
        monitor.close(linger=0)
        link.close()

    def _authenticate(self) -> None:
        """Whether who connects has the replicas' key."""
        version, request, _, address, _, mechanism, *credentials = self._zap_socket.recv_multipart()
        known = mechanism == b"CURVE" and z85.encode(credentials[0]) == self._keys.public.encode()
        if not known:
            self.stats.refused += 1
            log.warning("a connection from %s without the replicas' key was refused", address.decode())
        status = [b"200", b"OK"] if known else [b"400", b"not a replica of this server"]
        self._zap_socket.send_multipart([version, request, *status, b"", b""])


def _arrived(socket: zmq.Socket[bytes]) -> Iterator[list[bytes]]:
    for _ in range(MAX_BURST):
        if not socket.poll(0):
            return
        yield socket.recv_multipart(zmq.NOBLOCK)
