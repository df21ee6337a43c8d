"""A request's events on their way to its one reader.

Refuses to know: links, engines, what is made of events.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from quire.types.events import TokenEvent
from quire.types.request import Request

Sink = Callable[[TokenEvent], bool]  # whether it took the event


class Follower(Protocol):
    """A client as the queue of one request sees it."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...

    def attach(self, events: EventQueue, request: Request) -> None: ...

    def detach(self, events: EventQueue) -> bool: ...

    def abort(self, request_id: str) -> None: ...


class EventQueue:
    """Events of one request on their way to its one reader, who gets all that have come since it last looked. A reader
    that waits may have left a `sink` that is offered events first, where waking it would be most of the work. The
    first look submits the request; `aclose` before its end, or cancelling the reader, aborts it."""

    def __init__(self, client: Follower, request: Request):
        self._client = client
        self._request: Request | None = request
        self.id = request.id
        self.open = request.params.n  # branches whose end was not yet read
        self.events: list[TokenEvent] = []
        self.error: Exception | None = None
        self.waiter: asyncio.Future[None] | None = None  # there while the reader waits
        self.sink: Sink | None = None

    def __aiter__(self) -> EventQueue:
        return self

    async def __anext__(self) -> list[TokenEvent]:
        if self._request is not None:
            request, self._request, branches, self.open = self._request, None, self.open, 0
            self._client.attach(self, request)
            self.open = branches
        if not self.open:
            raise StopAsyncIteration
        if not self.events and self.error is None:
            self.waiter = self._client.loop.create_future()
            try:
                await self.waiter
            except asyncio.CancelledError:
                await self.aclose()
                raise
            finally:
                self.waiter = None
        if self.error is not None:
            self._client.detach(self)
            self.open = 0
            raise self.error
        events, self.events = self.events, []
        for event in events:
            if event.finish is not None:
                self.open -= 1
        if not self.open:
            self._client.detach(self)
        return events

    async def aclose(self) -> None:
        self._request = None
        if self._client.detach(self) and self.open and self.error is None:
            self._client.abort(self.id)
        self.open = 0

    def put(self, event: TokenEvent) -> None:
        """To the sink, if the reader has read all there was and the sink takes it; else the reader is woken."""
        if (waiter := self.waiter) is not None:
            try:
                if self.sink is not None and self.sink(event):
                    return
            except Exception as error:  # the reader's affair, not that of others whose events came with this one
                self.sink = None
                self.fail(error)
                self._client.abort(self.id)
                return
            self.waiter = None
            if not waiter.done():
                waiter.set_result(None)
        self.events.append(event)

    def fail(self, error: Exception) -> None:
        self.error = error
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)
