"""Which sequences there are: those that wait and run, the slots they have, how they come and leave.

    waiting ──► running (a slot, pages) ──► over
       ▲            │
       └─ preempted ┘        what steps in flight still use is given back when they land

Every such move is made here and nowhere else, and told to all features and to the policy. Refuses to know: who is
chosen, what a step computes, what came of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from itertools import count
from typing import Any

from quire.memory.manager import Hit, KVManager, PageTable
from quire.scheduling.beam_search import Search
from quire.scheduling.feature import SchedulingFeature
from quire.scheduling.plan_builder import DecodeBatch, PlanBuilder
from quire.scheduling.policies import Policy
from quire.scheduling.sequence import Sequence
from quire.scheduling.sequence_group import SequenceGroup
from quire.scheduling.waiting_queue import WaitingQueue
from quire.types.clock import Clock
from quire.types.counts import Counts
from quire.types.events import TokenEvent
from quire.types.policy import EventKind, PolicyEvent, SequenceId, SequenceView
from quire.types.request import FinishReason, Request, Status

FEW_SLOTS = 0.25  # of all, when no more of them are free
NO_BATCH = DecodeBatch([])


class RowViews(SequenceOf[tuple[SequenceView, int]]):
    """Of a step, whose rows it has and of how many tokens; views are made only where a policy looks."""

    __slots__ = ("_step",)

    def __init__(self, step: PlanBuilder):
        self._step = step

    def __len__(self) -> int:
        return len(self._step.rows)

    def __iter__(self) -> Iterator[tuple[SequenceView, int]]:
        return ((seq.view, row.count) for row, (seq, _) in zip(self._step.plan.rows, self._step.rows, strict=True))

    def __getitem__(self, index: Any) -> Any:
        return list(self)[index]


class SequenceTable:
    def __init__(self, slots: int, *, memory: KVManager, policy: Policy, clock: Clock, late_draws: bool = False):
        self.requests: dict[str, SequenceGroup] = {}
        self.waiting = WaitingQueue()
        self.running: dict[Sequence, None] = {}  # insertion-ordered set
        self.forks: dict[Sequence, None] = {}  # beams with pages but without a slot yet
        self.children: dict[Sequence, list[Sequence]] = {}  # branches to fork off once a prompt is computed
        self.slots = list(range(slots - 1, -1, -1))  # free ones
        self.freed: list[int] = []  # slots to be named in the next plan
        self._count = slots
        self._late_draws = late_draws
        self._memory = memory
        self._policy = policy
        self.observed = frozenset(policy.observes)
        self._clock = clock
        self._ids = count(1)
        self._by_id: dict[int, Sequence] = {}
        self._batch = NO_BATCH  # of the latest step
        self.register()

    def register(self, *features: SchedulingFeature) -> None:
        """Tell these of everything, in this order."""

        def overriding(name: str) -> list[SchedulingFeature]:
            return [f for f in features if getattr(type(f), name) is not getattr(SchedulingFeature, name)]

        self.features = features
        self._arrived = [f.arrived for f in overriding("arrived")]
        self._admitted = [f.admitted for f in overriding("admitted")]
        self._drew = [f.drew for f in overriding("drew")]
        self._preempted = [f.preempted for f in overriding("preempted")]
        self._finished = [f.finished for f in overriding("finished")]
        self._released = [f.released for f in overriding("released")]
        self.step_planned = [f.step_planned for f in overriding("step_planned")]
        self.step_landed = [f.step_landed for f in overriding("step_landed")]
        self.holds = [f.holds for f in overriding("holds")]
        self.takes_over = [f.takes_over for f in overriding("takes_over")]
        self.contribute = [f.contribute for f in overriding("contribute")]
        self.reclaim = [f.reclaim for f in overriding("reclaim")]

    def tell(self, kind: EventKind, sequences: Iterable[tuple[Sequence, int]]) -> None:
        """Tell the policy, if it wants to know; sequences whose key that changes move in the queue."""
        if kind in self.observed:
            self._observe(PolicyEvent(kind, self._clock.now, [(seq.view, tokens) for seq, tokens in sequences]))

    def tell_computed(self, step: PlanBuilder) -> None:
        """Tell the policy which rows a step computes."""
        if EventKind.COMPUTED in self.observed:
            self._observe(PolicyEvent(EventKind.COMPUTED, self._clock.now, RowViews(step)))

    def _observe(self, event: PolicyEvent) -> None:
        for id in self._policy.observe(event):
            if (seq := self._by_id.get(id)) is not None:
                self._rank(seq)

    def _rank(self, seq: Sequence) -> None:
        queued = seq in self.waiting
        if queued:
            self.waiting.remove(seq)
        level = 0 if seq.overdue else 2 if seq.request.background else 1
        seq.rank = (level, *(self._policy.key(seq.view) if level else (seq.request.arrival,)), seq.id)
        if queued:
            self.waiting.add(seq)

    @property
    def few_slots(self) -> bool:
        """Whether most slots are taken."""
        return len(self.slots) < FEW_SLOTS * self._count

    def by_id(self, id: SequenceId) -> Sequence:
        return self._by_id[id]

    def put_first(self, seq: Sequence) -> None:
        """It has waited too long: from now on it goes before all others."""
        seq.overdue = True
        self._rank(seq)

    # ---- in -------------------------------------------------------------------------------------------------

    def enter(self, request: Request, limit: int) -> Sequence:
        """Let a request wait, to become at most `limit` tokens long; returns its first branch."""
        numbers = request.branches[:1] if request.beam else request.branches
        branches = [self._sequence(request, branch, limit) for branch in numbers]
        self.requests[request.id] = (
            SequenceGroup(request, branches) if request.beam is None else Search(branches[0], request.beam)
        )
        if self._memory.contiguous:
            for seq in branches:
                self.waiting.add(seq)
        else:
            if len(branches) > 1:
                self.children[branches[0]] = branches[1:]
            self.waiting.add(branches[0])
        return branches[0]

    def enter_apart(self, request: Request) -> Sequence:
        """Let a prompt wait of which only the pages are wanted, before others of its age: no caller hears of it."""
        seq = self._sequence(request, 0, len(request.prompt) + 1, id=-next(self._ids))
        seq.draws, seq.cached, seq.log.admitted = False, 0, self._clock.now
        self.waiting.add(seq)
        return seq

    def _sequence(self, request: Request, branch: int, limit: int, id: int = 0) -> Sequence:
        table = PageTable(len(self._memory.layout.groups), request.id)
        late = self._late_draws
        seq = Sequence(request, branch, id=id or next(self._ids), limit=limit, table=table, late_draws=late)
        self._by_id[seq.id] = seq
        for told in self._arrived:
            told(seq)
        self.tell(EventKind.ARRIVED, [(seq, seq.prompt_len)])
        self._rank(seq)
        return seq

    def fork(self, parent: Sequence) -> Sequence:
        """A beam that sets out from another; it has no slot yet."""
        child = parent.fork(next(self._ids), self._memory.fork(parent.table))
        self._by_id[child.id] = child
        self.forks[child] = None
        for told in self._arrived:
            told(child)
        self.tell(EventKind.ARRIVED, [(child, 0)])
        self.tell(EventKind.FIRST_TOKEN, [(child, 0)])  # with the one it sets out from
        return child

    def start(self, builder: PlanBuilder, seq: Sequence, hit: Hit | None) -> None:
        """A sequence that has its pages gets a slot; without a hit, as a fork of one that runs."""
        for told in self._admitted:
            told(seq, hit)
        seq.move(Status.RUNNING)
        self.running[seq] = None
        seq.slot = self.slots.pop()
        builder.admit(seq)
        self.tell(EventKind.ADMITTED, [(seq, hit.tokens if hit is not None else seq.computed)])

    # ---- on the way -----------------------------------------------------------------------------------------

    def add_row(self, builder: PlanBuilder, seq: Sequence, count: int, drafts: int = 0) -> None:
        """Let a running sequence compute tokens from where it is, and draw if that completes it."""
        start, memory = seq.computed, self._memory
        builder.row(seq, count, drafts)
        if memory.states is not None:
            row, states = builder.plan.rows[-1], memory.states
            row.state, row.states = states.row(seq.table.state, start, count, drafts=drafts > 0, taker=seq.request.id)
        computed, tokens = seq.computed, seq.tokens
        complete = computed == seq.known
        if count > 1 and complete and seq.plain:  # others may go on from within the page that the prompt ends in
            memory.publish_tail(seq.table, min(computed, len(tokens)), tokens, seq.request.salt)
        elif computed >= seq.table.next_publish:
            memory.publish(seq.table, min(computed, len(tokens)), tokens, seq.request.salt)
        if complete and seq.draws:
            if self.children and seq in self.children:
                self._fork_children(builder, seq)
            builder.sample(seq)

    def add_decode_rows(
        self, builder: PlanBuilder, sequences: list[Sequence], irregular: list[Sequence], drafts: Mapping[Sequence, int]
    ) -> None:
        """Let running sequences that lack one token compute it, and up to so many drafts, and draw the next. Those that
        are not `irregular` are sure to be `regular`."""
        if drafts or self._memory.states is not None or self.children or not all(seq.regular for seq in irregular):
            for seq in sequences:
                self.add_row(builder, seq, 1, drafts.get(seq, 0))
        else:
            self._add_plain_rows(builder, sequences)

    def _add_plain_rows(self, builder: PlanBuilder, sequences: list[Sequence]) -> None:
        before = len(builder.publishing)
        if sequences != self._batch.sequences:
            self._batch = DecodeBatch(sequences)
        builder.decode_rows(self._batch)
        for row in builder.publishing[before:]:
            seq, _ = builder.rows[row]
            if (known := min(seq.computed, len(seq.tokens))) >= seq.table.next_publish:
                self._memory.publish(seq.table, known, seq.tokens, seq.request.salt)

    def _fork_children(self, builder: PlanBuilder, parent: Sequence) -> None:
        """The prompt is computed in this step: branches share its pages and draw from its last row."""
        for child in self.children.pop(parent):
            if child.status is Status.FINISHED:
                continue
            child.cached = parent.cached
            if not self.slots:
                self.waiting.add(child)  # starts later, on a prefix hit
                continue
            child.table = self._memory.fork(parent.table)
            child.computed = parent.computed
            if child.hook is not None and parent.hook is not None:
                child.hook.inherit(parent.hook)
            self.start(builder, child, None)
            builder.page_tables(child)
            builder.sample(child)

    def drew(self, seq: Sequence, drafted: int = 0, accepted: int = 0, forced: int = 0) -> None:
        for told in self._drew:
            told(seq, drafted, accepted, forced)

    # ---- out ------------------------------------------------------------------------------------------------

    def preempt(self, seq: Sequence) -> None:
        """Take a running sequence's pages and slot; it keeps its tokens and will catch up later."""
        seq.move(Status.PREEMPTED)
        del self.running[seq]
        seq.epoch += 1
        seq.pending = seq.steady_until = 0
        self._batch = NO_BATCH
        if isinstance(search := self.requests.get(seq.request.id), Search):
            search.lost(seq)
        for told in self._preempted:
            told(seq)
        self.tell(EventKind.PREEMPTED, [(seq, seq.computed)])
        self.waiting.add(seq)
        if not seq.inflight:
            self.release(seq)

    def finish(self, seq: Sequence, reason: FinishReason, message: str = "") -> TokenEvent:
        """End a sequence and say so to its caller."""
        request = seq.request
        self.retire(seq, reason)
        if not self.requests[request.id].live:
            del self.requests[request.id]
        counts = Counts(max(0, seq.cached), seq.log.blended, seq.log.evicted)
        return TokenEvent(request.id, seq.branch, seq.outputs, [], finish=reason, counts=counts, message=message)

    def finish_search(self, search: Search, reason: FinishReason) -> None:
        """End a request whose sequences are no answers by themselves."""
        for seq in search.live:
            self.retire(seq)
        for told in self._finished:
            told(search.root, reason)
        del self.requests[search.request.id]

    def end(self, request_id: str, reason: FinishReason, message: str = "", error: str = "") -> list[TokenEvent]:
        """End all that is left of a request."""
        group = self.requests.get(request_id)
        if group is None:
            return []
        if isinstance(group, Search):
            self.finish_search(group, reason)
            branches = group.request.branches
            events = [TokenEvent(request_id, b, 0, [], finish=reason, message=message) for b in branches]
        else:
            events = [self.finish(seq, reason, message) for seq in group.live]
        for event in events:
            event.error = error
        return events

    def retire(self, seq: Sequence, reason: FinishReason | None = None) -> None:
        """A sequence is over; its pages and slot go back as soon as no step in flight uses them."""
        for told in self._finished:
            told(seq, reason)
        self.tell(EventKind.FINISHED, [(seq, seq.outputs)])
        if seq in self.waiting:
            self.waiting.remove(seq)
        self.running.pop(seq, None)
        self.forks.pop(seq, None)
        self._by_id.pop(seq.id, None)
        for child in self.children.pop(seq, ()):  # a prompt that is not computed any more: each computes its own
            if child.status is not Status.FINISHED:
                self.waiting.add(child)
        seq.move(Status.FINISHED)
        seq.epoch += 1
        self._batch = NO_BATCH
        if not seq.inflight:
            self.release(seq)

    def release(self, seq: Sequence) -> None:
        """Give back a sequence's slot and pages, which no step in flight uses."""
        if seq.slot >= 0:
            self.slots.append(seq.slot)
            self.freed.append(seq.slot)
            seq.slot = -1
        computed = min(seq.computed, len(seq.tokens))
        if computed and seq.plain:
            self._memory.publish_tail(seq.table, computed, seq.tokens, seq.request.salt)
        self._memory.release(seq.table, computed - seq.evicted)
        for told in self._released:
            told(seq)
        seq.computed = 0
        if seq.hook is not None:
            seq.hook.reset()

    def land(self, step: PlanBuilder) -> None:
        """A step no longer uses its slots and pages; what ended meanwhile can go."""
        for seq in step.members:
            seq.inflight -= 1
            if not seq.inflight and seq.status in (Status.FINISHED, Status.PREEMPTED):
                self.release(seq)

    # ---- invariants -----------------------------------------------------------------------------------------

    def holders(self, in_flight: deque[PlanBuilder]) -> list[Sequence]:
        """Sequences that have pages: for themselves, or because a step in flight still uses them."""
        landing = {s: None for step in in_flight for s in step.members if s not in self.running}
        return [*self.running, *self.forks, *landing]

    def check(self, in_flight: deque[PlanBuilder]) -> None:
        slots = [s.slot for s in self.holders(in_flight) if s.slot >= 0]
        assert sorted([*slots, *self.slots]) == list(range(self._count)), "slots leaked or shared"
        for seq in self.running:
            assert seq.status is Status.RUNNING and seq.slot >= 0 and 0 <= seq.computed <= seq.known <= seq.limit
            assert 0 <= seq.evicted <= seq.computed and seq.held <= seq.peak, f"{seq.key}: more KV than it may have"
            assert seq.inflight == sum(seq in step.members for step in in_flight), f"{seq.key}: lost a step"
        for seq in self.waiting:
            assert seq.status in (Status.WAITING, Status.PENDING, Status.PREEMPTED)
            assert seq.inflight or (seq.slot < 0 and not any(seq.table.pages)), f"{seq.key} waits but holds memory"
        known = {*self.running, *self.waiting, *self.forks, *(c for some in self.children.values() for c in some)}
        assert {s for s in self._by_id.values() if s.status is not Status.FINISHED} <= known, "a sequence is nowhere"
