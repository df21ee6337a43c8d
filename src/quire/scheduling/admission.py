"""Who waits is let in: pages, a slot and a first row for newcomers, best first, while budget, slots and memory last.

A newcomer starts on what is cached of its prompt; one whose pages are on their way (computed by somebody else, sent
for from a tier, chunks of its own) waits for them. Refuses to know: how running sequences go on, who gives way to whom.
"""

from __future__ import annotations

from collections import deque

from quire.memory.manager import Hit, KVManager
from quire.scheduling.features.chunk_reuse import ChunkReuse
from quire.scheduling.features.sessions import Sessions
from quire.scheduling.features.tier_prefetch import TierPrefetch, reusable
from quire.scheduling.features.timeline_recorder import TimelineRecorder
from quire.scheduling.plan_builder import PlanBuilder
from quire.scheduling.policies import FCFS
from quire.scheduling.preemption import PreemptionGuard
from quire.scheduling.prefill_budget import Budget
from quire.scheduling.sequence import Sequence
from quire.scheduling.sequence_table import SequenceTable
from quire.types.request import Status

AT_ONCE, ENOUGH = 64, 4096  # newcomers, and tokens of theirs, while the device is idle; the others while it works


class Admission:
    def __init__(
        self,
        sequences: SequenceTable,
        *,
        policy: FCFS,
        chunk: int,
        overlapped: bool,
        memory: KVManager,
        timeline: TimelineRecorder,
        tiers: TierPrefetch,
        sessions: Sessions,
        preemption: PreemptionGuard,
        chunk_reuse: ChunkReuse,
    ):
        """`chunk`: most tokens of one row; `overlapped`: whether plans are made while the device works."""
        self._sequences = sequences
        self._policy = policy
        self._chunk = chunk
        self._overlapped = overlapped
        self._memory = memory
        self._timeline = timeline
        self._tiers = tiers
        self._sessions = sessions
        self._preemption = preemption
        self._chunk_reuse = chunk_reuse

    def admit(
        self, builder: PlanBuilder, budget: Budget, now: float, *, idle: bool, only: list[Sequence] | None = None
    ) -> None:
        """Let waiting sequences start; `only` these, at any price. `idle`: no step is in flight."""
        sequences, slots = self._sequences, self._sequences.slots
        if not (sequences.waiting and slots and budget.fit(0) and self._policy.admits(len(sequences.running))):
            return
        order = only or list(self._policy.order(sequences.waiting, now))
        reserve = self._policy.reserve(order[: len(slots)])
        hurry = self._overlapped and idle and not (reserve or builder.rows)
        admitted: set[Sequence] = set()
        for seq in order:
            if not slots or not (budget.fit(0) or reserve):
                break
            if hurry and (len(admitted) >= AT_ONCE or builder.plan.tokens >= ENOUGH):
                break
            if seq.inflight or not (only or self._preemption.admits(seq)):
                continue  # preempted; its old pages are still in use, or it would only be so again
            self._memory.hash_pages(seq.table, seq.tokens, seq.request.salt)
            hit = self._memory.lookup(seq.table, reusable(seq))
            if hit.waits or self._tiers.fetch(seq) or self._awaits_chunks(builder, seq):
                seq.move(Status.PENDING)
                self._timeline.waits(seq)
                continue
            count = min(seq.known - hit.tokens, self._chunk, budget.fit(hit.tokens))
            if seq.kv_budget is not None:
                count = min(count, seq.kv_budget.room(hit.tokens, 0))
            spare = self._preemption.spare if sequences.running and not only else 0
            while not (fits := self._start(builder, seq, hit, count, reserve, spare)) and self._sessions.let_go():
                hit = self._memory.lookup(seq.table, reusable(seq))
            if not fits:
                break
            admitted.add(seq)
            budget = budget.less(hit.tokens, count)
        if admitted:
            sequences.waiting = deque(s for s in sequences.waiting if s not in admitted)

    def _awaits_chunks(self, builder: PlanBuilder, seq: Sequence) -> bool:
        blend = seq.request.blend
        return blend is not None and self._chunk_reuse.waits(builder, seq, blend, self._sequences.enter_apart)

    def _start(self, builder: PlanBuilder, seq: Sequence, hit: Hit, count: int, reserve: int, spare: int) -> bool:
        """Give a newcomer pages, a slot and its first row; False if memory is short."""
        if not self._memory.fits(min(max(seq.known, reserve), seq.peak), hit, spare):
            return False
        blend = seq.request.blend
        if blend is not None:
            reserve = seq.known
        adopted = self._memory.adopt(seq.table, hit)
        extended = self._memory.extend(seq.table, hit.tokens, max(hit.tokens + count, reserve))
        if extended is None:  # enough pages, but not in one piece
            self._memory.release(seq.table, hit.tokens)
            return False
        seq.computed = seq.hit = hit.tokens
        if seq.cached < 0:
            seq.cached = hit.tokens
            self._timeline.stats.cached_tokens += hit.tokens
        self._timeline.started(seq, hit)
        self._tiers.started(seq)
        self._preemption.started(seq)
        self._sequences.run(builder, seq)
        builder.change(seq, adopted)
        builder.change(seq, extended)
        self._memory.promise(seq.table, min(seq.known, seq.peak))
        if blend is not None and self._chunk_reuse.begin(builder, seq, blend, hit.tokens, count, self.add_row):
            return True
        if count:
            self.add_row(builder, seq, count)
        return True

    def seat_forks(self, builder: PlanBuilder) -> None:
        """Slots and rows for beams that forked off others, as far as there are any."""
        for seq in list(self._sequences.forks):
            if not self._sequences.slots:
                break
            change = self._memory.extend(seq.table, seq.computed, seq.known)
            if change is None:
                break
            del self._sequences.forks[seq]
            self._sequences.run(builder, seq)
            builder.tables(seq)
            builder.plan.copies += change.copies
            self.add_row(builder, seq, 1)

    def add_row(self, builder: PlanBuilder, seq: Sequence, count: int, drafts: int = 0) -> None:
        """Let a running sequence compute tokens from where it is, and draw if that completes it."""
        self._timeline.row(seq, count)
        builder.row(seq, count, drafts)
        self._memory.publish(seq.table, min(seq.computed, len(seq.tokens)), seq.tokens, seq.request.salt)
        if seq.computed == seq.known and seq.draws:
            if seq.children and seq.known == seq.prompt_len:
                self._fork_children(builder, seq)
            builder.sample(seq)

    def _fork_children(self, builder: PlanBuilder, parent: Sequence) -> None:
        """The prompt is computed in this step: branches share its pages and draw from its last row."""
        for child in parent.children:
            if child.status is Status.FINISHED:
                continue
            child.cached = parent.cached
            if not self._sequences.slots:
                self._sequences.waiting.append(child)  # starts later, on a prefix hit
                continue
            child.table = self._memory.fork(parent.table)
            child.computed = child.hit = parent.computed
            child.inherit(parent)
            self._timeline.started(child)
            self._sequences.run(builder, child)
            builder.tables(child)
            builder.sample(child)
        parent.children = []
