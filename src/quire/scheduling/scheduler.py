"""The scheduler: `plan` decides the next step, `commit` takes in what came of it.

Every sequence has tokens it knows and KV it has computed; a plan lets some of them catch up. Rows that need
little go first (they are the ones somebody is waiting on), then those far behind, then newcomers:

    plan:    catch up running (preempting when pages lack) ─► admit waiting ─► StepPlan
    commit:  append drawn tokens, name finished pages, end what is over ─► TokenEvents

The sequences has the sequences, admission lets in who waits, the harvest gives everybody what a step brought them.
Several plans may be in flight. Plans are made from counts alone; values arrive at commit.
"""

from __future__ import annotations

from collections import deque

from quire.memory.manager import Change, KVManager
from quire.memory.tiers import Directory
from quire.scheduling.admission import Admission
from quire.scheduling.commit import Commit
from quire.scheduling.features.chunk_reuse import ChunkReuse
from quire.scheduling.features.draft_budgets import DraftPolicy
from quire.scheduling.features.kv_eviction import KVEviction
from quire.scheduling.features.sessions import Sessions
from quire.scheduling.features.tier_prefetch import TierPrefetch
from quire.scheduling.features.timeline_recorder import TimelineRecorder
from quire.scheduling.limits import Deadlines, longest_length
from quire.scheduling.plan_builder import PlanBuilder
from quire.scheduling.policies import make_policy
from quire.scheduling.preemption import PreemptionGuard
from quire.scheduling.prefill_budget import Budget, PrefillLimiter
from quire.scheduling.sequence import Sequence
from quire.scheduling.sequence_table import SequenceTable
from quire.scheduling.snapshot import counters, picture
from quire.types.config import SchedulerOptions
from quire.types.errors import DeadlineError, InputError, OverloadedError
from quire.types.events import EngineStats, TokenEvent
from quire.types.kv import KVLayout
from quire.types.plan import Capacity, StepPlan, StepResult
from quire.types.request import FinishReason, Request, Status
from quire.types.timeline import Timeline
from quire.types.view import EngineView


