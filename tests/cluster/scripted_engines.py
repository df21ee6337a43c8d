"""Engines that do what a test says, at once and in this process: a hub without sockets."""

from __future__ import annotations

import random
from typing import Any

from quire.cluster.replica_hub import Received
from quire.types.counts import Counts
from quire.types.errors import OverloadedError
from quire.types.events import EngineStats, TokenEvent
from quire.types.membership import CurveKeys
from quire.types.messages import (
    Abort,
    EngineInfo,
    Events,
    FinishAt,
    Query,
    Ready,
    Reply,
    Shutdown,
    Stats,
    Submit,
    ToClient,
    ToEngine,
)
from quire.types.request import FinishReason, Request

INFO = EngineInfo("fake", 4096, 97, 256, 16, 64, 1, "none", "none", [], slots=16)


class Engine:
    """What one process has under way: of each request, its branches and how many tokens each has drawn."""

    def __init__(self, identity: str, number: int):
        self.ready = Ready(INFO, 1, "here", number=number, connector=f"tcp://{identity}", process=identity)
        self.requests: dict[str, tuple[Request, dict[int, int]]] = {}
        self.said: list[ToClient] = []

    def hear(self, message: ToEngine) -> None:
        match message:
            case Submit(request):
                self.requests[request.id] = request, dict.fromkeys(request.branches, len(request.outputs))
            case Abort(id):
                self.end(id, FinishReason.ABORT)
            case FinishAt(id, branch):
                self.end(id, FinishReason.STOP, branch)
            case Query():
                self.said.append(Reply(message.id, Stats(EngineStats())))
            case Shutdown():
                pass

    def draw(self, id: str, branch: int) -> None:
        drawn = self.requests[id][1]
        self.say(TokenEvent(id, branch, drawn[branch], [7], counts=Counts(0)))
        drawn[branch] += 1

    def end(self, id: str, reason: FinishReason, branch: int | None = None, **why: Any) -> None:
        """All branches, or one; those it does not have any more are nobody's."""
        drawn = self.requests[id][1] if id in self.requests else {}
        for one in [one for one in drawn if branch in (None, one)]:
            self.say(TokenEvent(id, one, drawn.pop(one), [], finish=reason, counts=Counts(0), **why))
        if not drawn:
            self.requests.pop(id, None)

    def say(self, event: TokenEvent) -> None:
        self.said.append(Events([event]))

    def step(self, chance: random.Random) -> None:
        """Anything that an engine may do with one of its requests."""
        if not self.requests:
            return
        id = chance.choice(list(self.requests))
        drawn = self.requests[id][1]
        branch = chance.choice(list(drawn))
        match chance.randrange(8):
            case 0:
                self.end(id, FinishReason.LENGTH, branch)
            case 1:
                self.end(id, FinishReason.ERROR, error=OverloadedError.__name__, message="too many wait")
            case 2:
                self.end(id, FinishReason.ERROR, message="too late")
            case _:
                self.draw(id, branch)


class ScriptedHub:
    """Takes a ReplicaHub's place; `deliver` brings what engines said."""

    keys = CurveKeys("s", "p", "k")
    address = "nowhere"

    def __init__(self, host: str, receive: Any):
        self.engines: dict[str, Engine] = {}

    def send(self, replica: str, message: ToEngine) -> None:
        if (engine := self.engines.get(replica)) is not None:
            engine.hear(message)

    def start(self, number: int, identity: str) -> Received:
        engine = self.engines[identity] = Engine(identity, number)
        return [(identity, engine.ready)]

    def deliver(self, identity: str) -> Received:
        engine = self.engines[identity]
        said, engine.said = engine.said, []
        return [(identity, message) for message in said]

    def lose(self, identity: str) -> Received:
        del self.engines[identity]
        return [(identity, None)]

    def close(self) -> None:
        self.engines.clear()
