"""Requests that wait for a replica while there is none: in their order, each until its deadline or for so long at most.

Refuses to know: replicas, who starts them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from quire.cluster.active_request import ActiveRequest
from quire.types.errors import DeadlineError, EngineDeadError
from quire.types.request import Request

MAX_WAIT_S = 120.0  # unless told otherwise
NO_REPLICA = "no replica is ready; try again later"


class PendingRequests:
    def __init__(self, loop: asyncio.AbstractEventLoop, max_wait: float | None):
        self._loop = loop
        self._max_wait = MAX_WAIT_S if max_wait is None else max_wait
        self._waiting: dict[ActiveRequest, tuple[list[Request], asyncio.TimerHandle]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, active: ActiveRequest, request: Request, why: str = NO_REPLICA) -> None:
        """A request, or one more part of it; `why`: what it is told if it waits in vain."""
        if active in self._waiting:
            self._waiting[active][0].append(request)
            return
        left = request.deadline - time.time() if request.deadline else self._max_wait
        error: Exception = EngineDeadError(why)
        if left < self._max_wait:
            error = DeadlineError("the deadline passed before a replica was ready")
        timer = self._loop.call_later(min(left, self._max_wait), self._expire, active, error)
        self._waiting[active] = [request], timer

    def discard(self, active: ActiveRequest) -> None:
        """Its reader left."""
        if (found := self._waiting.pop(active, None)) is not None:
            found[1].cancel()

    def take(self, which: Callable[[ActiveRequest], bool]) -> list[tuple[ActiveRequest, Request]]:
        """Those that need not wait any longer."""
        found = [active for active in self._waiting if which(active)]
        taken = [(active, *self._waiting.pop(active)) for active in found]
        for _, _, timer in taken:
            timer.cancel()
        return [(active, request) for active, requests, _ in taken for request in requests]

    def _expire(self, active: ActiveRequest, error: Exception) -> None:
        del self._waiting[active]
        active.events.fail(error)
