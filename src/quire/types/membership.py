"""What a replica's engine process must know to join its client: where, as whom, and with which keys."""

from __future__ import annotations

import msgspec

RESTART_EXIT_CODE = 75  # of a replica's process that was told to make way for another
# Of all links between processes of a cluster. Sockets answer each other's heartbeats whatever their processes do.
LINK_HEARTBEAT_MS = 1000
LINK_TIMEOUT_MS = 5000  # without an answer, or until a connection is made: then it is lost
JOIN_TIMEOUT_MS = 15_000  # of a replica and its client to agree on keys, which is eight messages one after the other


class CurveKeys(msgspec.Struct, frozen=True):
    """Of a CURVE link, in Z85: the client's public key, and the pair that its replicas prove themselves with."""

    server: str
    public: str
    secret: str


class PeerLink(msgspec.Struct, frozen=True):
    """How replicas hand KV pages over to each other."""

    connector: str  # tcp, shared-memory, nixl or in-process
    host: str  # that peers reach this process by
    keys: CurveKeys
    secret: str  # in hex: pages are signed with it


class ReplicaMembership(msgspec.Struct, frozen=True):
    """Handed to an engine process on its standard input: it is nobody else's to read."""

    identity: str  # of this process among all that ever joined, and of its first connection
    keys: CurveKeys
    page_key: str  # in hex: replicas and their router name equal pages equally, and nobody else can
    block_tokens: int  # that the router names together
    connector: str = ""  # by which KV pages are handed over: tcp, shared-memory or nixl; empty: they are not
    heartbeat_fd: int = -1  # file descriptor of a pipe to its host, which hears from the loop that steps
    number: int = -1  # of the replica that it is started as; -1: any that is missing


class ReplicaView(msgspec.Struct, kw_only=True):
    """One replica, as the admin API lists it."""

    id: str
    pid: int
    host: str
    role: str  # prefill, decode, or both
    state: str  # starting, ready, unresponsive, draining, drained or stopped
    running: int
    waiting: int  # for their first token
    restarts: int
    rejoins: int = 0  # times that its connection was lost and the same process joined again
    lost: str = ""  # why it, or its connection, was lost last
    model: str = ""  # that it serves, of several
