"""Continuation: rows for sequences that run. Those that decode get their next token, those in the midst of their
prompts as much of these as the step's budget takes; who finds no pages has others preempted for it.

    who lacks tokens? ─► pages (reclaimed, or taken from others) ─► decode rows ─► prefill rows

The counterpart of admission. Refuses to know: who starts, what came of a step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from quire.memory.manager import Change, KVManager
from quire.scheduling.admission import Admission
from quire.scheduling.feature_set import FeatureSet
from quire.scheduling.plan_builder import PlanBuilder
from quire.scheduling.policies import Policy
from quire.scheduling.prefill_budget import PrefillLimiter
from quire.scheduling.sequence import Sequence
from quire.scheduling.sequence_table import SequenceTable
from quire.types.request import Status

HELD_BACK_SHARE = 0.25  # of a step's prefill budget, for prompts that let better ones start first
BESIDE_OVERDUE_SHARE = 0.25  # of it, for others beside a prompt that has waited too long and goes before them
RUNNING = Status.RUNNING


class Runnable(NamedTuple):
    """Running sequences with tokens to compute."""

    decode: list[Sequence]  # one token each
    irregular: list[Sequence]  # ... of them, those that need pages, or whose rows are not like the others'
    prefill: list[tuple[Sequence, int]]  # so many tokens
    decoding: bool  # whether any waits for its next token


class Continuation:
    def __init__(
        self,
        table: SequenceTable,
        in_flight: Iterable[PlanBuilder],
        *,
        chunk: int,
        memory: KVManager,
        policy: Policy,
        features: FeatureSet,
        admission: Admission,
        limiter: PrefillLimiter,
    ):
        """`chunk`: most tokens of one row."""
        self._table = table
        self._in_flight = in_flight
        self._chunk = chunk
        self._memory = memory
        self._policy = policy
        self._features = features
        self._admission = admission
        self._limiter = limiter

    def plan_rows(self, builder: PlanBuilder) -> list[Sequence]:
        """Rows for running sequences. Decoding rows are outside the prefill budget: there are at most as many as slots,
        and a prompt need not be cut in two because others are being answered. Returns those in the midst of their
        prompts that let better ones start first; a part of the budget stays theirs."""
        running, drafting, before = self._table.running, self._features.drafting, len(self._table.running)
        drafts = self._up_to_boundaries(drafting.budgets(list(running))) if drafting is not None else {}
        decode, irregular, prefill, decoding = self._runnable(drafts)
        held_back: list[Sequence] = []
        if prefill:
            prefill.sort(key=lambda one: one[0].rank)
            held_back = [seq for seq, _ in prefill if self._admission.leaves_budget(seq)]
            prefill = [one for one in prefill if one[0] not in held_back] if held_back else prefill
        target = self._policy.latency_target(seq.view for seq in running)
        waited_for = decoding or bool(held_back)
        builder.budget = budget = self._limiter.budget(decoding=waited_for, rows=len(decode), target=target)
        changes: list[tuple[Sequence, Change]] = []
        for seq in irregular:
            if seq.status is RUNNING and (change := self._extend_for_row(builder, seq, 1, drafts)) is not None:
                changes.append((seq, change))
        rows: list[tuple[Sequence, int]] = []
        for number, (seq, missing) in enumerate(prefill, 1):
            if seq.status is not RUNNING:
                continue  # preempted for one before it
            shared = seq.overdue and (number < len(prefill) or self._admission.can_start_next())
            allowed = budget.part(1 - BESIDE_OVERDUE_SHARE) if shared else budget
            count = min(missing, self._chunk, allowed.fit(seq.held))
            if seq.hook is not None:
                count = min(count, seq.hook.row_limit(seq.computed))
            if count <= 0:
                break
            if (change := self._extend_for_row(builder, seq, count, drafts)) is not None:
                changes.append((seq, change))
                rows.append((seq, count))
                budget = budget.less(seq.held, count)
        if len(changes) < len(irregular) + len(rows) or len(running) < before:  # some have no pages, or none any more
            without = {*irregular}.difference(seq for seq, _ in changes)
            decode = [seq for seq in decode if seq.status is RUNNING and seq not in without]
        for seq, change in changes:
            if seq.status is RUNNING:
                builder.change(seq, change)
        self._table.add_decode_rows(builder, decode, irregular, drafts)
        for seq, count in rows:
            if seq.status is RUNNING:
                builder.budget = builder.budget.less(seq.held, count)
                self._table.add_row(builder, seq, count, drafts.get(seq, 0))
        if held_back:
            builder.budget = builder.budget.part(1 - HELD_BACK_SHARE)
        return held_back

    def _runnable(self, drafts: dict[Sequence, int]) -> Runnable:
        """Running sequences that may compute now. Drafts need all tokens before them, and other rows should not go
        without them."""
        unverified = self._features.drafting.unverified if self._features.drafting is not None else ()
        decode: list[Sequence] = []
        irregular: list[Sequence] = []
        prefill: list[tuple[Sequence, int]] = []
        decoding = False
        steady = self._features.drafting is None
        for seq in self._table.running:
            computed = seq.computed
            pending = seq.pending
            if pending > seq.max_pending:
                decoding = True
                continue
            if steady and computed < seq.steady_until and computed < seq.table.writable_until:
                decode.append(seq)
                continue
            known = len(seq.tokens) + pending
            missing = known - computed
            if missing == 1 or pending:
                decoding = True
            if missing <= 0 or known >= seq.limit:
                continue
            if pending and (drafts or seq in unverified):
                continue
            if (hook := seq.hook) is not None and seq.inflight and hook.sequential:
                continue
            if missing > 1:
                prefill.append((seq, missing))
                continue
            decode.append(seq)
            if computed >= seq.table.writable_until or hook is not None or seq.unsent or drafts or not seq.draws:
                irregular.append(seq)
        return Runnable(decode, irregular, prefill, decoding or bool(decode))

    def plan_held_back(self, builder: PlanBuilder, held_back: list[Sequence]) -> None:
        """Prompts that let others start first take what the budget has left, and their own part of it; that part alone
        while better ones wait for slots, which come free sooner the shorter steps are. Nobody loses pages for them once
        others were admitted: those have their rows."""
        if not held_back:
            return
        first = held_back[0]
        lacks_slot = self._admission.defers(first) or (not self._table.slots and self._admission.better_waits(first))
        builder.budget = builder.budget.own() if lacks_slot else builder.budget.whole()
        alone = not (builder.rows or builder.probes or builder.plan.admits)
        for seq in held_back:
            if seq.status is not RUNNING or seq in builder.members:
                continue  # preempted; and admitted again by this very plan
            count = min(seq.known - seq.computed, self._chunk, builder.budget.fit(seq.held))
            if seq.hook is not None:
                count = min(count, seq.hook.row_limit(seq.computed))
            if count <= 0:
                return
            extend = self._extend_or_preempt if alone else self._extend
            change = extend(builder, seq, count)
            if change is not None:
                builder.budget = builder.budget.less(seq.held, count)
                builder.change(seq, change)
                self._table.add_row(builder, seq, count)
                alone = False

    def _up_to_boundaries(self, drafts: dict[Sequence, int]) -> dict[Sequence, int]:
        """Where states are kept, no draft goes beyond the next page boundary, so that one can be kept there."""
        if self._memory.states is None or not self._memory.prefix_cache:
            return drafts
        step = self._memory.layout.alignment
        most = {seq: min(budget, -seq.known % step) for seq, budget in drafts.items()}
        return {seq: budget for seq, budget in most.items() if budget}

    def _extend_for_row(
        self, builder: PlanBuilder, seq: Sequence, count: int, drafts: dict[Sequence, int]
    ) -> Change | None:
        """Pages for `count` more tokens, and its drafts if there are any; None: not in this step."""
        change = self._extend_for_drafts(seq, drafts) if drafts else None
        return change or self._extend_or_preempt(builder, seq, count)

    def _extend_or_preempt(self, builder: PlanBuilder, seq: Sequence, count: int) -> Change | None:
        """Pages for `count` more tokens, taking them from others if need be; None: not in this step."""
        running = self._table.running
        while (change := self._extend(builder, seq, count)) is None:
            if any(reclaim(running=True) for reclaim in self._table.reclaim):
                continue
            if self._pages_returning():
                return None
            victims = self._features.preemption.victims(running) or [max(running, key=lambda seq: seq.rank)]
            self._features.preemption.short_of_pages()
            self._table.preempt(victims[0])
            if victims[0] is seq:
                return None
        return change

    def _extend(self, builder: PlanBuilder, seq: Sequence, count: int) -> Change | None:
        if seq.hook is not None:
            return seq.hook.extend(seq, count, builder.plan.step)
        return self._memory.extend(seq.table, seq.computed, seq.computed + count)

    def _extend_for_drafts(self, seq: Sequence, drafts: dict[Sequence, int]) -> Change | None:
        """Pages for the next token and the drafts after it; no sequence loses any for a draft."""
        if seq not in drafts:
            return None
        change = self._memory.extend(seq.table, seq.computed, seq.known + drafts[seq])
        if change is None:
            del drafts[seq]
        return change

    def _pages_returning(self) -> bool:
        """Whether pages come back by themselves when a step in flight commits."""
        landing = any(seq.status is not RUNNING for step in self._in_flight for seq in step.members)
        return landing or bool(self._in_flight and (self._features.eviction.returning or self._memory.returning))
