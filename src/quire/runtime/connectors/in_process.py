"""The connector of engines in one process: frames go from one object to another, each on a thread of its own."""

from __future__ import annotations

import queue
import threading
from collections.abc import Hashable
from typing import Any

from quire.runtime.connectors.page_connector import PageConnector


class InProcessConnector(PageConnector):
    """`peers`: all connectors that can reach each other, by address."""

    def __init__(self, peers: dict[str, InProcessConnector], address: str, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.address = address
        self._peers = peers
        self._inbox: queue.SimpleQueue[tuple[str, list[bytes]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="quire-pages", daemon=True)
        self._thread.start()
        peers[address] = self

    def close(self) -> None:
        if self._peers.pop(self.address, None) is None:
            return
        super().close()
        for peer in list(self._peers.values()):
            peer._lost(self.address)
            peer._left(self.address)
        self._inbox.put(None)
        self._thread.join()
        self._end_threads()

    def _run(self) -> None:
        while (message := self._inbox.get()) is not None:
            self._receive(*message)

    def _send_to(self, address: str, frames: list[bytes]) -> None:
        if (peer := self._peers.get(address)) is not None:
            peer._inbox.put((self.address, frames))
        else:
            self._lost(address)

    def _send(self, route: Hashable, frames: list[bytes]) -> None:
        self._send_to(str(route), frames)
