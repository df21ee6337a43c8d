"""One replica as its client sees it: which process it is now, what it works on, what it was asked.

starting ──(joined)──► ready ──► draining ──► drained ──(ended by its client)──┐
    ▲                    │ lost       │ lost                                   │
    └────────────────────┴────────────┴────────────────────────────────────────┘   Ray starts its next process

A process whose connection alone was lost joins again by itself: ready, or drained if it was to be. One that the
autoscaler does not want is stopped: there is no process, and none is started.
"""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Callable
from dataclasses import dataclass

from quire.cluster.active_request import SubRequest
from quire.cluster.router_policy import ReplicaLoad
from quire.types.errors import EngineDeadError
from quire.types.membership import ReplicaView
from quire.types.messages import Answer, EngineInfo, Ready


class ReplicaState(enum.StrEnum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    DRAINED = "drained"
    STOPPED = "stopped"


@dataclass(eq=False, slots=True)
class InternalRequest:
    """Work for another replica's request: a prompt to compute, or pages to get. Nobody reads what it draws."""

    id: str
    replica: Replica
    tokens: int  # to be computed
    began: float
    done: Callable[[bool], None]  # told whether it went well
    alone: bool  # nothing else was to be computed there when it came


class Replica:
    def __init__(self, number: int, role: str = "both", *, wanted: bool = True):
        self.number = number
        self.role = role
        self.role_fixed = False  # an operator gave it: it does not change by itself
        self.wanted = wanted  # whether it is to be there
        self.id = f"replica-{number}"
        self.load = ReplicaLoad(accepts_requests=False)
        self.identity = ""  # of its process's connection on the hub; none: there is none
        self.process = ""  # the latest that joined as this replica
        self.pid = 0
        self.host = ""
        self.connector = ""  # where others ask it for KV pages; empty: it hands none over
        self.info: EngineInfo | None = None
        self.restarts = 0  # processes that took the place of one that was lost or replaced
        self.rejoins = 0  # times that its process joined again after its connection was lost
        self.lost = ""  # why it, or its connection, was lost last
        self.last_heartbeat = 0.0
        self.sub_requests: dict[str, SubRequest] = {}  # what it works on, by the ids it knows them by
        self.internal: dict[str, InternalRequest] = {}  # ... and for others' requests
        self.pending_queries: dict[int, asyncio.Future[Answer]] = {}  # queries under way, by their ids
        self.answered = 0  # the latest query that it answered; it answers in their order
        self.last_order = 0  # the latest query before all replicas were told to drop or to load something
        self.joined = asyncio.Event()
        self.idle = asyncio.Event()
        self.gone = asyncio.Event()
        self._state = ReplicaState.STARTING if wanted else ReplicaState.STOPPED
        self._routable = True
        self._silent = False
        self._drained = False  # whether it takes no requests when its process joins again
        self._replaces = False  # whether its next process is a restart
        self.idle.set()
        self.gone.set()

    @property
    def state(self) -> ReplicaState:
        return self._state

    @state.setter
    def state(self, state: ReplicaState) -> None:
        self._state = state
        self._replaces &= state is not ReplicaState.STOPPED
        self._route()

    def _route(self) -> None:
        self.load.accepts_requests = self.is_ready and self._routable and not self._silent

    @property
    def is_ready(self) -> bool:
        return self._state is ReplicaState.READY

    @property
    def routable(self) -> bool:
        """Whether the router may send it requests while it is ready."""
        return self._routable

    @routable.setter
    def routable(self, routable: bool) -> None:
        self._routable = routable
        self._route()

    @property
    def silent(self) -> bool:
        """Whether nothing is sent to it before it is heard of again: another was just lost to silence."""
        return self._silent

    @silent.setter
    def silent(self, silent: bool) -> None:
        self._silent = silent
        self._route()

    def join(self, identity: str, ready: Ready) -> bool:
        """A process is ready to work as this replica. Whether it did so before."""
        again = bool(ready.process) and ready.process == self.process
        self.identity, self.pid, self.host, self.info = identity, ready.pid, ready.host, ready.info
        self.connector, self.process = ready.connector, ready.process
        if not again:
            self.last_order = 0
        self.restarts += self._replaces and not again
        self.rejoins += again
        self.last_heartbeat = time.monotonic()
        self._silent = False
        self.state = ReplicaState.DRAINED if again and self._drained else ReplicaState.READY
        self.joined.set()
        self.gone.clear()
        return again

    @property
    def silence(self) -> float:
        """Seconds since it was last heard of."""
        return time.monotonic() - self.last_heartbeat

    @property
    def missed_orders(self) -> bool:
        return self.answered < self.last_order

    def leave(self, why: str) -> list[SubRequest]:
        """Its process is gone, or its connection; what it was working on."""
        self.identity, self.pid, self._replaces = "", 0, True
        if self._state is not ReplicaState.DRAINED:  # which was to end
            self.lost = why
        self._drained = self._state in (ReplicaState.DRAINING, ReplicaState.DRAINED)
        self.state = ReplicaState.STARTING if self.wanted else ReplicaState.STOPPED
        self.joined.clear()
        self.gone.set()
        for future in self.pending_queries.values():
            if not future.done():
                future.set_exception(EngineDeadError(why))
        self.pending_queries.clear()
        for internal in list(self.internal.values()):
            self.finish_internal(internal, well=False)
        return self.remove_all()

    def remove_all(self) -> list[SubRequest]:
        """All it works on, which is others' from now on."""
        left = list(self.sub_requests.values())
        for sub_request in left:
            self.remove_request(sub_request)
        return left

    def add_request(self, sub_request: SubRequest) -> None:
        self.sub_requests[sub_request.request.id] = sub_request
        self.load.sent(sub_request.prefill)
        self.idle.clear()

    def prefill_done(self, sub_request: SubRequest) -> None:
        """It has computed the prompt."""
        sub_request.started = True
        self.load.prefilled(sub_request.prefill)

    def remove_request(self, sub_request: SubRequest) -> None:
        """It has nothing to do with it any more."""
        if self.sub_requests.pop(sub_request.request.id, None) is not None:
            self.load.ended(0 if sub_request.started else sub_request.prefill)
            self._rest()

    def add_internal(self, internal: InternalRequest) -> None:
        self.internal[internal.id] = internal
        self.load.sent(internal.tokens)
        self.idle.clear()

    def finish_internal(self, internal: InternalRequest, *, well: bool) -> None:
        if self.internal.pop(internal.id, None) is not None:
            self.load.ended(internal.tokens)
            self._rest()
            internal.done(well)

    def _rest(self) -> None:
        if not self.sub_requests and not self.internal:
            self.idle.set()

    def view(self) -> ReplicaView:
        running = sum(sub_request.started for sub_request in self.sub_requests.values())
        return ReplicaView(
            id=self.id, pid=self.pid, host=self.host, role=self.role, state=self.state.value, running=running,
            waiting=len(self.sub_requests) - running + len(self.internal), restarts=self.restarts,
            rejoins=self.rejoins, lost=self.lost,
        )  # fmt: skip
