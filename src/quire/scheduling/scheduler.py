"""The scheduler: `plan` decides the next step, `commit` takes in what came of it.

Every sequence has tokens it knows and KV it has computed; a plan lets some of them catch up. Decoding rows go first
(their callers wait for the next token), then prefill under way, then newly admitted sequences:

    plan:    catch up running (preempting when pages lack) ─► features ─► admit waiting ─► StepPlan
    commit:  append drawn tokens, publish finished pages, end what is over ─► TokenEvents

The sequence table has the sequences, continuation has rows for those that run, admission starts those that wait, the
policy orders both, features listen and take part (`feature.py`). Several plans may be in flight. Plans are made from
counts alone; values arrive at commit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from math import inf

from quire.memory.manager import KVManager
from quire.scheduling.admission import IDLE_SEQUENCES, Admission
from quire.scheduling.beam_search import Search
from quire.scheduling.commit import Commit
from quire.scheduling.continuation import Continuation
from quire.scheduling.feature import SchedulingFeature
from quire.scheduling.feature_set import FeatureSet
from quire.scheduling.length_mlp import LengthMLP
from quire.scheduling.length_predictor import ConstantPredictor, LengthPredictor
from quire.scheduling.limits import Deadlines, check_request
from quire.scheduling.plan_builder import PlanBuilder
from quire.scheduling.policies import make_policy
from quire.scheduling.policy_services import Services
from quire.scheduling.prefill_budget import Budget, PrefillLimiter
from quire.scheduling.sequence import Sequence
from quire.scheduling.sequence_table import SequenceTable
from quire.scheduling.snapshot import counters, picture
from quire.types.clock import Clock
from quire.types.config import SchedulerOptions
from quire.types.errors import DeadlineError, InputError, OverloadedError
from quire.types.events import EngineStats, TokenEvent
from quire.types.kv import KVLayout
from quire.types.plan import Capacity, StepPlan, StepResult
from quire.types.request import FinishReason, Request, Status
from quire.types.timeline import Timeline
from quire.types.view import EngineView

PREDICTORS: dict[str, Callable[[], LengthPredictor]] = {"mlp": LengthMLP, "constant": ConstantPredictor}


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
        listeners: Iterable[SchedulingFeature] = (),
        predictor: LengthPredictor | None = None,
        streams: bool = True,
    ):
        """`listeners`: features beside those that the scheduler has itself; `predictor`: of answers' lengths, in place
        of the one that is asked for; `streams`: whether every token is told of, or first ones and ends alone."""
        self.capacity = capacity
        self.clock = Clock()
        self.policy = make_policy(options)
        self.memory = KVManager(
            layout,
            capacity.pages,
            prefix_cache=prefix_cache and not (self.policy.contiguous or capacity.whole),
            contiguous=self.policy.contiguous,
            states=capacity.states,
            working=capacity.slots,
            snapshot_tokens=capacity.snapshot_tokens,
            naming=capacity.naming,
            clock=self.clock,
        )
        self.sequences = SequenceTable(
            capacity.slots,
            memory=self.memory,
            policy=self.policy,
            clock=self.clock,
            late_draws=capacity.late_draws,
        )
        self._prefill_limiter = PrefillLimiter(capacity.step_target, capacity.max_batch_tokens, capacity.captured)
        self._in_flight: deque[PlanBuilder] = deque()
        self.features = FeatureSet(
            self.sequences,
            self.memory,
            capacity,
            self.clock,
            self._in_flight,
            kv_policy=kv_policy,
            session_quota=session_quota,
            preempt=options.preempt,
            slo=(options.slo_ttft, options.slo_tpot),
            predictor=(predictor or PREDICTORS[options.length_predictor]()) if self.policy.uses_lengths else None,
            limiter=self._prefill_limiter,
            late_last=self.policy.late_last,
            max_wait=options.max_wait,
        )
        chunk = min(options.prefill_chunk or capacity.max_batch_tokens, capacity.max_batch_tokens)
        self._admission = Admission(
            self.sequences,
            policy=self.policy,
            chunk=chunk,
            longest=capacity.longest,
            overlapped=capacity.depth > 1,
            whole=capacity.whole,
            memory=self.memory,
            timeline=self.features.timeline,
            preemption=self.features.preemption,
            max_wait=options.max_wait if self.policy.starves else inf,
            limiter=self._prefill_limiter,
        )
        self._continuation = Continuation(
            self.sequences,
            self._in_flight,
            chunk=chunk,
            memory=self.memory,
            policy=self.policy,
            features=self.features,
            admission=self._admission,
            limiter=self._prefill_limiter,
        )
        self._commit = Commit(self.sequences, self.memory, streams=streams)
        self.sequences.register(*self.features, self._admission, self._commit, *listeners)
        self._max_waiting = options.max_waiting
        self.policy.attach(Services(self.sequences, self.memory, self._prefill_limiter))
        self._undelivered: list[TokenEvent] = []  # of the step that is being committed
        self._deadlines = Deadlines()
        self._step = 0

    # ---- requests in and out --------------------------------------------------------------------------------

    def submit(self, request: Request, now: float = 0.0) -> None:
        """Queue a request. Refuses, with a reason, what could never run."""
        self.clock.now = now or self.clock.now
        requests, waiting = self.sequences.requests, len(self.sequences.waiting)
        if request.id in requests:
            raise InputError(f"request id {request.id!r} is already in use", param="request_id")
        if waiting >= self._max_waiting:
            raise OverloadedError(f"{waiting} requests are already waiting; retry shortly")
        if request.priority and not self.policy.uses_priority:
            raise InputError("priority needs an engine with scheduler priority", param="priority")
        limit = check_request(request, self.memory, self.capacity, self.features.eviction.budget(request))
        seq = self.sequences.enter(request, limit)
        wait = self.features.waits.queued(seq, self._in_flight)
        if 0 < request.longest_wait < wait and not request.outputs:
            self.features.waits.refused(seq)
            self.sequences.end(request.id, FinishReason.ERROR)
            raise OverloadedError(f"others go first for about {wait:.1f} s, longer than it may wait; retry later")
        if request.deadline:
            self._deadlines.add(request, (group.request for group in requests.values()), len(requests))
        self.stats.prompt_tokens += len(request.prompt)

    def expire(self, now: float) -> list[TokenEvent]:
        """End what is not done by its deadline, waiting or running."""
        self.clock.now = now
        events: list[TokenEvent] = []
        for deadline, request_id in self._deadlines.due(now, self.sequences.requests):
            group = self.sequences.requests.get(request_id)  # an id may have been due twice: it was used again
            if group is not None and group.request.deadline == deadline:
                message = "the deadline passed before the answer was complete"
                events += self.sequences.end(request_id, FinishReason.ERROR, message, DeadlineError.__name__)
        for request_id in self.policy.gives_up(now):
            message = "its first token would come later than its target allows"
            ended = self.sequences.end(request_id, FinishReason.ERROR, message, DeadlineError.__name__)
            self.stats.gave_up += bool(ended)
            events += ended
        return events

    def abort(self, request_id: str) -> list[TokenEvent]:
        """End all branches now; unknown ids are ignored (the request may just have finished)."""
        return self.sequences.end(request_id, FinishReason.ABORT)

    def finish_at(self, request_id: str, branch: int, tokens: int) -> list[TokenEvent]:
        """Text matched a stop string after `tokens` output tokens; drop what was drawn since."""
        group = self.sequences.requests.get(request_id)
        if group is None or group.request.beam is not None:
            return []
        for seq in group.live:
            if seq.branch == branch:
                self.features.timeline.overrun(max(0, seq.outputs - tokens))
                del seq.tokens[seq.prompt_len + tokens :]
                return [self.sequences.finish(seq, FinishReason.STOP)]
        return []

    @property
    def stats(self) -> EngineStats:
        return self.features.timeline.stats

    @property
    def busy(self) -> bool:
        return bool(self.sequences.requests or self.features.tiers.busy or self.features.handover.busy)

    @property
    def first_batch_waits(self) -> bool:
        """Whether nothing is in flight and just as many wait as start at once then: others of a burst are better taken
        in while the device works on these."""
        return self.capacity.depth > 1 and not self._in_flight and len(self.sequences.waiting) == IDLE_SEQUENCES

    # ---- plan -----------------------------------------------------------------------------------------------

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None if nothing can be computed before a step in flight commits."""
        self._step += 1
        self.clock.now = now
        sequences, admission, idle = self.sequences, self._admission, not self._in_flight
        builder = PlanBuilder(self._step, now, idle=idle)
        self.memory.plan_begins()
        if idle:
            self.features.eviction.release_until(self._step)  # what a plan let go that came to nothing, too
        admission.put_overdue_first(now)
        admission.displace(builder)
        held_back = self._continuation.plan_rows(builder)
        for contribute in sequences.contribute:
            contribute(builder)
        admission.seat_forks(builder)
        admission.admit(builder)
        self._continuation.plan_held_back(builder, held_back)
        if idle and not builder.plan.computes:
            if (sequences.running or sequences.forks) and not self._commit.awaiting:
                self._make_way(builder)
            if not builder.plan.computes and self.features.tiers.reclaim(running=True):
                admission.admit(builder)
        return self._launch(builder)

    def _launch(self, builder: PlanBuilder) -> StepPlan | None:
        """The plan goes its way, if there is anything in it."""
        plan, tiers = builder.plan, self.features.tiers
        self.features.handover.send_layerwise(builder)
        tiers.directory.hand_over(plan)
        waits = builder.idle and (tiers.moving or self._commit.awaiting)
        if not (plan.computes or plan.transfers or plan.drops or waits):
            if builder.idle:
                self.features.eviction.release_until(self._step)
            return None
        plan.frees, self.sequences.freed = self.sequences.freed, []
        for seq in builder.members:
            seq.inflight += 1
        self._in_flight.append(builder)
        self.memory.launched()
        for step_planned in self.sequences.step_planned:
            step_planned(builder)
        self.sequences.tell_computed(builder)
        if self.features.drafting is not None:
            self.features.drafting.planned(builder)
            plan.rests = self.features.drafting.rests
        return plan

    def _make_way(self, builder: PlanBuilder) -> None:
        """Nothing moves: beams hold slots and pages while they wait for others of theirs, which wait for these. Forks
        queue up without their pages, then others are preempted for one search, until that goes on."""
        sequences = self.sequences
        for seq in list(sequences.forks):
            del sequences.forks[seq]
            sequences.release(seq)
            sequences.waiting.add(seq)
        first = self._stalled_beam() or sequences.waiting.first(1)[0]
        while True:
            builder.budget = Budget(self.capacity.max_batch_tokens)
            self._admission.admit(builder, only=first)
            others = [seq for seq in sequences.running if seq.request is not first.request]
            if builder.rows or not others or (first.status is Status.PENDING and self.features.tiers.moving):
                return
            sequences.preempt(max(others, key=lambda seq: seq.rank))

    def _stalled_beam(self) -> Sequence | None:
        """A waiting beam of the first of the searches that hold slots, in the order they came: one that changes
        as they get on would have them preempt each other for ever."""
        groups = {seq.request.id: self.sequences.requests.get(seq.request.id) for seq in self.sequences.running}
        searches = sorted((g for g in groups.values() if isinstance(g, Search)), key=lambda search: search.rank)
        waiting = self.sequences.waiting
        return next((seq for search in searches for seq in search.live if seq in waiting), None)

    # ---- commit ---------------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult, now: float = 0.0) -> list[TokenEvent]:
        """Take in a finished step; plans commit in the order they were made."""
        self.clock.now = now or self.clock.now
        step = self._in_flight[0]
        assert step.plan is plan, "steps must commit in the order they were planned"
        self._prefill_limiter.ended(self.clock.now, plan, began=step.now if step.idle else None)
        self._in_flight.popleft()
        if self.memory.states is not None:
            for row, (seq, _) in zip(plan.rows, step.rows, strict=True):  # before what ended gives up its state
                self.memory.publish_states(seq.table, row.start + row.count, seq.tokens, seq.request.salt)
        self.memory.landed()
        self.sequences.land(step)
        for step_landed in self.sequences.step_landed:
            step_landed(step, result)
        self._commit.apply(step, result, self._undelivered, self.stats)
        events, self._undelivered = self._undelivered, []
        return events

    def fail(self, message: str) -> list[TokenEvent]:
        """A step failed: what is in memory can no longer be trusted. End everything, drop all pages, go on."""
        events, self._undelivered = self._undelivered, []  # who ended before the step failed still gets that end
        for request_id in list(self.sequences.requests):
            events += self.sequences.end(request_id, FinishReason.ERROR, message)
        while self._in_flight:
            step = self._in_flight.popleft()
            self.memory.landed()
            self.sequences.freed += step.plan.frees  # the step may have failed before it did so
            self.sequences.land(step)
        self.features.eviction.release_until(self._step)
        for feature in self.sequences.features:
            feature.step_failed()
        self.memory.drop_cached()
        return events

    # ---- looking inside -------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Drop cached prefixes and start the counters anew."""
        for feature in self.sequences.features:
            feature.reset()
        self.memory.drop_cached()
        self.memory.reset_counters()

    def snapshot(self) -> EngineStats:
        """Counters so far and gauges of now."""
        waiting, running = len(self.sequences.waiting), len(self.sequences.running)
        tiers = self.features.tiers.directory.stats()
        found = counters(self.stats, waiting, running, self.memory, self.capacity, tiers)
        found.deferred = self.features.timeline.pending
        return found

    def view(self) -> EngineView:
        return picture(
            self.clock.now,
            sequences=self.sequences,
            memory=self.memory,
            directory=self.features.tiers.directory,
            stats=self.snapshot(),
            capacity=self.capacity,
            steps=self.features.timeline.steps,
        )

    def timelines(self, request_id: str) -> list[Timeline]:
        """What happened to each branch of a request that runs or lately ended."""
        group = self.sequences.requests.get(request_id)
        return [seq.log for seq in group.sequences] if group else self.features.timeline.past(request_id)

    def check(self) -> None:
        """Invariants; run after every step in tests and when idle in service."""
        holders = self.sequences.holders(self._in_flight)
        others = [table for feature in self.sequences.features for table in feature.tables()]
        self.memory.check([*(seq.table for seq in holders), *others])
        self.sequences.check(self._in_flight)
        if not self.sequences.requests and not self._in_flight and not others:
            assert self.memory.pool.used == 0 and not self.sequences.waiting, "idle, yet pages are in use"
