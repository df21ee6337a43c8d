"""The prepare pool: threads for what would hold up the event loop (templates, tokenising, schemas), within limits.

A thread cannot be killed, so work that is too slow is given up on and its result dropped; what bounds it for good is
its input, capped at the door, and the sandbox's own limits. Refuses to know: what the work is.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from math import inf
from typing import TypeVar

from quire.types.errors import InputError, OverloadedError

T = TypeVar("T")

INLINE_SIZE = 4096  # characters or token ids handled on the event loop; more go to a thread
BACKLOG = 32  # jobs that may wait, per thread
STARVED = 0.5  # of its time: a job that had less of a processor was held up by others


class PreparePool:
    def __init__(self, workers: int, seconds: float):
        self.seconds = seconds
        self.backlog = workers * BACKLOG
        self.pending = 0  # jobs waiting or running, those given up on included
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="quire-work")

    async def run(self, work: Callable[[], T]) -> T:
        """`work` in a thread. OverloadedError if it had no turn in time, or too little of the processor to tell; else
        InputError if it took too long."""
        if self.pending >= self.backlog:
            raise OverloadedError("too many requests are being prepared; retry shortly")
        loop, context = asyncio.get_running_loop(), copy_context()  # which says whose work it is
        began: list[tuple[int, float]] = []  # the thread, and the processor time it had used by then

        def timed() -> T:
            began.append((threading.get_ident(), time.thread_time()))
            return context.run(work)

        self.pending += 1
        job = self._pool.submit(timed)
        job.add_done_callback(lambda _: loop.is_closed() or loop.call_soon_threadsafe(self._done))
        try:
            return await asyncio.wait_for(asyncio.wrap_future(job), self.seconds)
        except TimeoutError:
            if not began or _processor_time(*began[0]) < STARVED * self.seconds:
                raise OverloadedError("the request could not be prepared in time; retry shortly") from None
            raise InputError(
                f"preparing the request (template, tokens, schema) took more than {self.seconds:g} s; make it smaller"
            ) from None

    def _done(self) -> None:
        self.pending -= 1

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def _processor_time(thread: int, since: float) -> float:
    """What a running thread used since then; without end where a system does not tell."""
    clock = getattr(time, "pthread_getcpuclockid", None)
    return inf if clock is None else time.clock_gettime(clock(thread)) - since


_CURRENT: ContextVar[PreparePool] = ContextVar("quire_prepare_pool")


def enter(prepare_pool: PreparePool) -> None:
    """Make `prepare_pool` that of the running task and of tasks it starts."""
    _CURRENT.set(prepare_pool)


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """Run `work` here if its input is small, else in the prepare_pool so that streams keep flowing."""
    return work() if size <= INLINE_SIZE else await _CURRENT.get().run(work)
