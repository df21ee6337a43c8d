"""Whether Ray's control process, the GCS, is there: a connection a second, and a word once there was none for long.

Without it nothing is placed or started again, and the processes of Ray end by themselves after a while; engines and
requests do not need it. Refuses to know: Ray's API, what follows from it.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

INTERVAL_S = 1.0
CONNECT_TIMEOUT_S = 2.0


class GcsWatch:
    """`on_lost` is called once, in a thread, when nobody answered at `address` (HOST:PORT) for `patience_s`."""

    def __init__(self, address: str, patience_s: float, on_lost: Callable[[str], None]):
        host, _, port = address.rpartition(":")
        self._address = host.strip("[]"), int(port)
        self._patience_s = patience_s
        self._on_lost = on_lost
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="quire-gcs-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()

    def _run(self) -> None:
        name, since = "Ray's control process (gcs_server)", None
        while not self._closed.wait(INTERVAL_S):
            if (why := self._problem()) is None:
                if since is not None:
                    log.warning("%s is there again", name)
                since = None
                continue
            now = time.monotonic()
            if since is None:
                since = now
                log.warning("%s cannot be reached: %s; requests go on, lost replicas are not replaced", name, why)
            if now - since >= self._patience_s:
                self._on_lost(f"{name} was lost: {why}")
                return

    def _problem(self) -> str | None:
        try:
            socket.create_connection(self._address, CONNECT_TIMEOUT_S).close()
        except OSError as error:
            return str(error)
        return None
