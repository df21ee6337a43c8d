"""Admission: pages, a slot and a first row for waiting sequences, best first, while budget, slots and memory last.

A sequence starts on what is cached of its prompt; one whose pages are on their way (another sequence computes them, a
tier delivers them, chunks of its own) waits for them. One that does not fit may be overtaken by a few that do, up to a
bound; and the policy may have running sequences displaced for it. Refuses to know: how running sequences go on.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from math import inf

from quire.memory.manager import Hit, KVManager
from quire.scheduling.feature import SchedulingFeature
from quire.scheduling.features.timeline_recorder import TimelineRecorder
from quire.scheduling.plan_builder import PlanBuilder
from quire.scheduling.policies import Policy
from quire.scheduling.preemption import PreemptionGuard
from quire.scheduling.prefill_budget import PrefillLimiter
from quire.scheduling.sequence import Sequence
from quire.scheduling.sequence_table import SequenceTable
from quire.types.request import FinishReason, Status

MAX_SCANNED = 64  # waiting sequences looked at in one plan, beyond those that get a slot
MAX_PASSED = 8  # ... of them, behind one that does not fit
MAX_OVERTAKEN = 32  # admissions of others that a sequence which does not fit is made to wait for
OVERDUE_EVERY = 8  # admissions, of which one is for the sequence that has waited longest, where that is too long
MIN_RUNNING = 4  # sequences that run at once, whatever that does to their time per token
MAX_DISPLACED = 4  # running sequences preempted for better candidates in one plan
MAX_VICTIMS = 12  # ... and looked at: the further down, the longer an answer has been under way
STEP_TOKENS = 256  # prompt tokens that take about as long as a step does by itself
IDLE_SEQUENCES, IDLE_TOKENS = 64, 4096  # admitted while the device is idle; others follow while it works


class Admission(SchedulingFeature):
    def __init__(
        self,
        table: SequenceTable,
        *,
        policy: Policy,
        chunk: int,
        longest: int,
        overlapped: bool,
        whole: bool = False,
        memory: KVManager,
        timeline: TimelineRecorder,
        preemption: PreemptionGuard,
        max_wait: float,
        limiter: PrefillLimiter,
    ):
        """`chunk`: most tokens of one row; `longest`: of one sequence; `overlapped`: whether plans are made while the
        device works; `max_wait`: seconds after which the oldest that waits goes before all others; `whole`: sequences
        start only if one row takes all of them."""
        self._table = table
        self._policy = policy
        self._static = memory.contiguous and type(policy).reserve is Policy.reserve
        self._displacing = type(policy).displaces is not Policy.displaces and not memory.contiguous
        self._chunk = longest if whole else chunk
        self._whole_rows = whole
        self._longest = longest
        self._overlapped = overlapped
        self._memory = memory
        self._no_hit = Hit.none(len(memory.layout.groups))
        self._timeline = timeline
        self._preemption = preemption
        self._overtaken: dict[Sequence, int] = {}  # how often, of those that wait
        self._candidate: Sequence | None = None  # waits for the slots and pages of those who were displaced for it
        self._displaced: list[Sequence] = []
        self._max_wait = max_wait
        self._limiter = limiter
        self._tokenless: OrderedDict[Sequence, None] = OrderedDict()  # without a first token, and not put first yet
        self._since_overdue = OVERDUE_EVERY  # sequences admitted

    def leaves_budget(self, seq: Sequence) -> bool:
        """Whether one that runs, in the midst of its prompt, leaves most of a step to others: to better ones that wait,
        or so that slots come free soon."""
        return self.better_waits(seq) or self.defers(seq)

    def defers(self, seq: Sequence) -> bool:
        """Whether it leaves slots to others, few of which are free; not once it has waited too long itself."""
        return self._table.few_slots and not seq.overdue and self._policy.defers(seq.view)

    def better_waits(self, seq: Sequence) -> bool:
        """Whether the best that waits, and could start if it had a slot, goes before this one, which runs."""
        first = self._table.waiting.first(1)
        return bool(first) and first[0].rank < seq.rank and first[0].status is not Status.PENDING

    def can_start_next(self) -> bool:
        """Whether the best that waits could start now, as far as can be told without starting it."""
        first = self._table.waiting.first(1) if self._table.slots and not self._limiter.behind else []
        if not first or first[0].status is Status.PENDING or first[0].inflight or self.defers(first[0]):
            return False
        return self._preemption.admits(first[0]) and self._fits(first[0], self._lookup(first[0]))

    def put_overdue_first(self, now: float) -> None:
        """One in so many admissions is for the oldest without a first token, once that is too long: it waits, or others
        go before its prompt. Under overload all of them wait too long."""
        if not self._tokenless or self._since_overdue < OVERDUE_EVERY:
            return
        if now - next(iter(self._tokenless)).request.arrival > self._max_wait:
            waiting, running = self._table.waiting, self._table.running
            oldest = next((seq for seq in self._tokenless if seq in waiting or seq in running), None)
            if oldest is not None:  # others are branches that begin with their first
                self._since_overdue = 0
                del self._tokenless[oldest]
                self._table.put_first(oldest)

    def arrived(self, seq: Sequence) -> None:
        if self._max_wait < inf and not seq.outputs:
            self._tokenless[seq] = None

    def drew(self, seq: Sequence, drafted: int, accepted: int, forced: int) -> None:
        self._tokenless.pop(seq, None)

    def admit(self, builder: PlanBuilder, only: Sequence | None = None) -> None:
        """Let waiting sequences start; `only` this one, at any price."""
        table, slots = self._table, self._table.slots
        if not (table.waiting and slots and builder.budget.fit(0)) or (self._static and table.running):
            return
        candidates = [only] if only else table.waiting.first(len(slots) + MAX_SCANNED)
        if not only and self._limiter.behind and len(table.running) >= MIN_RUNNING:
            candidates = [seq for seq in candidates if seq.overdue]  # others would have those that run miss targets
            if not candidates:
                return
        reserve = 0
        if self._static:
            candidates = self._static_batch(candidates[: len(slots)])
            reserve = self._whole(candidates)
        hurry = self._overlapped and builder.idle and not (reserve or builder.rows)
        admitted = behind = 0
        blocked: Sequence | None = None  # the first that does not fit
        passed: list[Sequence] = []  # those whom one that is admitted now overtakes
        copying: dict[bytes, bool] = {}  # whether those who part within the page behind this one wait to copy it
        for seq in candidates:
            if not slots or not (builder.budget.fit(0) or reserve):
                break
            if hurry and (admitted >= IDLE_SEQUENCES or builder.tokens >= IDLE_TOKENS):
                break
            if not only and (seq in self._displaced or self.defers(seq)):
                continue  # behind the one it was displaced for; or it leaves slots to others
            if any(self._overtaken.get(one, 0) >= MAX_OVERTAKEN for one in passed):
                break
            if seq.inflight or not (only or self._preemption.admits(seq)):
                passed.append(seq)  # preempted; its old pages are still in use, or it would only be preempted again
                continue
            if blocked is not None:
                behind += 1
                if behind > MAX_PASSED or self._memory.pool.available <= self._preemption.spare:
                    break
                if not self._policy.passes(blocked.view, seq.view):
                    passed.append(seq)
                    continue
            hit = self._lookup(seq)
            if self._held(builder, seq, hit) or (not only and self._copies_soon(seq, hit, candidates, copying)):
                seq.move(Status.PENDING)
                self._timeline.waits(seq)
            elif self._start_or_reclaim(builder, seq, hit, reserve, forced=bool(only)):
                admitted += 1
                for one in passed:
                    self._overtaken[one] = self._overtaken.get(one, 0) + 1
            else:
                if seq is self._candidate:
                    break  # it waits for what it displaces others for
                blocked = blocked or seq
                passed.append(seq)

    def _static_batch(self, candidates: list[Sequence]) -> list[Sequence]:
        """As many of them as the pool holds, each as long as the longest of them."""
        pool, pages_for = self._memory.pool, self._memory.layout.pages_for
        count = 1
        while count < len(candidates) and (count + 1) * pages_for(self._whole(candidates[: count + 1])) <= pool.total:
            count += 1
        return candidates[:count]

    def _whole(self, batch: list[Sequence]) -> int:
        """Tokens to set aside for each sequence of a static batch: the longest prompt and the longest answer."""
        return min(self._longest, max(s.prompt_len for s in batch) + max(s.limit - s.prompt_len for s in batch))

    def displace(self, builder: PlanBuilder) -> None:
        """Before rows are planned: preempt running sequences, those with the highest rank, if the policy prefers the
        first waiting one to them and their slots and pages let that start, which it could not otherwise."""
        if not self._displacing:
            return
        if (before := self._candidate) is not None:
            if any(seq.inflight for seq in self._displaced) or self._fits(before, self._lookup(before)):
                return  # what they give up comes when their step lands; or it starts with this plan
            self._candidate, self._displaced = None, []
        for seq in self._table.waiting.first(MAX_SCANNED) if self._table.waiting else ():
            if seq.inflight or not self._table.running or self._fits(seq, self._no_hit):
                return  # pages of its own are coming back; or it fits, whatever is cached of it
            hit = self._lookup(seq)
            waits = hit.waits or (seq.status is Status.PENDING and self._held(builder, seq, hit))
            if self._preemption.admits(seq) and not waits:
                if not self._fits(seq, hit) and not self._held(builder, seq, hit):
                    self._displace_for(seq, hit)
                return

    def _displace_for(self, seq: Sequence, hit: Hit) -> None:
        victims: list[Sequence] = []
        for victim in self._preemption.victims(self._table.running)[:MAX_VICTIMS]:
            if len(victims) == MAX_DISPLACED:
                return
            if not self._policy.displaces(seq.view, victim.view):
                continue
            victims.append(victim)
            if self._fits(seq, hit, victims):
                self._candidate, self._displaced = seq, victims
                for one in victims:
                    self._table.preempt(one)
                return

    def _fits(self, seq: Sequence, hit: Hit, without: Collection[Sequence] = ()) -> bool:
        """Whether there is a slot and pages for it, once the sequences `without` have given theirs up."""
        spare = self._preemption.spare if len(without) < len(self._table.running) else 0
        tables = [one.table for one in without]
        tokens = min(seq.known, seq.peak)
        return bool(self._table.slots or without) and self._memory.fits(tokens, hit.rounded or hit, spare, tables)

    def _lookup(self, seq: Sequence) -> Hit:
        """What is cached of a sequence: to the token, unless it treats pages in its own way."""
        self._memory.hash_pages(seq.table, seq.tokens, seq.request.salt)
        return self._memory.lookup(seq.table, seq.reusable, seq.tokens if seq.plain else ())

    def _held(self, builder: PlanBuilder, seq: Sequence, hit: Hit) -> bool:
        """Whether more of a sequence than was found is on its way."""
        return hit.waits or any(holds(seq, builder) for holds in self._table.holds)

    def _copies_soon(self, seq: Sequence, hit: Hit, candidates: list[Sequence], known: dict[bytes, bool]) -> bool:
        """Whether a sequence waits one step for a page which this plan computes and it could copy then: if so many
        others could too that computing all their parts of it takes longer than a step."""
        if not hit.soon:
            return False
        shared = hit.tokens + hit.soon
        page = seq.table.name_before(0, hit.tokens // self._memory.layout.groups[0].tokens_per_page)
        if page not in known:
            start, behind, salt = seq.tokens[:shared], seq.tokens[hit.tokens : shared], seq.request.salt
            sharers = sum(
                one.tokens[hit.tokens : shared] == behind and one.request.salt == salt and one.tokens[:shared] == start
                for one in candidates
            )
            known[page] = sharers * hit.soon >= STEP_TOKENS
        return known[page]

    def _start_or_reclaim(self, builder: PlanBuilder, seq: Sequence, hit: Hit, reserve: int, *, forced: bool) -> bool:
        spare = self._preemption.spare if self._table.running and not forced else 0
        if self._memory.contiguous and not self._static:
            reserve = min(self._longest, max(seq.known, self._policy.reserve(seq.view, self._longest)))
        while not self._start(builder, seq, hit, reserve, spare):
            if not any(reclaim(running=False) for reclaim in self._table.reclaim):
                return False
            hit = self._lookup(seq)
        return True

    def _start(self, builder: PlanBuilder, seq: Sequence, hit: Hit, reserve: int, spare: int) -> bool:
        """Give a waiting sequence pages, a slot and its first row; False if memory is short."""
        need = min(max(seq.known, reserve), seq.peak)
        if hit.rounded is not None and not self._memory.fits(need, hit, spare):
            hit = hit.rounded  # a page less, which the copy and its source would take together
        count = min(seq.known - hit.tokens, self._chunk, builder.budget.fit(hit.tokens))
        if self._whole_rows and count < seq.known:
            return False
        if seq.hook is not None:
            count = min(count, seq.hook.row_limit(hit.tokens))
        if not self._memory.fits(need, hit, spare):
            return False
        if seq.request.blend is not None:
            reserve = seq.known
        self._memory.adopt(seq.table, hit)
        extended = self._memory.extend(seq.table, hit.tokens, max(hit.tokens + count, reserve))
        if extended is None:  # enough pages, but not in one piece
            self._memory.release(seq.table, hit.tokens)
            return False
        seq.computed = hit.tokens
        if seq.cached < 0:
            seq.cached = min(hit.tokens, seq.prompt_len)
            self._timeline.stats.cached_tokens += seq.cached
        self._table.waiting.remove(seq)
        self._table.start(builder, seq, hit)
        builder.page_tables(seq)
        builder.plan.copies += extended.copies
        whole = min(seq.known, seq.peak)
        self._memory.want_snapshots(seq.table, whole)
        if count and not any(takes_over(builder, seq, hit, count) for takes_over in self._table.takes_over):
            self._table.add_row(builder, seq, count)
        self._memory.promise(seq.table, whole)  # what this row does not compute
        builder.budget = builder.budget.less(hit.tokens, count)
        return True

    def seat_forks(self, builder: PlanBuilder) -> None:
        """Slots and rows for beams that forked off others, as far as there are any."""
        for seq in list(self._table.forks):
            if not self._table.slots:
                break
            change = self._memory.extend(seq.table, seq.computed, seq.known)
            if change is None:
                break
            del self._table.forks[seq]
            self._table.start(builder, seq, None)
            builder.page_tables(seq)
            builder.plan.copies += change.copies
            self._table.add_row(builder, seq, 1)

    def admitted(self, seq: Sequence, hit: Hit | None) -> None:
        self._since_overdue += 1
        self._overtaken.pop(seq, None)
        if seq is self._candidate:
            self._candidate, self._displaced = None, []

    def finished(self, seq: Sequence, reason: FinishReason | None) -> None:
        self.admitted(seq, None)
        self._since_overdue -= 1
        self._tokenless.pop(seq, None)
