"""The engine client of an API worker: of an engine that the main process starts, owns and replaces. This one listens
where it is told to, the engine comes, and when the main process says that the engine is lost, it waits for the next.

Refuses to know: how engines start, who else is a client.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from pathlib import Path

from quire.engine.client import AsyncClient, RestartPolicy
from quire.engine.link import Link
from quire.engine.pair_link import POLL_INTERVAL_S, PairLink
from quire.types.errors import EngineDeadError, QuireError
from quire.types.messages import Ready


class WorkerLink(PairLink):
    lost = ""  # why the engine is gone, by the word of the main process

    def _ended(self) -> str:
        return self.lost

    def close(self, *, force: bool = False) -> None:
        """The engine stays the main process's."""
        self._release()


class EnginePlaces:
    """Where the engine comes to, as the main process says; the link's thread goes there."""

    def __init__(self) -> None:
        self._paths: queue.SimpleQueue[Path] = queue.SimpleQueue()
        self._link: WorkerLink | None = None

    def comes_to(self, path: Path) -> None:
        self._paths.put(path)

    def lost(self, why: str) -> None:
        if (link := self._link) is not None:
            link.lost = why
            link.wake()

    def next_link(self, stop: threading.Event) -> WorkerLink | None:
        """A link to the engine that comes next; None: `stop` came first."""
        while not stop.is_set():
            try:
                path = self._paths.get(timeout=POLL_INTERVAL_S)
            except queue.Empty:
                continue
            link = self._link = WorkerLink(path)
            if self._await_ready(link, stop):
                return link
            link.close()
        return None

    def _await_ready(self, link: WorkerLink, stop: threading.Event) -> bool:
        """Whether the engine came, rather than the word that it is lost, or comes elsewhere."""
        try:
            while not stop.is_set() and self._paths.empty():
                for message in link.receive(POLL_INTERVAL_S):
                    if isinstance(message, Ready):
                        link.info = message.info
                        return True
        except EngineDeadError:
            pass
        return False


class WorkerClient(AsyncClient):
    def __init__(self, link: Link, policy: RestartPolicy, places: EnginePlaces):
        super().__init__(link, policy)
        self._places = places

    @classmethod
    async def follow(cls, places: EnginePlaces, policy: RestartPolicy) -> WorkerClient:
        """Returns when the engine is there. `policy`: when its silence means trouble."""
        stop = threading.Event()
        try:
            link = await asyncio.to_thread(places.next_link, stop)
        finally:
            stop.set()
        assert link is not None
        return cls(link, policy, places)

    def _next(self, restarts: list[float], error: QuireError) -> Link | None:
        return self._places.next_link(self._closing)

    def _adapt_again(self) -> None:
        """The main process did, before it let the engine come."""
        self.adapters = list(self.info.adapters)
