"""Many simulated replicas behind a router, in as many processes as there are cores.

A router decides from loads that replicas report every `REPORT_S` seconds of simulated time, and from its own decisions
since; so replicas run apart from one another between reports, and how many processes share them changes nothing.

    route what arrives until the next report ──► workers: replicas run until then ──► loads ──► ...

Refuses to know: what replicas do, what is made of their records.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Protocol

import msgspec

from quire.cluster.routers import ReplicaLoad, RouteView, make_router
from quire.simulation.records import Result
from quire.simulation.replica import Replica
from quire.simulation.traces import TRACE_BLOCK, Arrival
from quire.types.config import EngineOptions
from quire.types.cost_model import CostModel
from quire.types.errors import EngineDeadError

REPORT_S = 0.05  # between reports of a replica's load
BATCH = 4096  # requests handed over at a time where no report is waited for


@dataclass(frozen=True)
class Fleet:
    """What is simulated: one engine's options and device, so many times."""

    options: EngineOptions
    model: CostModel
    replicas: int = 1
    router: str = "round-robin"
    seed: int = 0
    clients: int = 0  # of a closed loop: each sends its next request when it has the last answer; 0: arrivals as told
    think: float = 0.0  # seconds before it does so
    oracle: bool = False  # answers' lengths are known in advance

    def build(self, trace: Sequence[Arrival], share: range) -> list[Replica]:
        """Replicas by number."""
        made = [Replica(self.options, self.model, oracle=self.oracle) for _ in share]
        if self.clients:
            for number, replica in zip(share, made, strict=True):
                own = range(number, len(trace), self.replicas)
                clients = len(range(number, self.clients, self.replicas))
                replica.close_loop(((trace[i], i) for i in own), clients, self.think)
        return made


class Orders(msgspec.Struct, array_like=True):
    """Requests by their number in the trace, the replica each goes to; run until then (None: to the end)."""

    until: float | None
    requests: list[int]
    replicas: list[int]


class Worker(Protocol):
    def order(self, orders: Orders) -> None: ...

    def loads(self) -> list[tuple[int, int]]: ...

    def result(self) -> Result: ...


class LocalWorker:
    """Replicas of this process."""

    def __init__(self, fleet: Fleet, trace: Sequence[Arrival], share: range):
        self._trace = trace
        self._replicas = dict(zip(share, fleet.build(trace, share), strict=True))

    def order(self, orders: Orders) -> None:
        for request, replica in zip(orders.requests, orders.replicas, strict=True):
            self._replicas[replica].arrives(self._trace[request], request)
        for one in self._replicas.values():
            one.run(inf if orders.until is None else orders.until)

    def loads(self) -> list[tuple[int, int]]:
        return [one.load for one in self._replicas.values()]

    def result(self) -> Result:
        first, *rest = (one.result() for one in self._replicas.values())
        for other in rest:
            first.merge(other)
        return first


class RemoteWorker:
    """Replicas of a process of their own, which has the trace from its parent."""

    def __init__(self, fleet: Fleet, trace: Sequence[Arrival], share: range):
        context = get_context("fork")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, fleet, trace, share), daemon=True)
        self._process.start()
        theirs.close()

    def order(self, orders: Orders) -> None:
        self._pipe.send_bytes(msgspec.msgpack.encode(orders))

    def _receive(self) -> bytes:
        try:
            return self._pipe.recv_bytes()
        except EOFError:
            raise EngineDeadError("a process of the simulation died") from None

    def loads(self) -> list[tuple[int, int]]:
        return msgspec.msgpack.decode(self._receive(), type=list[tuple[int, int]])

    def result(self) -> Result:
        self._pipe.send_bytes(b"")
        found = Result.unpacked(self._receive())
        self._process.join()
        return found


def _work(pipe: Connection, fleet: Fleet, trace: Sequence[Arrival], share: range) -> None:
    gc.disable()
    worker = LocalWorker(fleet, trace, share)
    while message := pipe.recv_bytes():
        worker.order(msgspec.msgpack.decode(message, type=Orders))
        pipe.send_bytes(msgspec.msgpack.encode(worker.loads()))
    pipe.send_bytes(worker.result().packed())


def simulate(
    fleet: Fleet, trace: Sequence[Arrival], *, workers: int | None = None, told: Callable[[int], None] | None = None
) -> Result:
    """Serve a whole trace; what came of it. `told` hears of every portion how many requests it had."""
    count = min(workers or os.cpu_count() or 1, fleet.replicas)
    shares = [range(first, fleet.replicas, count) for first in range(count)]
    kind = LocalWorker if count == 1 else RemoteWorker
    with _no_collector():
        team: list[Worker] = [kind(fleet, trace, share) for share in shares]
        for until, requests, chosen in _routed(fleet, trace, team, shares):
            for number, worker in enumerate(team):
                own = [i for i, replica in enumerate(chosen) if replica % count == number]
                worker.order(Orders(until, [requests[i] for i in own], [chosen[i] for i in own]))
            if told:
                told(len(requests))
        first, *rest = (worker.result() for worker in team)
    for other in rest:
        first.merge(other)
    return first


Routed = tuple[float | None, range, list[int]]  # until when, which requests, the replica of each


def _routed(fleet: Fleet, trace: Sequence[Arrival], team: list[Worker], shares: list[range]) -> Iterator[Routed]:
    """Requests in portions, each routed when all before it have run as far."""
    machine, block = fleet.model.machine, max((one.block for one in trace[:1]), default=TRACE_BLOCK)
    held = machine.pages * machine.page_size // block
    router = make_router(fleet.router, fleet.replicas, fleet.seed, max(1, held))
    loads = [ReplicaLoad() for _ in range(fleet.replicas)]
    waits = router.uses_loads and fleet.replicas > 1
    first = len(trace) if fleet.clients else 0
    while first < len(trace):
        until = trace[first].at // REPORT_S * REPORT_S + REPORT_S
        last = first + 1
        while last < len(trace) and (trace[last].at < until if waits else last < first + BATCH):
            last += 1
        chosen = []
        for one in trace[first:last]:
            view = RouteView(one.prompt, one.blocks, one.tenant)
            chosen.append(router.choose(view, loads))
            loads[chosen[-1]].sent(one.prompt - router.saved)
        yield until if waits else trace[last - 1].at, range(first, last), chosen
        for worker, share in zip(team, shares, strict=True):
            for number, load in zip(share, worker.loads(), strict=True):
                loads[number] = ReplicaLoad(*load)
        first = last
    yield None, range(0), []
    for worker in team:
        worker.loads()


@contextmanager
def _no_collector() -> Iterator[None]:
    """Engines make no cycles; collections would only walk millions of records."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()
