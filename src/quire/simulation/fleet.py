"""Many simulated replicas behind a router, in as many processes as there are cores.

A router decides from loads that replicas report every `REPORT_S` seconds of simulated time, and from its own decisions
since; so replicas run apart from one another between reports, and how many processes share them changes nothing.

    route what arrives until the next report ──► workers: replicas run until then ──► loads ──► ...

Where replicas are scaled, their counters come with the loads once a second, and requests wait while none is ready.
Refuses to know: what replicas do, what is made of their records.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from math import inf
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Protocol

import msgspec

from quire.cluster.router_policy import ReplicaLoad, RouterPolicy, RouteView
from quire.cluster.routers import make_router, router_named
from quire.simulation.fleet_roles import FleetRoles, Routed
from quire.simulation.fleet_scaling import FleetScaling
from quire.simulation.records import Progress, Result
from quire.simulation.replica import START, Kind, Replica
from quire.simulation.traces import TRACE_BLOCK, Arrival
from quire.types.autoscaling import AutoscaleOptions
from quire.types.config import EngineOptions
from quire.types.cost_model import CostModel
from quire.types.errors import ConfigError, EngineDeadError
from quire.types.events import EngineStats
from quire.types.memory_use import usable_cores

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
    autoscale: AutoscaleOptions | None = None  # None: `replicas` all the time
    startup: float = 30.0  # seconds that a replica takes to start, where they are scaled
    prefill_replicas: int = 0  # of the replicas, those that compute prompts for the others, at first
    switch_roles: bool = True  # whether roles follow the load

    def __post_init__(self) -> None:
        router_named(self.router)  # there is one
        if self.autoscale is not None and self.clients:
            raise ConfigError("clients of a closed loop have a replica each: nothing is scaled")
        if self.prefill_replicas and (self.autoscale is not None or self.clients):
            raise ConfigError("prefill_replicas are of a fixed number, and of no closed loop")
        if self.prefill_replicas >= self.replicas:
            raise ConfigError("prefill_replicas must be fewer than replicas: some must answer")
        if self.autoscale is not None:
            self.autoscale.validate_initial(self.replicas)

    @cached_property
    def most(self) -> int:
        """Replicas that there may be."""
        return (self.autoscale and self.autoscale.max_replicas) or self.replicas

    def build(self, trace: Sequence[Arrival], share: range) -> list[Replica]:
        """Replicas by number."""
        observes = router_named(self.router).observes
        made = [Replica(self.options, self.model, oracle=self.oracle, observes=observes) for _ in share]
        if self.clients:
            for number, replica in zip(share, made, strict=True):
                own = range(number, len(trace), self.replicas)
                clients = len(range(number, self.clients, self.replicas))
                replica.close_loop(((trace[i], i) for i in own), clients, self.think)
        return made


class Orders(msgspec.Struct, array_like=True):
    """Requests and their replicas; run until then (None: to the end). Before that, those that ended lose their cache;
    after it, `counted` ones report their counters. Requests may have waited for a replica until `since`."""

    since: float
    until: float | None
    routed: list[Routed]
    ended: list[int] = []
    counted: list[int] = []


class Report(msgspec.Struct, array_like=True):
    loads: list[tuple[int, int]]  # of all replicas of a worker
    stats: dict[int, EngineStats]  # of those asked for
    prefilled: list[int] = []  # requests whose prompts were computed for others
    progress: list[Progress] = []  # first tokens and ends, where the router observes them


class Worker(Protocol):
    def order(self, orders: Orders) -> None: ...

    def report(self) -> Report: ...

    def result(self) -> Result: ...


class LocalWorker:
    """Replicas of this process."""

    def __init__(self, fleet: Fleet, trace: Sequence[Arrival], share: range):
        self._trace = trace
        self._stats: dict[int, EngineStats] = {}
        self._replicas = dict(zip(share, fleet.build(trace, share), strict=True))

    def order(self, orders: Orders) -> None:
        for replica in orders.ended:
            if replica in self._replicas:
                self._replicas[replica].core.scheduler.memory.drop_cached()
        for request, replica, kind, need in orders.routed:
            self._replicas[replica].arrives(self._trace[request], request, need, orders.since, kind)
        for one in self._replicas.values():
            one.run(inf if orders.until is None else orders.until)

        counted = {number: self._replicas[number] for number in orders.counted if number in self._replicas}
        self._stats = {number: _copied(one.core.scheduler.snapshot()) for number, one in counted.items()}

    def report(self) -> Report:
        replicas = self._replicas.values()
        done = [int(name) for one in replicas for name in one.recorder.take_prefilled()]
        progress = [news for one in replicas for news in one.recorder.take_progress()]
        return Report([one.load for one in replicas], self._stats, done, progress)

    def result(self) -> Result:
        first, *rest = (one.result() for one in self._replicas.values())
        for other in rest:
            first.merge(other)
        return first


def _copied(stats: EngineStats) -> EngineStats:
    """As they are now: an engine goes on counting in the same objects."""
    return msgspec.convert(msgspec.to_builtins(stats), EngineStats)


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

    def report(self) -> Report:
        return msgspec.msgpack.decode(self._receive(), type=Report)

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
        pipe.send_bytes(msgspec.msgpack.encode(worker.report()))
    pipe.send_bytes(worker.result().packed())


def simulate(
    fleet: Fleet, trace: Sequence[Arrival], *, workers: int | None = None, told: Callable[[int], None] | None = None
) -> Result:
    """Serve a whole trace; what came of it. `told` hears of every portion how many requests it had."""
    count = min(workers or usable_cores(), fleet.most)
    shares = [range(first, fleet.most, count) for first in range(count)]
    kind = LocalWorker if count == 1 else RemoteWorker
    scaling = FleetScaling(fleet.autoscale, fleet.replicas, fleet.startup) if fleet.autoscale is not None else None
    roles = None
    if fleet.prefill_replicas:
        roles = FleetRoles(fleet.replicas, fleet.prefill_replicas, switch=fleet.switch_roles)
    with _no_collector():
        team: list[Worker] = [kind(fleet, trace, share) for share in shares]
        for portion in _routed(fleet, trace, team, shares, scaling, roles):
            for number, worker in enumerate(team):
                own = [one for one in portion.routed if one.replica % count == number]
                worker.order(msgspec.structs.replace(portion, routed=own))
            if told:
                told(sum(one.kind != Kind.HANDED_OVER for one in portion.routed))
        first, *rest = (worker.result() for worker in team)
    for other in rest:
        first.merge(other)
    first.replica_seconds = scaling.seconds if scaling is not None else fleet.replicas * (first.end - START)
    first.replicas_peak = scaling.peak if scaling is not None else fleet.replicas
    if roles is not None:
        first.prefill_peak, first.role_switches = roles.prefill_peak, roles.switches
    return first


def _routed(
    fleet: Fleet,
    trace: Sequence[Arrival],
    team: list[Worker],
    shares: list[range],
    scaling: FleetScaling | None,
    roles: FleetRoles | None,
) -> Iterator[Orders]:
    """Requests in portions, each routed when all before it have run as far."""
    machine, block = fleet.model.machine, max((one.block for one in trace[:1]), default=TRACE_BLOCK)
    held = machine.pages * machine.page_size // block
    router = make_router(fleet.router, fleet.most, fleet.seed, max(1, held))
    loads = [ReplicaLoad(accepts_requests=number < fleet.replicas) for number in range(fleet.most)]
    if roles is not None:
        roles.weigh(loads)
    waits = scaling is not None or roles is not None or (router.uses_loads and fleet.replicas > 1)
    first, since, parked, ended = len(trace) if fleet.clients else 0, 0.0, list[int](), list[int]()
    handed_over: list[Routed] = []
    while first < len(trace) or parked or (scaling is not None and scaling.busy) or (roles is not None and roles.busy):
        until = _next_report(trace[first].at) if first < len(trace) else inf
        until = until if scaling is None else min(until, scaling.next)
        until = until if roles is None else min(until, _next_report(since))
        last = first
        while last < len(trace) and (trace[last].at < until if waits else last < first + BATCH):
            last += 1
        requests = [*parked, *range(first, last)]
        if scaling is not None and not any(load.accepts_requests for load in loads):
            requests, parked = [], requests
        else:
            parked = []
        routed = [*handed_over, *(_route(number, trace[number], fleet, router, loads, roles) for number in requests)]
        if scaling is not None:
            scaling.busy |= bool(routed)
        looks = scaling is not None and until >= scaling.next
        counted = scaling.present if scaling is not None and looks else []
        yield Orders(since, until if waits else trace[last - 1].at, routed, ended, counted)
        reports, first, since, ended = [worker.report() for worker in team], last, until if waits else 0.0, []
        if scaling is not None and looks:
            ended = scaling.look(until, {n: one for report in reports for n, one in report.stats.items()}, len(parked))
            if router.directory is not None:
                for number in ended:
                    router.directory.forget(number)
        _observe(router, reports)
        for share, report in zip(shares, reports, strict=True):
            for number, load in zip(share, report.loads, strict=True):
                loads[number] = ReplicaLoad(*load, accepts_requests=scaling is None or scaling.ready(number, until))
        if roles is not None:
            handed_over = roles.prefilled(number for report in reports for number in report.prefilled)
            roles.look(until, loads)
            roles.weigh(loads)
    yield Orders(since, None, handed_over)
    for worker in team:
        worker.report()


def _route(
    number: int,
    one: Arrival,
    fleet: Fleet,
    router: RouterPolicy,
    loads: list[ReplicaLoad],
    roles: FleetRoles | None,
) -> Routed:
    """A request to the replica that answers it, or to one that computes its prompt for that."""
    targets = fleet.options.scheduler
    ttft, tpot = one.ttft or targets.slo_ttft or 0.0, one.tpot or targets.slo_tpot or 0.0
    view = RouteView(one.prompt, one.blocks, one.tenant, id=number, now=one.at + START, ttft=ttft, tpot=tpot)
    answers = router.choose(view, loads)
    need = one.prompt - router.saved
    prefill = roles.offload(number, need, answers, loads) if roles is not None else None
    if prefill is None:
        loads[answers].sent(need)
        return Routed(number, answers, need=need)
    router.offloaded(number)
    loads[answers].sent(0)
    loads[prefill].sent(need)
    return Routed(number, prefill, Kind.PREFILL_ONLY, need)


def _observe(router: RouterPolicy, reports: Sequence[Report]) -> None:
    """What became of requests, in the order of time."""
    for at, request, tokens in sorted(news for report in reports for news in report.progress):
        if tokens:
            router.ended(request, at, tokens)
        else:
            router.first_token(request, at)


def _next_report(now: float) -> float:
    """After that moment."""
    until = (now // REPORT_S + 1) * REPORT_S
    return until if until > now else until + REPORT_S


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
