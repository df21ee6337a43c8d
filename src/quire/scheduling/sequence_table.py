"""Who is where: sequences that wait and run, the slots they have, and how they come and leave.

    waiting ──► running (a slot, pages) ──► over
       ▲            │
       └─ preempted ┘        what steps in flight still use is given back when they land

Refuses to know: who is chosen, what a step computes, what came of it.
"""

from __future__ import annotations

from collections import deque

from quire.memory.manager import KVManager, PageTable
from quire.scheduling.features.beam_search import Search
from quire.scheduling.features.chunk_reuse import ChunkReuse
from quire.scheduling.features.kv_eviction import KVEviction
from quire.scheduling.features.sessions import Sessions
from quire.scheduling.features.tier_prefetch import TierPrefetch
from quire.scheduling.features.timeline_recorder import TimelineRecorder
from quire.scheduling.plan_builder import PlanBuilder
from quire.scheduling.preemption import PreemptionGuard
from quire.scheduling.sequence import Sequence
from quire.types.events import TokenEvent
from quire.types.request import FinishReason, Request, Status


class SequenceTable:
    def __init__(
        self,
        slots: int,
        *,
        memory: KVManager,
        timeline: TimelineRecorder,
        tiers: TierPrefetch,
        sessions: Sessions,
        preemption: PreemptionGuard,
        eviction: KVEviction,
        chunk_reuse: ChunkReuse,
    ):
        self.requests: dict[str, list[Sequence]] = {}
        self.searches: dict[str, Search] = {}
        self.waiting: deque[Sequence] = deque()
        self.running: dict[Sequence, None] = {}  # insertion-ordered set
        self.forks: dict[Sequence, None] = {}  # beams with pages but without a slot yet
        self.slots = list(range(slots - 1, -1, -1))  # that nobody has
        self.freed: list[int] = []  # slots to be named in the next plan
        self._count = slots
        self._memory = memory
        self._timeline = timeline
        self._tiers = tiers
        self._sessions = sessions
        self._preemption = preemption
        self._eviction = eviction
        self._chunk_reuse = chunk_reuse
        self._order = 0

    # ---- in -------------------------------------------------------------------------------------------------

    def enter(self, request: Request, limit: int) -> None:
        """Let a request wait, to become at most `limit` tokens long."""
        count = 1 if request.beam else request.params.n
        branches = [self._sequence(request, branch, limit) for branch in range(count)]
        self.requests[request.id] = branches
        if request.beam is not None:
            self.searches[request.id] = Search(branches[0], request.beam)
        if self._memory.contiguous:
            self.waiting.extend(branches)
        else:
            branches[0].children = branches[1:]
            self.waiting.append(branches[0])

    def enter_apart(self, request: Request) -> Sequence:
        """Let a prompt wait, before others, of which only the pages are wanted: nobody else hears of it."""
        seq = self._sequence(request, 0, len(request.prompt) + 1)
        seq.draws, seq.cached, seq.log.admitted = False, 0, self._timeline.now
        self.waiting.appendleft(seq)
        return seq

    def _sequence(self, request: Request, branch: int, limit: int) -> Sequence:
        self._order += 1
        table = PageTable(len(self._memory.layout.groups), request.id)
        seq = Sequence(request, branch, order=self._order, limit=limit, table=table)
        if kv_budget := self._eviction.kv_budget(request):
            seq.budgeted(kv_budget)
        self._timeline.arrived(seq)
        return seq

    def fork(self, parent: Sequence) -> Sequence:
        """A beam that sets out from another; it has no slot yet."""
        child = parent.fork(self._memory.fork(parent.table))
        self.forks[child] = None
        return child

    def run(self, builder: PlanBuilder, seq: Sequence) -> None:
        """Into a slot, and among the running."""
        seq.move(Status.RUNNING)
        self.running[seq] = None
        seq.slot = self.slots.pop()
        builder.admit(seq)

    # ---- out ------------------------------------------------------------------------------------------------

    def preempt(self, seq: Sequence) -> None:
        """Take a running sequence's pages and slot; it keeps its tokens and will catch up later."""
        seq.move(Status.PREEMPTED)
        del self.running[seq]
        seq.epoch += 1
        seq.pending = 0
        if seq.request.beam is not None:
            self.searches[seq.request.id].forget(seq)
        if not seq.outputs:
            seq.scores, seq.pooled = [], []
        self._timeline.preempted(seq)
        self._tiers.preempted(seq)
        self._preemption.preempted(seq)
        self._timeline.stats.preempted_most = max(self._timeline.stats.preempted_most, seq.preempted)
        self.waiting.appendleft(seq)
        if not seq.inflight:
            self.release(seq)

    def finish(self, seq: Sequence, reason: FinishReason, message: str = "") -> TokenEvent:
        """End a sequence and tell of it."""
        request = seq.request
        well = reason in (FinishReason.STOP, FinishReason.LENGTH)
        if request.session and seq.status is Status.RUNNING and well and not seq.evicted:
            self._memory.publish(seq.table, min(seq.computed, len(seq.tokens)), seq.tokens, request.salt)
            self._sessions.keep(request.session, request.salt, seq.table, self._timeline.now + request.hold)
        self.retire(seq)
        self._timeline.ended(seq, reason)
        if all(s.status is Status.FINISHED for s in self.requests[request.id]):
            del self.requests[request.id]
        return TokenEvent(
            request.id, seq.branch, seq.outputs, [], finish=reason, cached=max(0, seq.cached), message=message
        )

    def end(self, request_id: str, reason: FinishReason, message: str = "", error: str = "") -> list[TokenEvent]:
        """End all that is left of a request."""
        live = [s for s in self.requests.get(request_id, ()) if s.status is not Status.FINISHED]
        search = self.searches.pop(request_id, None)
        if search is None:
            events = [self.finish(seq, reason, message) for seq in live]
        else:
            for seq in search.live:
                self.retire(seq)
            self._timeline.ended(search.root, reason)
            branches = range(search.root.request.params.n)
            events = [TokenEvent(request_id, b, 0, [], finish=reason, message=message) for b in branches]
            del self.requests[request_id]
        for event in events:
            event.error = error
        return events

    def retire(self, seq: Sequence) -> None:
        """A sequence is over; its pages and slot go back as soon as no step in flight uses them."""
        if seq.status is not Status.RUNNING and seq in self.waiting:
            self.waiting.remove(seq)
        self.running.pop(seq, None)
        self.forks.pop(seq, None)
        self._tiers.gone(seq)
        self._preemption.ended(seq)
        seq.move(Status.FINISHED)
        for apart in self._chunk_reuse.gone(seq):
            self.retire(apart)
        if not seq.inflight:
            self.release(seq)

    def release(self, seq: Sequence) -> None:
        """Give back a sequence's slot and pages, which no step in flight uses."""
        if seq.slot >= 0:
            self.slots.append(seq.slot)
            self.freed.append(seq.slot)
            seq.slot = -1
        self._memory.release(seq.table, min(seq.computed, len(seq.tokens)) - seq.evicted)
        self._chunk_reuse.released(seq)
        seq.computed = seq.evicted = 0
        if seq.kv_budget is not None:
            seq.kv_budget.reset()

    def land(self, builder: PlanBuilder) -> None:
        """A step no longer uses its slots and pages; what ended meanwhile can go."""
        for seq in builder.members():
            seq.inflight -= 1
            if not seq.inflight and seq.status in (Status.FINISHED, Status.PREEMPTED):
                self.release(seq)

    # ---- invariants -----------------------------------------------------------------------------------------

    def holders(self, in_flight: deque[PlanBuilder]) -> list[Sequence]:
        """Sequences that have pages: for themselves, or because a step in flight still uses them."""
        landing = {s: None for f in in_flight for s in f.members() if s not in self.running}
        return [*self.running, *self.forks, *landing]

    def check(self, in_flight: deque[PlanBuilder]) -> None:
        slots = [s.slot for s in self.holders(in_flight) if s.slot >= 0]
        assert sorted([*slots, *self.slots]) == list(range(self._count)), "slots leaked or shared"
        for seq in self.running:
            assert seq.status is Status.RUNNING and seq.slot >= 0 and 0 <= seq.computed <= seq.known <= seq.limit
            assert 0 <= seq.evicted <= seq.computed and seq.held <= seq.peak, f"{seq.key}: more KV than it may have"
            assert seq.inflight == sum(seq in f.members() for f in in_flight), f"{seq.key}: lost a builder"
        for seq in self.waiting:
            assert seq.status in (Status.WAITING, Status.PENDING, Status.PREEMPTED)
            assert seq.inflight or (seq.slot < 0 and not any(seq.table.pages)), f"{seq.key} waits but holds memory"
