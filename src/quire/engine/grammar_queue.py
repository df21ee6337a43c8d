"""Requests on their way to the scheduler whose grammar is still being compiled; steps go on meanwhile.

What was prepared is kept until its request is over: it may wait long before it is admitted, and be preempted after.

Knows: futures. Refuses to know: what is prepared, and how.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from quire.types.errors import InputError, OverloadedError, QuireError, to_wire
from quire.types.events import TokenEvent
from quire.types.request import FinishReason, Request

log = logging.getLogger(__name__)

PATIENCE = 0.02  # seconds to wait for a compilation when there is nothing else to do


class GrammarQueue:
    def __init__(self, most: int):
        self._most = most
        self._requests: dict[str, tuple[Request, Future[Any]]] = {}
        self._kept: dict[str, Future[Any]] = {}  # of those submitted

    @property
    def requests(self) -> list[Request]:
        return [request for request, _ in self._requests.values()]

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: Request, ready: Future[Any], live: Container[str]) -> None:
        """`live` are the requests that are not over, of those submitted before."""
        self._kept = {name: kept for name, kept in self._kept.items() if name in live}
        if request.id in self._requests:
            raise InputError(f"request id {request.id!r} is already in use", param="request_id")
        if len(self._requests) >= self._most:
            raise OverloadedError(f"{len(self._requests)} grammars are already being compiled; retry shortly")
        self._requests[request.id] = request, ready

    def release(self, submit: Callable[[Request], None], *, idle: bool) -> list[TokenEvent]:
        """Submit what is ready; the ends of what is refused. When `idle`, waits a little for the first."""
        if idle:
            wait([ready for _, ready in self._requests.values()], PATIENCE, FIRST_COMPLETED)
        events: list[TokenEvent] = []
        for request, ready in [entry for entry in self._requests.values() if entry[1].done()]:
            del self._requests[request.id]
            try:
                ready.result()
                submit(request)
                self._kept[request.id] = ready
            except QuireError as error:
                events += endings(request, FinishReason.ERROR, error)
            except Exception as error:
                log.exception("a grammar could not be compiled")
                reason = QuireError(f"the grammar could not be compiled: {type(error).__name__}: {error}")
                events += endings(request, FinishReason.ERROR, reason)
        return events

    def abort(self, request_id: str) -> list[TokenEvent]:
        entry = self._requests.pop(request_id, None)
        return endings(entry[0], FinishReason.ABORT) if entry else []


def endings(request: Request, reason: FinishReason, error: QuireError | None = None) -> list[TokenEvent]:
    """A request that never ran ends on every branch."""
    kind, message = to_wire(error) if error else ("", "")
    return [
        TokenEvent(request.id, branch, 0, [], finish=reason, error=kind, message=message) for branch in request.branches
    ]
