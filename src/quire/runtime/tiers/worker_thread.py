"""What all tier stores share: a job queue, a thread that works through it, results for `poll`.

Gets and finds overtake puts and drops, since requests wait for them; otherwise jobs keep their order. Where pages are
replaced atomically they have a thread of their own. An error ends a job, never the thread.

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

WARNING_INTERVAL_S = 30.0  # for the same store
_STOP = TierJob(-1, "stop", [])
_Jobs = queue.PriorityQueue[tuple[int, int, float, TierJob]]  # (rank, order, submitted, job)


class ThreadedTier:
    """`signal` is set whenever a job has ended."""

    name = "tier"
    separate_reader = False  # whether pages may be read while others, or the same, are written

    def __init__(self, signal: threading.Event):
        self._signal = signal
        self._queues = [
            _Jobs() for _ in range(2 if self.separate_reader else 1)
        ]  # the last takes what changes the store
        self._order = count()
        self._done: queue.SimpleQueue[TierDone] = queue.SimpleQueue()
        self._cancelled: set[int] = set()
        self._warned_at = 0.0
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
                    self._warn(error)
            self._done.put(TierDone(job.id, done, time.monotonic() - began))
            self._signal.set()

    def _do(self, job: TierJob) -> list[bool]:
        if job.kind == "put":
            return self._put(job.keys, job.buffers)
        if job.kind == "get":
            return self._get(job.keys, job.buffers)
        return self._find(job.keys) if job.kind == "find" else self._drop(job.keys)

    def _warn(self, error: Exception) -> None:
        """A store that fails is slower than none, but no reason to stop: log it, not too often."""
        now = time.monotonic()
        if now - self._warned_at > WARNING_INTERVAL_S:
            self._warned_at = now
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