class Scheduler:
    def __init__(
        self,
        options: SchedulerOptions,
        layout: KVLayout,
        capacity: Capacity,
        *,
        prefix_cache: bool = True,
        kv_policy: str = "lru",
        session_quota: float = 0.25,
    ):
        self.capacity = capacity
        self.policy = make_policy(options)
        shared = prefix_cache and not self.policy.contiguous
        self.memory = KVManager(
            layout,
            capacity.pages,
            prefix_cache=shared,
            contiguous=self.policy.contiguous,
            naming=capacity.naming,
        )
        self.stats = EngineStats(pages_total=self.memory.pool.total)
        directory = Directory(capacity.tiers, self.memory.index, layout.page_bytes, kv_policy)
        self.tiers = TierPrefetch(self.memory, directory, self.stats, options.preempt)
        self.sessions = Sessions(self.memory, directory, session_quota)
        self.timeline = TimelineRecorder(self.memory, self.stats)
        self.chunk_reuse = ChunkReuse(self.memory, capacity, self.stats)
        self.eviction = KVEviction(self.memory, capacity, self.timeline)
        self.preemption = PreemptionGuard(self.memory)
        self.sequences = SequenceTable(
            capacity.slots,
            memory=self.memory,
            timeline=self.timeline,
            tiers=self.tiers,
            sessions=self.sessions,
            preemption=self.preemption,
            eviction=self.eviction,
            chunk_reuse=self.chunk_reuse,
        )
        self._max_waiting = options.max_waiting
        self._chunk = min(options.prefill_chunk or capacity.max_batch_tokens, capacity.max_batch_tokens)
        self._prefill_limiter = PrefillLimiter(capacity.step_target, capacity.max_batch_tokens)
        self._admission = Admission(
            self.sequences,
            policy=self.policy,
            chunk=self._chunk,
            overlapped=capacity.depth > 1,
            memory=self.memory,
            timeline=self.timeline,
            tiers=self.tiers,
            sessions=self.sessions,
            preemption=self.preemption,
            chunk_reuse=self.chunk_reuse,
        )
        self._commit = Commit(self.sequences, self.memory, self.timeline, self.eviction)
        self._in_flight: deque[PlanBuilder] = deque()
        self._undelivered: list[TokenEvent] = []  # of the step that is being taken in
        self._deadlines = Deadlines()
        self._drafts = DraftPolicy(capacity) if capacity.drafts else None
        self._step = 0

    # ---- requests in and out --------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request. Refuses, with a reason, what could never run."""
        requests, waiting = self.sequences.requests, len(self.sequences.waiting)
        if request.id in requests:
            raise InputError(f"request id {request.id!r} is already in use", param="request_id")
        if waiting >= self._max_waiting:
            raise OverloadedError(f"{waiting} requests are already waiting; retry shortly")
        limit = longest_length(request, self.memory, self.capacity, self.eviction.kv_budget(request))
        self.sequences.enter(request, limit)
        if request.deadline:
            live = (branches[0].request for branches in requests.values())
            self._deadlines.add(request, live, len(requests))
        self.stats.prompt_tokens += len(request.prompt)

    def expire(self, now: float) -> list[TokenEvent]:
        """End what is not done by its deadline, waiting or running."""
        self.timeline.now = now
        events: list[TokenEvent] = []
        for deadline, request_id in self._deadlines.due(now, self.sequences.requests):
            if self.sequences.requests[request_id][0].request.deadline == deadline:
                message = "the deadline passed before the answer was complete"
                events += self.sequences.end(request_id, FinishReason.ERROR, message, DeadlineError.__name__)
        return events

    def abort(self, request_id: str) -> list[TokenEvent]:
        """End all branches now; unknown ids are ignored (the request may just have finished)."""
        return self.sequences.end(request_id, FinishReason.ABORT)

    def finish_at(self, request_id: str, branch: int, tokens: int) -> list[TokenEvent]:
        """Text matched a stop string after `tokens` output tokens; drop what was drawn since."""
        for seq in self.sequences.requests.get(request_id, ()):
            if seq.branch == branch and seq.status is not Status.FINISHED and request_id not in self.sequences.searches:
                self.timeline.cut(max(0, seq.outputs - tokens))
                del seq.tokens[seq.prompt_len + tokens :]
                return [self.sequences.finish(seq, FinishReason.STOP)]
        return []

    @property
    def busy(self) -> bool:
        return bool(self.sequences.requests or self.tiers.busy)

    # ---- plan -----------------------------------------------------------------------------------------------

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None if nothing can be computed before a step in flight commits."""
        self._step += 1
        self.timeline.now = self.tiers.directory.now = self.memory.index.now = now
        self.sessions.expire(now)
        builder, sequences, admission, idle = (
            PlanBuilder(self._step),
            self.sequences,
            self._admission,
            not self._in_flight,
        )
        budget = self.chunk_reuse.plan(builder, self._catch_up(builder, now), admission.add_row)
        admission.seat_forks(builder)
        self.tiers.prefetch(sequences.waiting, self.preemption.spare)
        admission.admit(builder, budget, now, idle=idle)
        if not builder.plan.computes and idle and (sequences.running or sequences.forks):
            self._make_way(builder, now)
        if not builder.plan.computes and idle and self.tiers.let_go():
            admission.admit(builder, budget, now, idle=idle)
        self.tiers.directory.hand_over(builder.plan)
        moves = builder.plan.transfers or builder.plan.drops or (self.tiers.moving and idle)
        if not (builder.plan.computes or moves):
            if idle:
                self.eviction.landed(self._step)
            return None
        builder.plan.frees, sequences.freed = sequences.freed, []
        for seq in builder.members():
            seq.inflight += 1
        builder.began = now if idle else None
        self._in_flight.append(builder)
        if self._drafts is not None:
            self._drafts.planned(builder.plan, now)
            builder.plan.rests = self._drafts.rests
        return builder.plan

    def _catch_up(self, builder: PlanBuilder, now: float) -> Budget:
        """Rows for running sequences; returns what is left of the budget. Rows of a single token are outside it: there
        are at most as many as slots, and a prompt need not be cut in two because others are being answered."""
        drafts = self._drafts.budgets(list(self.sequences.running)) if self._drafts is not None else {}
        together = bool(drafts)  # those who guess need to know all before, and others should not go without them
        behind = [
            s
            for s in self.sequences.running
            if s.computed < s.known < s.limit
            and not (s.pending and (s.stepwise or s.drafts or together))
            and not (s.kv_budget is not None and s.inflight and s.kv_budget.measured)
        ]
        behind.sort(key=lambda s: s.known - s.computed > 1)  # stable: those nearly there first
        flowing = any(s.pending or s.known - s.computed == 1 for s in self.sequences.running)
        whole = budget = self._prefill_limiter.budget(flowing=flowing)
        chosen: list[tuple[Sequence, int, Change]] = []
        for seq in behind:
            if seq.status is not Status.RUNNING:
                continue  # preempted for somebody before it
            missing = seq.known - seq.computed
            count = missing if missing == 1 else min(missing, self._chunk, budget.fit(seq.held))
            if seq.kv_budget is not None:
                count = min(count, seq.kv_budget.room(seq.computed, seq.evicted))
            if count <= 0:
                break
            change = self._extend_for_drafts(seq, drafts) if drafts else None
            change = change or self._extend_or_preempt(seq, count, now)
            if change is not None:
                chosen.append((seq, count, change))
                budget = budget.less(seq.held, count) if missing > 1 else budget
        budget = whole
        for seq, count, change in chosen:
            if seq.status is Status.RUNNING:
                if seq.known - seq.computed > 1:
                    budget = budget.less(seq.held, count)
                builder.change(seq, change)
                self._admission.add_row(builder, seq, count, drafts.get(seq, 0))
        return budget

    def _make_way(self, builder: PlanBuilder, now: float) -> None:
        """Nothing moves: beams hold slots and pages while they wait for others of theirs, which wait for these. Forks
        queue up without their pages, then others give way to whoever comes first, so that its search goes on."""
        sequences = self.sequences
        for seq in list(sequences.forks):
            del sequences.forks[seq]
            sequences.release(seq)
            sequences.waiting.append(seq)
        first = min(sequences.waiting, key=lambda s: self.policy.rank(s, now))
        while True:
            self._admission.admit(builder, Budget(self.capacity.max_batch_tokens), now, idle=True, only=[first])
            others = [seq for seq in sequences.running if seq.request is not first.request]
            if builder.rows or not others:
                return
            sequences.preempt(self.policy.victim(others, now))

    def _extend_or_preempt(self, seq: Sequence, count: int, now: float) -> Change | None:
        """Pages for `count` more tokens, taking them from others if need be; None: not in this step."""
        while (change := self._grow(seq, count)) is None:
            if self.tiers.let_go() or self.sessions.let_go():
                continue
            if self._pages_returning():
                return None
            victim = self.policy.victim(self.preemption.victims(list(self.sequences.running)), now)
            self.sequences.preempt(victim)
            if victim is seq:
                return None
        return change

    def _grow(self, seq: Sequence, count: int) -> Change | None:
        if seq.kv_budget is not None:
            return self.eviction.grow(seq, count, self._step)
        return self.memory.extend(seq.table, seq.computed, seq.computed + count)

    def _extend_for_drafts(self, seq: Sequence, drafts: dict[Sequence, int]) -> Change | None:
        """Pages for the next token and those guessed after it; nobody loses any for a guess."""
        if seq not in drafts:
            return None
        change = self.memory.extend(seq.table, seq.computed, seq.known + drafts[seq])
        if change is None:
            del drafts[seq]
        return change

    def _pages_returning(self) -> bool:
        """Whether pages come back by themselves when a step in flight commits."""
        landing = any(seq.status is not Status.RUNNING for builder in self._in_flight for seq in builder.members())
        return landing or bool(self._in_flight and self.eviction.returning)

    # ---- commit ---------------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult, now: float = 0.0) -> list[TokenEvent]:
        """Take in a finished step; plans commit in the order they were made."""
        self.timeline.now = now or self.timeline.now
        builder = self._in_flight[0]
        assert builder.plan is plan, "steps must commit in the order they were planned"
        self._prefill_limiter.ended(self.timeline.now, plan, began=builder.began)
        self.timeline.stepped(plan, result, builder.rows)
        if self._drafts is not None:
            self._drafts.landed(plan, result, self.timeline.now)
        self._in_flight.popleft()
        self.sequences.land(builder)
        self.eviction.landed(plan.step)
        for apart in self.chunk_reuse.commit(builder, result):
            self.sequences.retire(apart)
        self.tiers.stepped(plan, result)
        self.tiers.settle(plan, builder.rows)
        self._commit.take(builder, result, self._undelivered)
        events, self._undelivered = self._undelivered, []
        return events

    def fail(self, message: str) -> list[TokenEvent]:
        """A step failed: what is in memory can no longer be trusted. End everything, forget all pages, go on."""
        events, self._undelivered = self._undelivered, []  # who ended before the step failed still gets that end
        for request_id in list(self.sequences.requests):
            events += self.sequences.end(request_id, FinishReason.ERROR, message)
        while self._in_flight:
            builder = self._in_flight.popleft()
            self.sequences.freed += builder.plan.frees  # nobody knows how far the step came: it may not have done so
            self.sequences.land(builder)
        self.eviction.landed(self._step)
        self.sessions.clear()
        self.memory.pool.forget_idle()
        self.tiers.directory.forget()
        return events

    # ---- looking inside -------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget cached prefixes and start the counters anew."""
        self.sessions.clear()
        self.memory.pool.forget_idle()
        self.memory.pool.peak = self.memory.pool.used
        self.memory.slots_allocated = self.memory.slots_filled = 0
        self.stats = self.timeline.stats = self.chunk_reuse.stats = EngineStats(pages_total=self.memory.pool.total)
        self.tiers.reset(self.stats)

    def snapshot(self) -> EngineStats:
        """Counters so far and gauges of now."""
        tiers = self.tiers.directory.stats()
        waiting, running = len(self.sequences.waiting), len(self.sequences.running)
        return counters(self.stats, waiting, running, self.memory, self.capacity, tiers)

    def view(self) -> EngineView:
        return picture(
            self.timeline.now,
            running=list(self.sequences.running),
            waiting=self.sequences.waiting,
            memory=self.memory,
            directory=self.tiers.directory,
            stats=self.snapshot(),
            capacity=self.capacity,
            steps=self.timeline.steps,
        )

    def timelines(self, request_id: str) -> list[Timeline]:
        """What happened to each branch of a request that runs or lately ended."""
        branches = self.sequences.requests.get(request_id)
        return [seq.log for seq in branches] if branches else self.timeline.of(request_id)

    def check(self) -> None:
        """Invariants; run after every step in tests and when idle in service."""
        others = [*self.tiers.tables(), *self.sessions.tables(), *self.eviction.tables(), *self.chunk_reuse.tables()]
        self.memory.check([*(s.table for s in self.sequences.holders(self._in_flight)), *others])
        self.sequences.check(self._in_flight)
        if not self.sequences.requests and not self._in_flight and not others:
            assert self.memory.pool.used == 0 and not self.sequences.waiting, "idle, yet pages are in use"
