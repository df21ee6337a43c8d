"""The replicas' links, all on one socket: engine processes join it from wherever they run.

    engine process ──CURVE over TCP──► ROUTER ──► one call into the event loop for all that came together

A frame is what it is on the link to a single engine, one a step. Who does not have the replicas' key is refused. A
replica is gone when its connection is: at once where its process ended, after the socket's own heartbeats where its
machine or the network did. It may come back over another connection, under another identity. Refuses to know:
requests, who starts replicas.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable

import msgspec
import zmq
from zmq.utils import z85

from quire.types import membership
from quire.types.errors import QuireError
from quire.types.membership import CurveKeys
from quire.types.messages import MAX_FRAME, Heartbeat, ToClient, ToEngine

log = logging.getLogger(__name__)

PING_INTERVAL_S = 0.1  # between looks at whether each replica is still connected
ZAP_ENDPOINT = "inproc://zeromq.zap.01"  # where a socket asks who may connect (ZeroMQ RFC 27)

Received = list[tuple[str, ToClient | None]]  # whose message; None: it is gone


class ReplicaHub:
    """`receive` is called from the hub's thread, with all that came since it last was."""

    def __init__(self, host: str, receive: Callable[[Received], None]):
        """`host`: the address that replicas reach this process by."""
        server, secret = zmq.curve_keypair()
        public, theirs = zmq.curve_keypair()
        self.keys = CurveKeys(server.decode(), public.decode(), theirs.decode())
        self.refused = 0  # connections without the replicas' key
        self._receive = receive
        self._context = zmq.Context()
        self._zap_socket = self._context.socket(zmq.REP)
        self._zap_socket.bind(ZAP_ENDPOINT)
        self._socket = self._context.socket(zmq.ROUTER)
        for name, value in (
            (zmq.LINGER, 500),
            (zmq.SNDHWM, 0),
            (zmq.RCVHWM, 0),
            (zmq.MAXMSGSIZE, MAX_FRAME),
            (zmq.ROUTER_MANDATORY, 1),  # a message to who is gone is an error
            (zmq.HEARTBEAT_IVL, membership.LINK_HEARTBEAT_MS),
            (zmq.HEARTBEAT_TIMEOUT, membership.LINK_TIMEOUT_MS),
            (zmq.HANDSHAKE_IVL, membership.JOIN_TIMEOUT_MS),
            (zmq.CURVE_SERVER, 1),
        ):
            self._socket.setsockopt(name, value)
        self._socket.curve_secretkey = secret
        self._socket.curve_publickey = server
        self.address = f"tcp://{host}:{self._socket.bind_to_random_port(f'tcp://{host}')}"
        self._outbox: queue.SimpleQueue[tuple[str, ToEngine]] = queue.SimpleQueue()
        self._connected: set[str] = set()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToClient] = msgspec.msgpack.Decoder(ToClient)
        self._wake_in, self._wake_out = os.pipe()
        os.set_blocking(self._wake_in, False)
        os.set_blocking(self._wake_out, False)
        self._wake_lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="quire-replicas", daemon=True)
        self._thread.start()

    def send(self, replica: str, message: ToEngine) -> None:
        """From any thread; to one that is gone, or after the end, nothing."""
        self._outbox.put((replica, message))
        self._wake()

    def close(self) -> None:
        if not self._closing.is_set():
            self._closing.set()
            self._wake()
            self._thread.join()
            with self._wake_lock:
                os.close(self._wake_in)
                os.close(self._wake_out)
                self._wake_out = -1  # the number may be another file's now

    def _wake(self) -> None:
        with self._wake_lock:
            if self._wake_out >= 0:
                with contextlib.suppress(BlockingIOError):  # full of wakes already
                    os.write(self._wake_out, b"w")

    # ---- the hub's thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        for source in (self._socket, self._zap_socket, self._wake_in):
            poller.register(source, zmq.POLLIN)
        pinged = 0.0
        while True:
            closing = self._closing.is_set()
            news: Received = []
            self._flush(news)
            if closing:
                break
            ready = dict(poller.poll(int(PING_INTERVAL_S * 1000)))
            if self._wake_in in ready:
                os.read(self._wake_in, 4096)
            if self._zap_socket in ready:
                self._authenticate()
            self._drain(news)
            if (now := time.monotonic()) - pinged > PING_INTERVAL_S:
                pinged = now
                for replica in list(self._connected):  # those that are gone are told by this, after their last words
                    self._send(replica, Heartbeat(), news)
            if news:
                self._receive(news)
        self._socket.close()
        self._zap_socket.close(linger=0)
        self._context.term()

    def _flush(self, news: Received) -> None:
        while not self._outbox.empty():
            self._send(*self._outbox.get(), news)

    def _send(self, replica: str, message: ToEngine, news: Received) -> None:
        try:
            self._socket.send_multipart([replica.encode("latin-1"), self._encoder.encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            if replica in self._connected:
                self._connected.remove(replica)
                news.append((replica, None))

    def _drain(self, news: Received) -> None:
        while self._socket.poll(0):
            sender, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            replica = sender.decode("latin-1")
            self._connected.add(replica)
            try:
                news.append((replica, self._decoder.decode(b"".join(frames))))
            except (msgspec.DecodeError, QuireError):
                log.warning("a frame from replica %s is no message: dropped", replica)

    def _authenticate(self) -> None:
        """Whether who connects has the replicas' key."""
        version, request, _, address, _, mechanism, *credentials = self._zap_socket.recv_multipart()
        known = mechanism == b"CURVE" and z85.encode(credentials[0]) == self.keys.public.encode()
        if not known:
            self.refused += 1
            log.warning("a connection from %s without the replicas' key was refused", address.decode())
        status = [b"200", b"OK"] if known else [b"400", b"not a replica of this server"]
        self._zap_socket.send_multipart([version, request, *status, b"", b""])
