"""A replica's connection to its client's hub, as its engine process has it.

    session 1 ──(the connection breaks)──► session 2 ──► ...    each says anew that the replica is ready

A session is one connection, and never reconnects: what was under way when a connection broke is lost, and a socket that
connects again by itself would hide that. Each has an identity of its own, so that what an earlier one said, and comes
late, is nobody's. Refuses to know: messages, engines.
"""

from __future__ import annotations

import time

import zmq
from zmq.utils.monitor import recv_monitor_message

from quire.types import membership
from quire.types.membership import ReplicaMembership
from quire.types.messages import MAX_FRAME

ENDED: dict[int, str] = {
    zmq.EVENT_DISCONNECTED: "the connection broke",
    zmq.EVENT_CLOSED: "it cannot be reached",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "it does not answer",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "it does not speak the protocol",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "it refused this replica's key",
}


class HubSession:
    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, member: ReplicaMembership, number: int):
        """`number`: of the sessions of this process before it."""
        self.number = number
        self.opened = time.monotonic()
        self.heard = False  # whether the client ever said something over it
        self._lost = ""
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt_string(zmq.IDENTITY, f"{member.identity}~{number}" if number else member.identity)
        self.socket.curve_serverkey = member.keys.server.encode()
        self.socket.curve_publickey = member.keys.public.encode()
        self.socket.curve_secretkey = member.keys.secret.encode()
        for name, value in (
            (zmq.LINGER, 2000),
            (zmq.SNDHWM, 0),
            (zmq.RCVHWM, 0),
            (zmq.MAXMSGSIZE, MAX_FRAME),
            (zmq.RECONNECT_IVL, -1),  # never
            (zmq.CONNECT_TIMEOUT, membership.LINK_TIMEOUT_MS),
            (zmq.HANDSHAKE_IVL, membership.JOIN_TIMEOUT_MS),
            (zmq.HEARTBEAT_IVL, membership.LINK_HEARTBEAT_MS),
            (zmq.HEARTBEAT_TIMEOUT, membership.LINK_TIMEOUT_MS),
        ):
            self.socket.setsockopt(name, value)
        self.monitor = self.socket.get_monitor_socket(sum(ENDED))
        self.socket.connect(address)

    def lost(self) -> str:
        """Why it is over; nothing while it is not."""
        while self.monitor.poll(0):
            event = recv_monitor_message(self.monitor)["event"]
            self._lost = self._lost or ENDED[event]
        return self._lost

    def close(self, *, lost: bool = False) -> None:
        """`lost`: what was not sent yet is not sent any more."""
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=0 if lost else None)
