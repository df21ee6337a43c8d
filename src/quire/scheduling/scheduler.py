"""The scheduler: `plan` decides the next step, `commit` takes in what came of it.

Every sequence has tokens it knows and KV it has computed; a plan lets some of them catch up. Rows that need
little go first (they are the ones somebody is waiting on), then those far behind, then newcomers:

    plan:    catch up running (preempting when pages lack) ─► admit waiting ─► StepPlan
    commit:  append drawn tokens, name finished pages, end what is over ─► TokenEvents

The roster has the sequences, boarding lets in who waits, the harvest gives everybody what a step brought them.
Several plans may be in flight. Plans are made from counts alone; values arrive at commit.
"""

from __future__ import annotations

from collections import deque

from quire.memory.manager import Change, KVManager
from quire.memory.tiers import Directory
from quire.scheduling.blending import Blending
from quire.scheduling.boarding import Boarding
from quire.scheduling.diary import Diary
from quire.scheduling.door import Deadlines, longest_length
from quire.scheduling.flight import Flight
from quire.scheduling.forgetting import Forgetting
from quire.scheduling.harvest import Harvest
from quire.scheduling.pace import Budget, Pace
from quire.scheduling.paging import Paging
from quire.scheduling.policies import make_policy
from quire.scheduling.pressure import Pressure
from quire.scheduling.roster import Roster
from quire.scheduling.sequence import Sequence
from quire.scheduling.sessions import Sessions
from quire.scheduling.speculation import DraftPolicy
from quire.scheduling.view import counters, picture
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
        self.paging = Paging(self.memory, directory, self.stats, options.preempt)
        self.sessions = Sessions(self.memory, directory, session_quota)
        self.diary = Diary(self.memory, self.stats)
        self.blending = Blending(self.memory, capacity, self.stats)
        self.forgetting = Forgetting(self.memory, capacity, self.diary)
        self.pressure = Pressure(self.memory)
        self.roster = Roster(
            capacity.slots,
            memory=self.memory,
            diary=self.diary,
            paging=self.paging,
            sessions=self.sessions,
            pressure=self.pressure,
            forgetting=self.forgetting,
            blending=self.blending,
        )
        self._max_waiting = options.max_waiting
        self._chunk = min(options.prefill_chunk or capacity.max_batch_tokens, capacity.max_batch_tokens)
        self._pace = Pace(capacity.step_target, capacity.max_batch_tokens)
        self._boarding = Boarding(
            self.roster,
            policy=self.policy,
            chunk=self._chunk,
            overlapped=capacity.depth > 1,
            memory=self.memory,
            diary=self.diary,
            paging=self.paging,
            sessions=self.sessions,
            pressure=self.pressure,
            blending=self.blending,
        )
        self._harvest = Harvest(self.roster, self.memory, self.diary, self.forgetting)
        self._flights: deque[Flight] = deque()
        self._undelivered: list[TokenEvent] = []  # of the step that is being taken in
        self._deadlines = Deadlines()
        self._drafts = DraftPolicy(capacity) if capacity.drafts else None
        self._step = 0

    # ---- requests in and out --------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request. Refuses, with a reason, what could never run."""
        requests, waiting = self.roster.requests, len(self.roster.waiting)
        if request.id in requests:
            raise InputError(f"request id {request.id!r} is already in use", param="request_id")
        if waiting >= self._max_waiting:
            raise OverloadedError(f"{waiting} requests are already waiting; retry shortly")
        limit = longest_length(request, self.memory, self.capacity, self.forgetting.memo(request))
        self.roster.enter(request, limit)
        if request.deadline:
            live = (branches[0].request for branches in requests.values())
            self._deadlines.add(request, live, len(requests))
        self.stats.prompt_tokens += len(request.prompt)

    def expire(self, now: float) -> list[TokenEvent]:
        """End what is not done by its deadline, waiting or running."""
        self.diary.now = now
        events: list[TokenEvent] = []
        for deadline, request_id in self._deadlines.due(now, self.roster.requests):
            if self.roster.requests[request_id][0].request.deadline == deadline:
                message = "the deadline passed before the answer was complete"
                events += self.roster.end(request_id, FinishReason.ERROR, message, DeadlineError.__name__)
        return events

    def abort(self, request_id: str) -> list[TokenEvent]:
        """End all branches now; unknown ids are ignored (the request may just have finished)."""
        return self.roster.end(request_id, FinishReason.ABORT)

    def finish_at(self, request_id: str, branch: int, tokens: int) -> list[TokenEvent]:
        """Text matched a stop string after `tokens` output tokens; drop what was drawn since."""
        for seq in self.roster.requests.get(request_id, ()):
            if seq.branch == branch and seq.status is not Status.FINISHED and request_id not in self.roster.searches:
                self.diary.cut(max(0, seq.outputs - tokens))
                del seq.tokens[seq.prompt_len + tokens :]
                return [self.roster.finish(seq, FinishReason.STOP)]
        return []

    @property
    def busy(self) -> bool:
        return bool(self.roster.requests or self.paging.busy)

    # ---- plan -----------------------------------------------------------------------------------------------

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None if nothing can be computed before a step in flight commits."""
        self._step += 1
        self.diary.now = self.paging.directory.now = self.memory.index.now = now
        self.sessions.expire(now)
        flight, roster, boarding, idle = Flight(self._step), self.roster, self._boarding, not self._flights
        budget = self.blending.plan(flight, self._catch_up(flight, now), boarding.add_row)
        boarding.seat_forks(flight)
        self.paging.prefetch(roster.waiting, self.pressure.spare)
        boarding.admit(flight, budget, now, idle=idle)
        if not flight.plan.computes and idle and (roster.running or roster.forks):
            self._make_way(flight, now)
        if not flight.plan.computes and idle and self.paging.let_go():
            boarding.admit(flight, budget, now, idle=idle)
        self.paging.directory.hand_over(flight.plan)
        moves = flight.plan.transfers or flight.plan.drops or (self.paging.moving and idle)
        if not (flight.plan.computes or moves):
            if idle:
                self.forgetting.landed(self._step)
            return None
        flight.plan.frees, roster.freed = roster.freed, []
        for seq in flight.members():
            seq.inflight += 1
        flight.began = now if idle else None
        self._flights.append(flight)
        if self._drafts is not None:
            self._drafts.planned(flight.plan, now)
            flight.plan.rests = self._drafts.rests
        return flight.plan

    def _catch_up(self, flight: Flight, now: float) -> Budget:
        """Rows for running sequences; returns what is left of the budget. Rows of a single token are outside it: there
        are at most as many as slots, and a prompt need not be cut in two because others are being answered."""
        drafts = self._drafts.budgets(list(self.roster.running)) if self._drafts is not None else {}
        together = bool(drafts)  # those who guess need to know all before, and others should not go without them
        behind = [
            s
            for s in self.roster.running
            if s.computed < s.known < s.limit
            and not (s.pending and (s.stepwise or s.drafts or together))
            and not (s.memo is not None and s.inflight and s.memo.measured)
        ]
        behind.sort(key=lambda s: s.known - s.computed > 1)  # stable: those nearly there first
        flowing = any(s.pending or s.known - s.computed == 1 for s in self.roster.running)
        whole = budget = self._pace.budget(flowing=flowing)
        chosen: list[tuple[Sequence, int, Change]] = []
        for seq in behind:
            if seq.status is not Status.RUNNING:
                continue  # preempted for somebody before it
            missing = seq.known - seq.computed
            count = missing if missing == 1 else min(missing, self._chunk, budget.fit(seq.held))
            if seq.memo is not None:
                count = min(count, seq.memo.room(seq.computed, seq.evicted))
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
                flight.change(seq, change)
                self._boarding.add_row(flight, seq, count, drafts.get(seq, 0))
        return budget

    def _make_way(self, flight: Flight, now: float) -> None:
        """Nothing moves: beams hold slots and pages while they wait for others of theirs, which wait for these. Forks
        queue up without their pages, then others give way to whoever comes first, so that its search goes on."""
        roster = self.roster
        for seq in list(roster.forks):
            del roster.forks[seq]
            roster.release(seq)
            roster.waiting.append(seq)
        first = min(roster.waiting, key=lambda s: self.policy.rank(s, now))
        while True:
            self._boarding.admit(flight, Budget(self.capacity.max_batch_tokens), now, idle=True, only=[first])
            others = [seq for seq in roster.running if seq.request is not first.request]
            if flight.rows or not others:
                return
            roster.preempt(self.policy.victim(others, now))

    def _extend_or_preempt(self, seq: Sequence, count: int, now: float) -> Change | None:
        """Pages for `count` more tokens, taking them from others if need be; None: not in this step."""
        while (change := self._grow(seq, count)) is None:
            if self.paging.let_go() or self.sessions.let_go():
                continue
            if self._pages_returning():
                return None
            victim = self.policy.victim(self.pressure.victims(list(self.roster.running)), now)
            self.roster.preempt(victim)
            if victim is seq:
                return None
        return change

    def _grow(self, seq: Sequence, count: int) -> Change | None:
        if seq.memo is not None:
            return self.forgetting.grow(seq, count, self._step)
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
        landing = any(seq.status is not Status.RUNNING for flight in self._flights for seq in flight.members())
        return landing or bool(self._flights and self.forgetting.returning)

    # ---- commit ---------------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult, now: float = 0.0) -> list[TokenEvent]:
        """Take in a finished step; plans commit in the order they were made."""
        self.diary.now = now or self.diary.now
        flight = self._flights[0]
        assert flight.plan is plan, "steps must commit in the order they were planned"
        self._pace.ended(self.diary.now, plan, began=flight.began)
        self.diary.stepped(plan, result, flight.rows)
        if self._drafts is not None:
            self._drafts.landed(plan, result, self.diary.now)
        self._flights.popleft()
        self.roster.land(flight)
        self.forgetting.landed(plan.step)
        for apart in self.blending.commit(flight, result):
            self.roster.retire(apart)
        self.paging.stepped(plan, result)
        self.paging.settle(plan, flight.rows)
        self._harvest.take(flight, result, self._undelivered)
        events, self._undelivered = self._undelivered, []
        return events

    def fail(self, message: str) -> list[TokenEvent]:
        """A step failed: what is in memory can no longer be trusted. End everything, forget all pages, go on."""
        events, self._undelivered = self._undelivered, []  # who ended before the step failed still gets that end
        for request_id in list(self.roster.requests):
            events += self.roster.end(request_id, FinishReason.ERROR, message)
        while self._flights:
            flight = self._flights.popleft()
            self.roster.freed += flight.plan.frees  # nobody knows how far the step came: it may not have done so
            self.roster.land(flight)
        self.forgetting.landed(self._step)
        self.sessions.clear()
        self.memory.pool.forget_idle()
        self.paging.directory.forget()
        return events

    # ---- looking inside -------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget cached prefixes and start the counters anew."""
        self.sessions.clear()
        self.memory.pool.forget_idle()
        self.memory.pool.peak = self.memory.pool.used
        self.memory.slots_allocated = self.memory.slots_filled = 0
        self.stats = self.diary.stats = self.blending.stats = EngineStats(pages_total=self.memory.pool.total)
        self.paging.reset(self.stats)

    def snapshot(self) -> EngineStats:
        """Counters so far and gauges of now."""
        tiers = self.paging.directory.stats()
        waiting, running = len(self.roster.waiting), len(self.roster.running)
        return counters(self.stats, waiting, running, self.memory, self.capacity, tiers)

    def view(self) -> EngineView:
        return picture(
            self.diary.now,
            running=list(self.roster.running),
            waiting=self.roster.waiting,
            memory=self.memory,
            directory=self.paging.directory,
            stats=self.snapshot(),
            capacity=self.capacity,
            steps=self.diary.steps,
        )

    def timelines(self, request_id: str) -> list[Timeline]:
        """What happened to each branch of a request that runs or lately ended."""
        branches = self.roster.requests.get(request_id)
        return [seq.log for seq in branches] if branches else self.diary.of(request_id)

    def check(self) -> None:
        """Invariants; run after every step in tests and when idle in service."""
        others = [*self.paging.tables(), *self.sessions.tables(), *self.forgetting.tables(), *self.blending.tables()]
        self.memory.check([*(s.table for s in self.roster.holders(self._flights)), *others])
        self.roster.check(self._flights)
        if not self.roster.requests and not self._flights and not others:
            assert self.memory.pool.used == 0 and not self.roster.waiting, "idle, yet pages are in use"
