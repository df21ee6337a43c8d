"""What all stores share: a queue, a thread that works through it, answers for whoever polls.

Gets and finds overtake puts and drops, since somebody waits for them; otherwise jobs keep their order. Where a page is
replaced in one stroke they have a thread of their own. An error ends a job, never the thread.

Refuses to know: what a store is made of.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Sequence
from itertools import count

from quire.types.transfer import Bytes, Key, TierDone, TierJob

log = logging.getLogger(__name__)

QUIET = 30.0  # seconds between complaints about the same store
_STOP = TierJob(-1, "stop", [])
_Jobs = queue.PriorityQueue[tuple[int, int, float, TierJob]]  # (rank, order, submitted, job)


class ThreadedTier:
    """`signal` is set whenever a job has ended."""

    name = "tier"
    apart = False  # whether pages may be read while others, or the same, are written

    def __init__(self, signal: threading.Event):
        self._signal = signal
        self._queues = [_Jobs() for _ in range(2 if self.apart else 1)]  # the last takes what changes the store
        self._order = count()
        self._done: queue.SimpleQueue[TierDone] = queue.SimpleQueue()
        self._cancelled: set[int] = set()
        self._complained = 0.0
        self._threads = [
            threading.Thread(target=self._work, args=(jobs,), name=f"quire-{self.name}", daemon=True)
            for jobs in self._queues
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: TierJob) -> None:
        rank = 0 if job.kind in ("get", "find") else 1
        self._queues[-rank].put((rank, next(self._order), time.monotonic(), job))

    def poll(self) -> Sequence[TierDone]:
        found = []
        while not self._done.empty():
            found.append(self._done.get())
        return found

    def cancel(self, job_id: int) -> None:
        self._cancelled.add(job_id)

    def scan(self) -> list[Key]:
        return []

    def close(self) -> None:
        for jobs in self._queues:
            jobs.put((2, next(self._order), 0.0, _STOP))
        for thread in self._threads:
            thread.join()

    def _work(self, jobs: _Jobs) -> None:
        while True:
            _, _, began, job = jobs.get()
            if job is _STOP:
                return
            done = [False] * len(job.keys)
            if job.id in self._cancelled:
                self._cancelled.discard(job.id)
            else:
                try:
                    done = self._do(job)
                except Exception as error:
                    self._complain(error)
            self._done.put(TierDone(job.id, done, time.monotonic() - began))
            self._signal.set()

    def _do(self, job: TierJob) -> list[bool]:
        if job.kind == "put":
            return self._put(job.keys, job.buffers)
        if job.kind == "get":
            return self._get(job.keys, job.buffers)
        return self._find(job.keys) if job.kind == "find" else self._drop(job.keys)

    def _complain(self, error: Exception) -> None:
        """A store that fails is slower than none, but it is no reason to stop; say so, not too often."""
        now = time.monotonic()
        if now - self._complained > QUIET:
            self._complained = now
            log.warning(
                "the %s tier failed (its pages are computed again): %s: %s", self.name, type(error).__name__, error
            )

    def _put(self, keys: list[Key], pages: Sequence[Bytes]) -> list[bool]:
        raise NotImplementedError

    def _get(self, keys: list[Key], into: Sequence[Bytes]) -> list[bool]:
        raise NotImplementedError

    def _find(self, keys: list[Key]) -> list[bool]:
        raise NotImplementedError

    def _drop(self, keys: list[Key]) -> list[bool]:
        raise NotImplementedError
