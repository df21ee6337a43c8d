"""The scheduler: `plan` decides the next step, `commit` takes in what came of it.

Every sequence has tokens it knows and KV it has computed; a plan lets some of them catch up. Rows that need
little go first (they are the ones somebody is waiting on), then those far behind, then newcomers:

    plan:    catch up running (preempting when pages lack) ─► admit waiting ─► StepPlan
    commit:  append drawn tokens, name finished pages, end what is over ─► TokenEvents

Several plans may be in flight. Plans are made from counts alone; values arrive at commit.
"""

from __future__ import annotations

from collections import deque

from quire.memory.manager import Change, Hit, KVManager, PageTable
from quire.memory.tiers import Directory
from quire.scheduling.blending import Blending
from quire.scheduling.diary import Diary
from quire.scheduling.door import Deadlines, longest_length
from quire.scheduling.flight import Flight
from quire.scheduling.forgetting import Forgetting
from quire.scheduling.pace import Pace
from quire.scheduling.paging import Paging, reusable
from quire.scheduling.policies import make_policy
from quire.scheduling.pressure import Pressure
from quire.scheduling.search import Search, answers
from quire.scheduling.sequence import Sequence
from quire.scheduling.sessions import Sessions
from quire.scheduling.speculation import DraftPolicy
from quire.scheduling.view import counters, picture
from quire.types.config import SchedulerOptions
from quire.types.errors import DeadlineError, InputError, OverloadedError
from quire.types.events import EngineStats, TokenEvent
from quire.types.kv import KVLayout
from quire.types.plan import Capacity, Row, StepPlan, StepResult, TokenLogprobs
from quire.types.request import FinishReason, Request, Status
from quire.types.timeline import Timeline
from quire.types.view import EngineView

