"""How replicas reach each other → the connector of one engine."""

from __future__ import annotations

import threading
from itertools import count

from quire.runtime.connectors.in_process import InProcessConnector
from quire.runtime.connectors.nixl_connector import NixlConnector
from quire.runtime.connectors.page_connector import PageConnector
from quire.runtime.connectors.shared_memory import SharedMemoryConnector
from quire.runtime.connectors.tcp import TcpConnector
from quire.runtime.tiers.signed_page import PageSigner
from quire.types.membership import PeerLink

_PEERS: dict[str, InProcessConnector] = {}  # of this process
_numbers = count()
_REMOTE: dict[str, type[TcpConnector]] = {
    "tcp": TcpConnector,
    "shared-memory": SharedMemoryConnector,
    "nixl": NixlConnector,
}


def open_connector(peers: PeerLink, signer: PageSigner, signal: threading.Event) -> PageConnector:
    """`signal` is set when a job of it has ended."""
    if peers.connector == "in-process":
        return InProcessConnector(_PEERS, f"engine-{next(_numbers)}", signer, signal)
    return _REMOTE[peers.connector](peers.host, peers.keys, signer, signal)
