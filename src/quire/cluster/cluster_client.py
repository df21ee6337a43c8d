"""The engine client of a cluster: many replicas of one model behind one EngineClient.

    submit ──► router ──► a replica ──► events ──► the request's queue
                            └──(gone)──► another replica goes on behind the tokens that the queue was given

Everything here runs on one event loop; frames come from the hub's thread, once for all that came together. Replicas are
started, watched and started again by whoever hosts them (`cluster/ray_host.py`). Refuses to know: Ray, text.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextvars import copy_context

from msgspec.structs import replace

from quire.cluster.active_request import ActiveRequest, SubRequest
from quire.cluster.autoscaler import Autoscaler
from quire.cluster.handovers import Handovers
from quire.cluster.migration import Migrations
from quire.cluster.pending_requests import NO_REPLICA, PendingRequests
from quire.cluster.replica_handle import Replica, ReplicaState
from quire.cluster.replica_hub import Received, ReplicaHub
from quire.cluster.replica_losses import MAX_FAILOVERS, ReplicaLosses
from quire.cluster.replica_operations import START_TIMEOUT_S, ReplicaOperations
from quire.cluster.replica_scaling import ReplicaHost, ReplicaScaler
from quire.cluster.request_router import RequestRouter
from quire.cluster.role_switching import RoleSwitcher
from quire.cluster.roles import BOTH, DECODE, PREFILL
from quire.cluster.router_policy import RouterPolicy
from quire.engine.client import CLOSED, RestartPolicy
from quire.engine.event_queue import EventQueue
from quire.types.errors import EngineDeadError, InputError, OverloadedError, QuireError, from_wire
from quire.types.events import TokenEvent
from quire.types.membership import ReplicaMembership
from quire.types.messages import (
    Abort,
    CacheEvents,
    EngineInfo,
    Events,
    Failed,
    FinishAt,
    Ready,
    Refused,
    Reply,
    Shutdown,
    Submit,
    ToClient,
)
from quire.types.request import ENDED_WELL, Request

log = logging.getLogger(__name__)

RETRY_S = 0.25  # before a request that goes on elsewhere is offered again, where a queue was full
WATCH_INTERVAL_S = 1.0
CLOSE_TIMEOUT_S = 5.0
SILENT_S = 2.0  # without a frame, of which there are two a second at least while an engine steps


class ClusterClient(ReplicaOperations):
    """Implements types.seams.EngineClient for `replicas` engines that join the hub, and as many as the autoscaler wants
    later."""

    def __init__(
        self,
        replicas: int,
        policy: RouterPolicy,
        restarts: RestartPolicy,
        host: str = "127.0.0.1",
        *,
        autoscaler: Autoscaler | None = None,
        replica_wait: float | None = None,
        prefill: int = 0,
        connector: str = "",
        handover_timeout: float = 10.0,
        rebalance: bool = False,
        switch_roles: bool = False,
        targets: tuple[float, float] = (0.0, 0.0),
    ):
        """`replica_wait`: seconds that a request waits for a replica while there is none. `prefill`: how many of the
        replicas only compute prompts; `connector`: by which KV pages are handed over. `targets`: for the first token
        and for each, in seconds, of requests without their own."""
        super().__init__(ReplicaHub(host, self._on_loop))
        self.autoscaler = autoscaler
        self._scaler: ReplicaScaler | None = None
        self.policy = restarts
        self.failovers = 0  # requests that went on on another replica because theirs was lost
        most = replicas if autoscaler is None else autoscaler.max_replicas
        decoding = DECODE if prefill else BOTH
        self._replicas = [
            Replica(number, PREFILL if number < prefill else decoding, wanted=number < replicas)
            for number in range(most)
        ]
        self._loads = [replica.load for replica in self._replicas]
        self._replica_by_id: dict[str, Replica] = {}  # who has each sub-request
        self._router = RequestRouter(policy, targets)
        self.membership = ReplicaMembership(
            identity="",
            keys=self.hub.keys,
            page_key=self._router.page_key.hex(),
            block_tokens=self._router.block_tokens,
            connector=connector,
        )
        self.handovers = Handovers(self.hub, self._replicas, self._router, handover_timeout)
        self.migration = Migrations(self.handovers, self._replicas, self._resume_on, handover_timeout)
        self._rebalance = rebalance
        self.role_switcher = RoleSwitcher(self._replicas, self._change_role) if switch_roles else None
        self._active: dict[str, ActiveRequest] = {}
        self._standby: dict[str, Ready] = {}  # processes that are ready and that nothing is known to be vacant for
        self._pending = PendingRequests(self.loop, replica_wait)
        self._losses = ReplicaLosses(restarts.max_restarts)
        self._lost: asyncio.Future[QuireError] = self.loop.create_future()
        self._failed: asyncio.Future[QuireError] = self.loop.create_future()  # a replica that could not start
        self._closing = False
        self._closed: asyncio.Future[None] | None = None
        self._host: ReplicaHost | None = None
        self._context = copy_context()  # what replicas say is no request's affair
        self._info: EngineInfo | None = None
        self._watcher = self.loop.call_later(WATCH_INTERVAL_S, self._watch)

    async def ready(self, host: ReplicaHost) -> None:
        """Wait for all replicas; raises what kept one from starting."""
        self._host = host
        wanted = [replica for replica in self._replicas if replica.wanted]

        async def all_join() -> None:
            for replica in wanted:
                await replica.joined.wait()

        joined = asyncio.create_task(all_join())
        try:
            done, _ = await asyncio.wait(
                (joined, self._failed), timeout=START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            joined.cancel()
        if self._failed in done:
            raise self._failed.result()
        if not done:
            here = sum(replica.joined.is_set() for replica in wanted)
            problem = f"{here} of {len(wanted)} replicas were ready within {START_TIMEOUT_S:.0f} s"
            raise EngineDeadError(f"{problem}; does the cluster have room for all of them?")
        if self.autoscaler is not None:
            self._scaler = ReplicaScaler(self.autoscaler, self._replicas, self, host)

    @property
    def info(self) -> EngineInfo:
        """Of any replica, and what all can run together."""
        assert self._info is not None
        return self._info

    @property
    def restarts(self) -> int:
        return sum(replica.restarts for replica in self._replicas)

    def trouble(self) -> str | None:
        silent = None
        for replica in self._replicas:
            if replica.load.accepts_requests or replica.silent:
                if replica.silence <= self.policy.heartbeat:
                    return None
                silent = f"no replica gave a sign of life for {self.policy.heartbeat:g} s"
        if silent is None and self._starts_from_zero and not self._closing:
            return None
        return CLOSED if self._closing else silent or NO_REPLICA

    @property
    def _starts_from_zero(self) -> bool:
        """Whether a request that finds no replica starts one."""
        return self.autoscaler is not None and self.autoscaler.min_replicas == 0

    async def lost(self) -> QuireError:
        return await asyncio.shield(self._lost)

    def lose(self, why: str) -> None:
        """From any thread: who hosts the replicas is gone. Those that are there answer what they have."""

        def told() -> None:
            for future in (self._lost, self._failed):
                if not future.done():
                    future.set_result(EngineDeadError(why))

        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(told)

    # ---- requests -------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> EventQueue:
        return EventQueue(self, request)

    def attach(self, events: EventQueue, request: Request) -> None:
        there = any(replica.load.accepts_requests or replica.silent for replica in self._replicas)
        if self._closing or not (self._starts_from_zero or there):
            raise EngineDeadError(CLOSED if self._closing else NO_REPLICA)
        if request.id in self._active:
            raise InputError(f"request id {request.id!r} is already in use", param="request_id")
        active = self._active[request.id] = ActiveRequest.begun(request, events)
        self._dispatch(active, request)

    def detach(self, events: EventQueue) -> bool:
        active = self._active.get(events.id)
        if active is None or active.events is not events:
            return False
        del self._active[events.id]
        self._pending.discard(active)
        self.abort_sub_requests(active)
        for replica, sub_request in self._dispatched(active):
            self._drop(replica, sub_request)
        active.sub_requests.clear()
        return True

    def abort(self, request_id: str) -> None:
        if (active := self._active.get(request_id)) is not None:
            active.aborted = True
            self.abort_sub_requests(active)
            for _, waiting in self._pending.take(lambda one: one is active):
                self._dispatch(active, waiting)

    def abort_sub_requests(self, active: ActiveRequest) -> None:
        for replica, sub_request in self._dispatched(active):
            self.hub.send(replica.identity, Abort(sub_request.request.id))

    def finish_at(self, request_id: str, branch: int, tokens: int) -> None:
        if (active := self._active.get(request_id)) is not None:
            active.stopped.add(branch)
            for replica, sub_request in self._dispatched(active):
                if branch in sub_request.branches:
                    self.hub.send(replica.identity, FinishAt(sub_request.request.id, branch, tokens))

    def _dispatched(self, active: ActiveRequest) -> list[tuple[Replica, SubRequest]]:
        """Those that a replica has now."""
        return [(self._replica_by_id[id], sub_request) for id, sub_request in active.sub_requests.items()]

    def _drop(self, replica: Replica, sub_request: SubRequest) -> None:
        self._finished(sub_request)
        replica.remove_request(sub_request)

    def _finished(self, sub_request: SubRequest, *, lost: bool = False) -> None:
        """On the replica that had it; `lost`: with it, and who knows when that drew last."""
        request, id = sub_request.request, sub_request.request.id
        self._replica_by_id.pop(id, None)
        self.handovers.on_finished(id)
        drawn = max((len(sub_request.active.outputs[branch]) for branch in request.branches), default=0)
        self._router.ended(id, 0 if lost else drawn - len(request.outputs))

    def _dispatch(self, active: ActiveRequest, request: Request, on: Replica | None = None) -> None:
        """Send a request, or branches of one, to the replica that the router chooses, or `on` one that has its pages;
        without any, let it wait."""
        if self._active.get(active.request.id) is not active:
            return  # its reader left
        if active.aborted:
            for event in active.given_up(request):
                active.events.put(event)
            return
        if active.failovers > MAX_FAILOVERS:
            problem = f"{active.failovers} replicas were lost while they worked on this request; it is given up"
            if active.deaths > MAX_FAILOVERS:
                active.events.fail(EngineDeadError(problem))
            else:  # until it is known that they died, or that the network did
                self._pending.add(active, request, problem)
            return
        if not any(load.accepts_requests for load in self._loads):
            self._pending.add(active, request)
            if self._scaler is not None:
                self._scaler.wake()
            return
        if on is not None and on.is_ready:
            replica, cached = on, len(request.prompt) + len(request.outputs)
            self._router.moved(request, on.number)
        else:
            number, cached = self._router.choose(request, self._loads)
            replica = self._replicas[number]
        request = self.handovers.offload(request, replica, cached)
        if request.handover is not None:
            self._router.offloaded(request.id)
        sub_request = active.sub_request(request, cached)
        replica.add_request(sub_request)
        self._replica_by_id[request.id] = replica
        self.hub.send(replica.identity, Submit(request))

    def _resume_on(self, sub_request: SubRequest, target: Replica) -> None:
        """A sub-request goes on on the replica that has its pages."""
        source = self._replica_by_id[sub_request.request.id]
        self.hub.send(source.identity, Abort(sub_request.request.id))
        source.remove_request(sub_request)
        self._move([sub_request], lost=False, on=target)

    def _move(self, sub_requests: list[SubRequest], *, lost: bool, on: Replica | None = None) -> None:
        """Have sub-requests go on elsewhere; `lost`: because their replica was."""
        touched = {sub_request.active: None for sub_request in sub_requests}
        for active in touched:
            self.failovers += lost
            for event in active.ended():
                active.events.put(event)
        for sub_request in sub_requests:
            self._finished(sub_request, lost=lost)
            for request in sub_request.active.resumed(sub_request):
                self._remember(sub_request.active.request.id, request.id)
                self._dispatch(sub_request.active, request, on)

    # ---- what replicas say ----------------------------------------------------------------------------------

    def _on_loop(self, news: Received) -> None:
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self._received, news, context=self._context)

    def _received(self, news: Received) -> None:
        lost: list[tuple[str, Failed | None]] = []
        for identity, message in news:
            replica = self._by_identity.get(identity)
            if isinstance(message, Ready):
                self._joined(identity, message)
            elif message is None or isinstance(message, Failed):
                lost.append((identity, message))
            elif replica is None and identity not in self._standby:  # given up: what it worked on is others'
                self.hub.send(identity, Shutdown())
            elif replica is not None:
                replica.last_heartbeat = time.monotonic()
                if replica.silent:
                    replica.silent = False
                    self._dispatch_pending()
                self._on_message(replica, message)
        if lost:
            self._on_replicas_lost(lost)

    def _on_message(self, replica: Replica, message: ToClient) -> None:
        if isinstance(message, Events):
            for event in message.events:
                if (sub_request := replica.sub_requests.get(event.request)) is not None:
                    self._deliver(replica, sub_request, event)
                else:
                    self.handovers.on_event(replica, event)
        elif isinstance(message, CacheEvents):
            self._router.learn(replica.number, message)
        elif isinstance(message, Reply):
            replica.answered = max(replica.answered, message.id)
            future = replica.pending_queries.pop(message.id, None)
            if future is not None and not future.done():
                future.set_result(message.answer)
            elif isinstance(message.answer, Refused):  # of what a new replica was told to have
                log.warning("%s refused: %s", replica.id, message.answer.message)

    def _deliver(self, replica: Replica, sub_request: SubRequest, event: TokenEvent) -> None:
        active = sub_request.active
        if event.error == OverloadedError.__name__ and sub_request.request.id != active.request.id:
            self._drop(replica, sub_request)  # it was accepted once: it waits until there is room
            for request in active.resumed(sub_request):
                self.loop.call_later(RETRY_S, self._dispatch, active, request)
            return
        if not sub_request.started and (event.finish is None or event.finish in ENDED_WELL):
            self._on_first_token(replica, sub_request, event)
        fresh = active.take(sub_request, event)
        if not sub_request.branches:
            self._drop(replica, sub_request)
        if fresh is not None:
            active.events.put(fresh)

    def _on_first_token(self, replica: Replica, sub_request: SubRequest, event: TokenEvent) -> None:
        replica.prefill_done(sub_request)
        self._router.first_token(sub_request.request.id)
        self.handovers.on_first_token(sub_request, replica, event.counts)
        if sub_request.cached and event.counts is not None:
            expected = min(sub_request.cached, len(sub_request.request.prompt))
            self._router.found(replica.number, expected, event.counts.cached)

    def _joined(self, identity: str, ready: Ready) -> None:
        if 0 <= ready.number < len(self._replicas):
            taken = [self._replicas[ready.number]]
        else:
            taken = [replica for replica in self._replicas if replica.wanted]
        if not any(replica.wanted for replica in taken):  # it was not needed any more before it was ready
            self.hub.send(identity, Shutdown())
            return
        own = next((replica for replica in taken if ready.process and replica.process == ready.process), None)
        if own is not None and own.identity:  # it has joined again before the loss of its connection was known here
            self._on_replicas_lost([(own.identity, None)])
        vacant = next((replica for replica in (own, *taken) if replica is not None and not replica.identity), None)
        if vacant is None:  # that of one whose end is not known here yet
            self._standby[identity] = ready
            return
        self._by_identity[identity] = vacant
        again = vacant.join(identity, ready)
        self._router.joined(vacant.number, ready)
        self.handovers.route()
        if self._info is None:
            self.adapters = list(ready.info.adapters)
        infos = [replica.info for replica in self._replicas if replica.info is not None]
        self._info = replace(ready.info, slots=sum(one.slots for one in infos), pages=sum(one.pages for one in infos))
        away = self._losses.take_back(vacant.number, ready.process)
        said = f"can be reached again after {away:.1f} s" if again else "is ready"
        log.info("%s %s: process %d on %s", vacant.id, said, vacant.pid, vacant.host)
        if vacant.role == PREFILL and not vacant.connector:
            log.warning("%s cannot hand KV pages of this model over: prompts are computed where answered", vacant.id)
        self._bring_up_to_date(vacant, ready.info.adapters)
        self._dispatch_pending()

    def _dispatch_pending(self) -> None:
        """There is a replica for requests that wait for one, or more is known of those that were lost."""
        for active, request in self._pending.take(
            lambda one: one.failovers <= MAX_FAILOVERS or one.deaths > MAX_FAILOVERS
        ):
            self._dispatch(active, request)

    def _on_replicas_lost(self, lost: list[tuple[str, Failed | None]]) -> None:
        """Processes have ended, or their connections have: all of them, before anything goes on elsewhere."""
        left = [sub_request for identity, failed in lost for sub_request in self._leave(identity, failed)]
        for spare in list(self._standby):
            self._joined(spare, self._standby.pop(spare))
        self._move(left, lost=True)
        if self._losses.too_many(sum(replica.wanted for replica in self._replicas)) and not self._lost.done():
            self._lost.set_result(EngineDeadError(f"replicas were lost {len(self._losses)} times within ten minutes"))

    def _leave(self, identity: str, failed: Failed | None) -> list[SubRequest]:
        """What a replica had under way that is lost, and that must go on elsewhere."""
        if failed is not None and not self._failed.done():
            self._failed.set_result(from_wire(failed.kind, failed.message))
        self._standby.pop(identity, None)
        replica = self._by_identity.pop(identity, None)
        if replica is None or self._closing:
            if failed is not None:
                self._losses.record_failure()
            return []
        self._on_process_ended(replica.process)
        silence = replica.silence
        why = f"nothing came from it for {silence:.1f} s" if silence > SILENT_S else "its connection closed"
        why, drained = failed.message if failed is not None else why, replica.state is ReplicaState.DRAINED
        left = replica.leave(why)
        self._router.left(replica.number)
        self.handovers.route()
        if drained:
            return []
        requests = {sub_request.active for sub_request in left}
        self._losses.record(replica.number, replica.process, requests)
        log.warning("%s was lost: %s; %d requests go on elsewhere", replica.id, why, len(requests))
        if silence > SILENT_S:  # others may be behind the same break: what goes on goes to those that are heard
            for other in (one for one in self._replicas if one.is_ready):
                other.silent = other.silence > SILENT_S
        return left

    @property
    def pending(self) -> int:
        """Requests that wait for a replica while there is none."""
        return len(self._pending)

    def _watch(self) -> None:
        """Replicas that hang, those that have too much to do, and those of which there are too few."""
        self._watcher = self.loop.call_later(WATCH_INTERVAL_S, self._watch)
        for replica in [one for one in self._replicas if one.identity]:
            if 0 < self.policy.hang_timeout < replica.silence:  # its host ends it
                silence = f"no sign of life for {replica.silence:.0f} s"
                self._on_replicas_lost([(replica.identity, Failed(EngineDeadError.__name__, silence))])
        if self._rebalance:
            self.migration.rebalance()
        if self.role_switcher is not None:
            self.role_switcher.look(time.monotonic())

    # ---- the end --------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """End all replicas; what is still open ends with an error first."""
        if self._closed is None:
            self._closed = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closed)

    async def _close(self) -> None:
        self._closing = True
        self._watcher.cancel()
        if self._scaler is not None:
            await self._scaler.close()
        self.migration.stop()
        if self.role_switcher is not None:
            self.role_switcher.stop()
        for active in self._active.values():
            active.events.fail(EngineDeadError(CLOSED))
        for identity in self._by_identity:
            self.hub.send(identity, Shutdown())
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        while self._by_identity and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        if self._host is not None:
            await asyncio.to_thread(self._host.stop)
        await asyncio.to_thread(self.hub.close)