AT_ONCE = 16  # newcomers taken in while the device is idle; the others are planned while it works on these


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
        self.blending = Blending(self.memory, capacity, self.stats, queue=self._queue_apart, add_row=self._add_row)
        self.forgetting = Forgetting(self.memory, capacity, self.diary)
        self._max_waiting = options.max_waiting
        self._chunk = min(options.prefill_chunk or capacity.max_batch_tokens, capacity.max_batch_tokens)
        self._pace = Pace(options.step_target, capacity.max_batch_tokens)
        self._pressure = Pressure(self.memory)
        self._requests: dict[str, list[Sequence]] = {}
        self._waiting: deque[Sequence] = deque()
        self._running: dict[Sequence, None] = {}  # insertion-ordered set
        self._slots = list(range(capacity.slots - 1, -1, -1))
        self._freed: list[int] = []  # slots to be named in the next plan
        self._flights: deque[Flight] = deque()
        self._searches: dict[str, Search] = {}
        self._forks: dict[Sequence, None] = {}  # beams with pages but without a slot yet
        self._deadlines = Deadlines()
        self._drafts = DraftPolicy(capacity) if capacity.drafts else None
        self._order = 0
        self._step = 0

    # ---- requests in and out --------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request. Refuses, with a reason, what could never run."""
        if request.id in self._requests:
            raise InputError(f"request id {request.id!r} is already in use", param="request_id")
        if len(self._waiting) >= self._max_waiting:
            raise OverloadedError(f"{len(self._waiting)} requests are already waiting; retry shortly")
        limit = longest_length(request, self.memory, self.capacity, self.forgetting.memo(request))
        count = 1 if request.beam else request.params.n
        branches = [self._sequence(request, branch, limit) for branch in range(count)]
        self._requests[request.id] = branches
        if request.beam is not None:
            self._searches[request.id] = Search(branches[0], request.beam)
        if self.policy.contiguous:
            self._waiting.extend(branches)
        else:
            branches[0].children = branches[1:]
            self._waiting.append(branches[0])
        if request.deadline:
            live = (branches[0].request for branches in self._requests.values())
            self._deadlines.add(request, live, len(self._requests))
        self.stats.prompt_tokens += len(request.prompt)

    def expire(self, now: float) -> list[TokenEvent]:
        """End what is not done by its deadline, waiting or running."""
        self.diary.now = now
        events: list[TokenEvent] = []
        for deadline, request_id in self._deadlines.due(now, self._requests):
            if self._requests[request_id][0].request.deadline == deadline:
                message = "the deadline passed before the answer was complete"
                events += self._end(request_id, FinishReason.ERROR, message, DeadlineError.__name__)
        return events

    def _sequence(self, request: Request, branch: int, limit: int) -> Sequence:
        self._order += 1
        table = PageTable(len(self.memory.layout.groups), request.id)
        seq = Sequence(request, branch, order=self._order, limit=limit, table=table)
        if memo := self.forgetting.memo(request):
            seq.budgeted(memo)
        self.diary.arrived(seq)
        return seq

    def _queue_apart(self, request: Request) -> Sequence:
        """Let a prompt wait, before others, of which only the pages are wanted: nobody else hears of it."""
        seq = self._sequence(request, 0, len(request.prompt) + 1)
        seq.draws, seq.cached, seq.log.admitted = False, 0, self.diary.now
        self._waiting.appendleft(seq)
        return seq

    def abort(self, request_id: str) -> list[TokenEvent]:
        """End all branches now; unknown ids are ignored (the request may just have finished)."""
        return self._end(request_id, FinishReason.ABORT)

    def finish_at(self, request_id: str, branch: int, tokens: int) -> list[TokenEvent]:
        """Text matched a stop string after `tokens` output tokens; drop what was drawn since."""
        for seq in self._requests.get(request_id, ()):
            if seq.branch == branch and seq.status is not Status.FINISHED and request_id not in self._searches:
                self.diary.cut(max(0, seq.outputs - tokens))
                del seq.tokens[seq.prompt_len + tokens :]
                return [self._finish(seq, FinishReason.STOP)]
        return []

    @property
    def busy(self) -> bool:
        return bool(self._requests or self.paging.busy)

    # ---- plan -----------------------------------------------------------------------------------------------

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None if nothing can be computed before a step in flight commits."""
        self._step += 1
        self.diary.now = self.paging.directory.now = self.memory.index.now = now
        self.sessions.expire(now)
        flight = Flight(self._step)
        budget = self.blending.plan(flight, self._catch_up(flight, now))
        self._seat(flight)
        self.paging.prefetch(self._waiting, self._pressure.spare)
        self._admit(flight, budget, now)
        if not flight.plan.computes and not self._flights and (self._running or self._forks):
            self._make_way(flight, now)
        if not flight.plan.computes and not self._flights and self.paging.let_go():
            self._admit(flight, budget, now)
        self.paging.directory.hand_over(flight.plan)
        moves = flight.plan.transfers or flight.plan.drops or (self.paging.moving and not self._flights)
        if not (flight.plan.computes or moves):
            if not self._flights:
                self.forgetting.landed(self._step)
            return None
        flight.plan.frees, self._freed = self._freed, []
        for seq in flight.members():
            seq.inflight += 1
        flight.alone = not self._flights
        self._flights.append(flight)
        if self._drafts is not None:
            self._drafts.planned(flight.plan, now)
            flight.plan.rests = self._drafts.rests
        return flight.plan

    def _catch_up(self, flight: Flight, now: float) -> int:
        """Rows for running sequences; returns the token budget left. Rows of a single token are outside it: there are
        at most as many as slots, and a prompt need not be cut in two because others are being answered."""
        drafts = self._drafts.budgets(list(self._running)) if self._drafts is not None else {}
        together = bool(drafts)  # those who guess need to know all before, and others should not go without them
        behind = [
            s
            for s in self._running
            if s.computed < s.known < s.limit
            and not (s.pending and (s.stepwise or s.drafts or together))
            and not (s.memo is not None and s.inflight and s.memo.measured)
        ]
        behind.sort(key=lambda s: s.known - s.computed > 1)  # stable: those nearly there first
        whole = budget = self._pace.budget(flowing=any(s.known - s.computed == 1 for s in behind[:1]))
        chosen: list[tuple[Sequence, int, Change]] = []
        for seq in behind:
            if seq.status is not Status.RUNNING:
                continue  # preempted for somebody before it
            missing = seq.known - seq.computed
            count = missing if missing == 1 else min(missing, self._chunk, self._pace.fit(seq.held, budget))
            if seq.memo is not None:
                count = min(count, seq.memo.room(seq.computed, seq.evicted))
            if count <= 0:
                break
            change = self._extend_for_drafts(seq, drafts) if drafts else None
            change = change or self._extend_or_preempt(seq, count, now)
            if change is not None:
                chosen.append((seq, count, change))
                budget -= self._pace.cost(seq.held, count) if missing > 1 else 0
        budget = whole
        for seq, count, change in chosen:
            if seq.status is Status.RUNNING:
                if seq.known - seq.computed > 1:
                    budget -= self._pace.cost(seq.held, count)
                flight.change(seq, change)
                self._add_row(flight, seq, count, drafts.get(seq, 0))
        return budget

    def _seat(self, flight: Flight) -> None:
        """Slots and rows for beams that forked off others, as far as there are any."""
        for seq in list(self._forks):
            if not self._slots:
                break
            change = self.memory.extend(seq.table, seq.computed, seq.known)
            if change is None:
                break
            del self._forks[seq]
            self._run(flight, seq)
            flight.tables(seq)
            flight.plan.copies += change.copies
            self._add_row(flight, seq, 1)

    def _make_way(self, flight: Flight, now: float) -> None:
        """Nothing moves: beams hold slots and pages while they wait for others of theirs, which wait for these. Forks
        queue up without their pages, then others give way to whoever comes first, so that its search goes on."""
        for seq in list(self._forks):
            del self._forks[seq]
            self._release(seq)
            self._waiting.append(seq)
        first = min(self._waiting, key=lambda s: self.policy.rank(s, now))
        while True:
            self._admit(flight, self.capacity.max_batch_tokens, now, [first])
            others = [seq for seq in self._running if seq.request is not first.request]
            if flight.rows or not others:
                return
            self.preempt(self.policy.victim(others, now))

    def _extend_or_preempt(self, seq: Sequence, count: int, now: float) -> Change | None:
        """Pages for `count` more tokens, taking them from others if need be; None: not in this step."""
        while (change := self._grow(seq, count)) is None:
            if self.paging.let_go() or self.sessions.let_go():
                continue
            if self._pages_returning():
                return None
            victim = self.policy.victim(self._pressure.victims(list(self._running)), now)
            self.preempt(victim)
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

    def preempt(self, seq: Sequence) -> None:
        """Take a running sequence's pages and slot; it keeps its tokens and will catch up later."""
        seq.move(Status.PREEMPTED)
        del self._running[seq]
        seq.epoch += 1
        seq.pending = 0
        if seq.request.beam is not None:
            self._searches[seq.request.id].forget(seq)
        if not seq.outputs:
            seq.scores, seq.pooled = [], []
        self.diary.preempted(seq)
        self.paging.preempted(seq)
        self._pressure.preempted(seq)
        self.stats.preempted_most = max(self.stats.preempted_most, seq.preempted)
        self._waiting.appendleft(seq)
        if not seq.inflight:
            self._release(seq)

    def _admit(self, flight: Flight, budget: int, now: float, only: list[Sequence] | None = None) -> None:
        """Let waiting sequences start, best first, while budget, slots and pages last; `only` these, at any price."""
        if not (self._waiting and self._slots and budget > 0 and self.policy.admits(len(self._running))):
            return
        order = only or list(self.policy.order(self._waiting, now))
        reserve = self.policy.reserve(order[: len(self._slots)])
        idle = self.capacity.depth > 1 and not (reserve or self._flights or flight.rows)
        most = AT_ONCE if idle else len(order)
        admitted: set[Sequence] = set()
        for seq in order:
            if not self._slots or (budget <= 0 and not reserve) or len(admitted) >= most:
                break
            if seq.inflight or not (only or self._pressure.admits(seq)):
                continue  # preempted; its old pages are still in use, or it would only be so again
            self.memory.hash_pages(seq.table, seq.tokens, seq.request.salt)
            hit = self.memory.lookup(seq.table, reusable(seq))
            blend = seq.request.blend
            if hit.waits or self.paging.fetch(seq) or (blend is not None and self.blending.waits(flight, seq, blend)):
                seq.move(Status.PENDING)
                self.diary.waits(seq)
                continue
            count = min(seq.known - hit.tokens, self._chunk, self._pace.fit(hit.tokens, budget))
            if seq.memo is not None:
                count = min(count, seq.memo.room(hit.tokens, 0))
            spare = self._pressure.spare if self._running and not only else 0
            while not (fits := self._start(flight, seq, hit, count, reserve, spare)) and self.sessions.let_go():
                hit = self.memory.lookup(seq.table, reusable(seq))
            if not fits:
                break
            admitted.add(seq)
            budget -= self._pace.cost(hit.tokens, count)
        if admitted:
            self._waiting = deque(s for s in self._waiting if s not in admitted)

    def _start(self, flight: Flight, seq: Sequence, hit: Hit, count: int, reserve: int, spare: int) -> bool:
        """Give a newcomer pages, a slot and its first row; False if memory is short."""
        if not self.memory.fits(min(max(seq.known, reserve), seq.peak), hit, spare):
            return False
        blend = seq.request.blend
        if blend is not None:
            reserve = seq.known
        adopted = self.memory.adopt(seq.table, hit)
        extended = self.memory.extend(seq.table, hit.tokens, max(hit.tokens + count, reserve))
        if extended is None:  # enough pages, but not in one piece
            self.memory.release(seq.table, hit.tokens)
            return False
        seq.computed = seq.hit = hit.tokens
        if seq.cached < 0:
            seq.cached = hit.tokens
            self.stats.cached_tokens += hit.tokens
        self.diary.started(seq, hit)
        self.paging.started(seq)
        self._pressure.started(seq)
        self._run(flight, seq)
        flight.change(seq, adopted)
        flight.change(seq, extended)
        self.memory.promise(seq.table, min(seq.known, seq.peak))
        if blend is not None and self.blending.begin(flight, seq, blend, hit.tokens, count):
            return True
        if count:
            self._add_row(flight, seq, count)
        return True

    def _run(self, flight: Flight, seq: Sequence) -> None:
        """Into a slot, and among the running."""
        seq.move(Status.RUNNING)
        self._running[seq] = None
        seq.slot = self._slots.pop()
        flight.admit(seq)

    def _add_row(self, flight: Flight, seq: Sequence, count: int, drafts: int = 0) -> None:
        self.diary.row(seq, count)
        flight.row(seq, count, drafts)
        self.memory.publish(seq.table, min(seq.computed, len(seq.tokens)), seq.tokens, seq.request.salt)
        if seq.computed == seq.known and seq.draws:
            if seq.children and seq.known == seq.prompt_len:
                self._fork_children(flight, seq)
            flight.sample(seq)

    def _fork_children(self, flight: Flight, parent: Sequence) -> None:
        """The prompt is computed in this step: branches share its pages and draw from its last row."""
        for child in parent.children:
            if child.status is Status.FINISHED:
                continue
            child.cached = parent.cached
            if not self._slots:
                self._waiting.append(child)  # starts later, on a prefix hit
                continue
            child.table = self.memory.fork(parent.table)
            child.computed = child.hit = parent.computed
            child.inherit(parent)
            self.diary.started(child)
            self._run(flight, child)
            flight.tables(child)
            flight.sample(child)
        parent.children = []

    # ---- commit ---------------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult, now: float = 0.0) -> list[TokenEvent]:
        """Take in a finished step; plans commit in the order they were made."""
        self.diary.now = now or self.diary.now
        flight = self._flights.popleft()
        assert flight.plan is plan, "steps must commit in the order they were planned"
        self._pace.ended(self.diary.now, plan, alone=flight.alone)
        self.diary.stepped(plan, result, flight.rows)
        if self._drafts is not None:
            self._drafts.landed(plan, result, self.diary.now)
        self._land(flight)
        self.forgetting.landed(plan.step)
        for apart in self.blending.commit(flight, result):
            self._retire(apart)
        self.paging.stepped(plan, result)
        self.paging.settle(plan, flight.rows)
        for i, scores in result.scores.items():
            seq, epoch = flight.rows[i]
            if seq.epoch == epoch:
                seq.scores += scores[: seq.prompt_len - 1 - len(seq.scores)]
        if result.mass:
            self.forgetting.learn(flight, result)
        events: list[TokenEvent] = []
        for i, (seq, epoch) in enumerate(flight.samples):
            if seq.epoch == epoch and seq.status is Status.RUNNING:
                if seq.request.beam is not None:
                    events += self._branch(seq, result.logprobs[i][0])
                else:
                    events.append(self._advance(seq, result, i))
        for i, vector in result.pooled.items():
            seq, epoch = flight.rows[i]
            if seq.epoch == epoch and seq.status is Status.RUNNING:
                events += self._pool(seq, plan.rows[i], vector)
        for row, (seq, epoch) in zip(plan.rows, flight.rows, strict=True):
            upto = seq.computed if row.drafts else row.start + row.count
            if upto >= seq.table.due and seq.epoch == epoch and seq.status is Status.RUNNING:
                self.memory.publish(seq.table, upto, seq.tokens, seq.request.salt)
        return events

    def _land(self, flight: Flight) -> None:
        """The step no longer uses its slots and pages; what ended meanwhile can go."""
        for seq in flight.members():
            seq.inflight -= 1
            if not seq.inflight and seq.status in (Status.FINISHED, Status.PREEMPTED):
                self._release(seq)

    def _advance(self, seq: Sequence, result: StepResult, sample: int) -> TokenEvent:
        """Append what was drawn for one sample, up to a stop."""
        offered, accepted = self._settle(seq, *result.drafts.get(sample, (0, 0))) if seq.drafts else (0, 0)
        index = seq.outputs
        request = seq.request
        drawn: list[int] = []
        finish = None
        for token in result.tokens[sample]:
            drawn.append(token)
            finish = self._ends(seq, request, token, index + len(drawn))
            if finish:
                break
        if index == 0:
            self.diary.drew(seq)
        seq.tokens += drawn
        seq.pending -= 1
        self.stats.output_tokens += len(drawn)
        if sample in result.errors:
            event = self._finish(seq, FinishReason.ERROR, f"the grammar failed: {result.errors[sample]}")
            event.error = InputError.__name__
        elif finish or sample in result.ended:
            event = self._finish(seq, finish or FinishReason.STOP)
        else:
            event = TokenEvent(request.id, seq.branch, index, drawn)
        event.index, event.tokens, event.cached = index, drawn, max(0, seq.cached)
        event.blended, event.evicted = seq.log.blended, seq.log.evicted
        seq.unsent = max(0, len(drawn) - 1 - accepted)
        if offered or seq.unsent:
            self.diary.forced(seq, seq.unsent)
            event.forced, event.drafted, event.accepted = seq.unsent, offered, accepted
        if sample in result.logprobs:
            event.logprobs = result.logprobs[sample][: len(drawn)]
        if index == 0 and seq.scores:
            event.prompt_logprobs = seq.scores
        return event

    def _settle(self, seq: Sequence, offered: int, accepted: int) -> tuple[int, int]:
        """A step with guesses is over: KV is there as far as they were right, and pages beyond that go back."""
        if seq.aim is not None:
            seq.aim.learn(seq.drafts, offered, accepted)
        self.diary.guessed(seq, offered, accepted)
        seq.computed += accepted
        if not self.policy.contiguous:
            self.memory.trim(seq.table, seq.computed)
        return offered, accepted

    def _branch(self, seq: Sequence, options: TokenLogprobs) -> list[TokenEvent]:
        """A beam's options are known; once all are, its search goes a step on, or is over."""
        search = self._searches[seq.request.id]
        seq.pending -= 1
        if not search.learn(seq, options):
            return []
        if seq is search.root and not seq.outputs:
            self.diary.drew(seq)
        for old in search.advance(self._fork):
            self._retire(old)
        if search.live:
            return []
        request = seq.request
        found = answers(request, search.results(request.params.n), max(0, seq.cached))
        self.stats.output_tokens += sum(len(event.tokens) for event in found)
        self.diary.ended(search.root, FinishReason.STOP)
        del self._searches[request.id], self._requests[request.id]
        return found

    def _fork(self, parent: Sequence) -> Sequence:
        child = parent.fork(self.memory.fork(parent.table))
        self._forks[child] = None
        return child

    def _pool(self, seq: Sequence, row: Row, vector: list[float]) -> list[TokenEvent]:
        """Add hidden states of a part of the prompt; with the last part the request is answered."""
        seq.pooled = [a + b for a, b in zip(seq.pooled, vector, strict=True)] if seq.pooled else vector
        if row.start + row.count < seq.prompt_len:
            return []
        event = self._finish(seq, FinishReason.STOP)
        event.embedding = [x / seq.prompt_len for x in seq.pooled] if row.pool == "mean" else seq.pooled
        return [event]

    def _ends(self, seq: Sequence, request: Request, token: int, outputs: int) -> FinishReason | None:
        params = request.params
        if outputs >= params.min_tokens and (
            token in params.stop_token_ids or (token in request.eos_token_ids and not params.ignore_eos)
        ):
            return FinishReason.STOP
        return FinishReason.LENGTH if seq.prompt_len + outputs >= seq.limit else None

    def _finish(self, seq: Sequence, reason: FinishReason, message: str = "") -> TokenEvent:
        """End a sequence and tell of it."""
        request = seq.request
        well = reason in (FinishReason.STOP, FinishReason.LENGTH)
        if request.session and seq.status is Status.RUNNING and well and not seq.evicted:
            self.memory.publish(seq.table, min(seq.computed, len(seq.tokens)), seq.tokens, request.salt)
            self.sessions.keep(request.session, request.salt, seq.table, self.diary.now + request.hold)
        self._retire(seq)
        self.diary.ended(seq, reason)
        if all(s.status is Status.FINISHED for s in self._requests[seq.request.id]):
            del self._requests[seq.request.id]
        return TokenEvent(
            seq.request.id, seq.branch, seq.outputs, [], finish=reason, cached=max(0, seq.cached), message=message
        )

    def _end(self, request_id: str, reason: FinishReason, message: str = "", error: str = "") -> list[TokenEvent]:
        """End all that is left of a request."""
        live = [s for s in self._requests.get(request_id, ()) if s.status is not Status.FINISHED]
        search = self._searches.pop(request_id, None)
        if search is None:
            events = [self._finish(seq, reason, message) for seq in live]
        else:
            for seq in search.live:
                self._retire(seq)
            self.diary.ended(search.root, reason)
            branches = range(search.root.request.params.n)
            events = [TokenEvent(request_id, b, 0, [], finish=reason, message=message) for b in branches]
            del self._requests[request_id]
        for event in events:
            event.error = error
        return events

    def _retire(self, seq: Sequence) -> None:
        """A sequence is over; its pages and slot go back as soon as no step in flight uses them."""
        if seq.status is not Status.RUNNING and seq in self._waiting:
            self._waiting.remove(seq)
        self._running.pop(seq, None)
        self._forks.pop(seq, None)
        self.paging.gone(seq)
        self._pressure.ended(seq)
        seq.move(Status.FINISHED)
        for apart in self.blending.gone(seq):
            self._retire(apart)
        if not seq.inflight:
            self._release(seq)

    def _release(self, seq: Sequence) -> None:
        if seq.slot >= 0:
            self._slots.append(seq.slot)
            self._freed.append(seq.slot)
            seq.slot = -1
        self.memory.release(seq.table, min(seq.computed, len(seq.tokens)) - seq.evicted)
        self.blending.released(seq)
        seq.computed = seq.evicted = 0
        if seq.memo is not None:
            seq.memo.reset()

    def fail(self, message: str) -> list[TokenEvent]:
        """A step failed: what is in memory can no longer be trusted. End everything, forget all pages, go on."""
        events: list[TokenEvent] = []
        for request_id in list(self._requests):
            events += self._end(request_id, FinishReason.ERROR, message)
        while self._flights:
            self._land(self._flights.popleft())
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
        return counters(self.stats, len(self._waiting), len(self._running), self.memory, self.capacity, tiers)

    def view(self) -> EngineView:
        return picture(
            self.diary.now,
            running=list(self._running),
            waiting=self._waiting,
            memory=self.memory,
            directory=self.paging.directory,
            stats=self.snapshot(),
            capacity=self.capacity,
            steps=self.diary.steps,
        )

    def timelines(self, request_id: str) -> list[Timeline]:
        """What happened to each branch of a request that runs or lately ended."""
        branches = self._requests.get(request_id)
        return [seq.log for seq in branches] if branches else self.diary.of(request_id)

    def check(self) -> None:
        """Invariants; run after every step in tests and when idle in service."""
        landing = {s: None for f in self._flights for s in f.members() if s not in self._running}
        holders = [*self._running, *self._forks, *landing]
        others = [*self.paging.tables(), *self.sessions.tables(), *self.forgetting.tables(), *self.blending.tables()]
        self.memory.check([*(s.table for s in holders), *others])
        slots = [s.slot for s in holders if s.slot >= 0]
        assert sorted([*slots, *self._slots]) == list(range(self.capacity.slots)), "slots leaked or shared"
        for seq in self._running:
            assert seq.status is Status.RUNNING and seq.slot >= 0 and 0 <= seq.computed <= seq.known <= seq.limit
            assert 0 <= seq.evicted <= seq.computed and seq.held <= seq.peak, f"{seq.key}: more KV than it may have"
            assert seq.inflight == sum(seq in f.members() for f in self._flights), f"{seq.key}: lost a flight"
        for seq in self._waiting:
            assert seq.status in (Status.WAITING, Status.PENDING, Status.PREEMPTED)
            assert seq.inflight or (seq.slot < 0 and not any(seq.table.pages)), f"{seq.key} waits but holds memory"
        if not self._requests and not self._flights and not others:
            assert self.memory.pool.used == 0 and not self._waiting, "idle, yet pages are in use"
