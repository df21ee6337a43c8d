"""Further clients of one engine process, API workers above all: each has a connection of its own, and one frame a step
with the events of its own requests. One that is gone takes its requests with it; the others do not notice.

Refuses to know: who starts clients and watches over them; the client that started the engine says who comes and goes.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq

from quire.engine.core import EngineCore
from quire.engine.link import handle
from quire.types.events import TokenEvent
from quire.types.messages import (
    MAX_FRAME,
    Abort,
    Attach,
    Events,
    FinishAt,
    FromAttached,
    Heartbeat,
    Query,
    Ready,
    Submit,
    ToClient,
)

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Client:
    socket: zmq.Socket[bytes]
    sent: float = 0.0
    events: list[TokenEvent] = field(default_factory=list)  # of this step


@dataclass(eq=False)
class _Owned:
    """A request of an attached client, and its branches whose end was not yet told."""

    client: _Client
    open: int


class AttachedClients:
    def __init__(self, context: zmq.Context[Any], poller: zmq.Poller):
        self._context = context
        self._poller = poller
        self._clients: dict[str, _Client] = {}
        self._requests: dict[str, _Owned] = {}
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromAttached)

    def attach(self, asked: Attach, ready: Ready) -> None:
        """Connect to where the client listens, or will in a moment."""
        connection = self._context.socket(zmq.PAIR)
        for name, value in ((zmq.LINGER, 0), (zmq.SNDHWM, 0), (zmq.RCVHWM, 0), (zmq.MAXMSGSIZE, MAX_FRAME)):
            connection.setsockopt(name, value)
        connection.connect(asked.address)
        self._poller.register(connection, zmq.POLLIN)
        client = self._clients[asked.client] = _Client(connection)
        self._send(client, ready)

    def detach(self, core: EngineCore, name: str) -> None:
        client = self._clients.pop(name, None)
        if client is None:
            return
        self._poller.unregister(client.socket)
        client.socket.close()
        left = [id for id, owned in self._requests.items() if owned.client is client]
        for id in left:
            del self._requests[id]
            core.abort(id)  # nobody reads how it ends
        if left:
            log.info("%s is gone, and %d requests with it", name, len(left))

    def receive(self, core: EngineCore) -> list[TokenEvent]:
        """Do what clients ask; events of their requests, to be delivered with those of the step."""
        events: list[TokenEvent] = []
        for name, client in list(self._clients.items()):
            try:
                while not core.scheduler.first_batch_waits and client.socket.poll(0):
                    events += self._handle(core, client, self._decoder.decode(client.socket.recv(zmq.NOBLOCK)))
            except msgspec.DecodeError as error:
                log.error("%s does not speak as a client does: %s", name, error)
                self.detach(core, name)
        return events

    def _handle(self, core: EngineCore, client: _Client, message: FromAttached) -> list[TokenEvent]:
        if isinstance(message, Abort | FinishAt):
            owned = self._requests.get(message.request)
            if owned is None or owned.client is not client:  # it is over, or another's
                return []
        replies = handle(core, message)
        if isinstance(message, Query) or (isinstance(message, Submit) and replies):  # refused: it never was
            for reply in replies:
                self._send(client, reply)
            return []
        if isinstance(message, Submit):
            self._requests[message.request.id] = _Owned(client, message.request.params.n)
        return [event for reply in replies if isinstance(reply, Events) for event in reply.events]

    def deliver(self, events: list[TokenEvent]) -> list[TokenEvent]:
        """Send each client its own; what is left is of the client that started the engine."""
        if not self._requests:
            return events
        rest: list[TokenEvent] = []
        requests = self._requests
        for event in events:
            owned = requests.get(event.request)
            if owned is None:
                rest.append(event)
                continue
            owned.client.events.append(event)
            if event.finish is not None:
                owned.open -= 1
                if not owned.open:
                    del requests[event.request]
        for client in self._clients.values():
            if client.events:
                events, client.events = client.events, []
                self._send(client, Events(events))
        return rest

    def forget_ended(self) -> None:
        """The engine has no request left."""
        self._requests.clear()

    def show_life(self, now: float, interval: float) -> None:
        for client in self._clients.values():
            if now - client.sent > interval:
                self._send(client, Heartbeat())

    def _send(self, client: _Client, message: ToClient) -> None:
        client.socket.send(self._encoder.encode(message), zmq.NOBLOCK)
        client.sent = time.monotonic()

    def close(self) -> None:
        for client in self._clients.values():
            client.socket.close()
        self._clients.clear()
