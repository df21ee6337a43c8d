"""A plan in the making, and then in flight: beside its rows and samples, whose they are and in which epoch.

Knows how a sequence is told to the worker. Refuses to know: who is chosen, where pages come from.
"""

from __future__ import annotations

from itertools import count, repeat

from quire.memory.manager import UNCHANGED, Change
from quire.scheduling.prefill_budget import Budget
from quire.scheduling.sequence import Sequence
from quire.types.plan import Admit, PageDelta, Probe, Row, Sample, StepPlan, Write

NO_BUDGET = Budget(0)


class DecodeBatch:
    """Sequences that decode together, as plans tell of them: most steps have those of the step before."""

    __slots__ = ("members", "sequences", "slots", "whose")

    def __init__(self, sequences: list[Sequence]):
        self.sequences = sequences
        self.slots = [seq.slot for seq in sequences]
        self.whose = [(seq, seq.epoch) for seq in sequences]
        self.members: dict[Sequence, None] = dict.fromkeys(sequences)


class PlanBuilder:
    __slots__ = (
        "budget",
        "drafts",
        "idle",
        "members",
        "now",
        "plan",
        "probes",
        "publishing",
        "rows",
        "samples",
        "tokens",
    )

    def __init__(self, step: int, now: float = 0.0, *, idle: bool = True):
        self.plan = StepPlan(step=step)
        self.now = now  # when it was planned
        self.idle = idle  # whether no other step was in flight then
        self.budget = NO_BUDGET  # what is left for prefill
        self.rows: list[tuple[Sequence, int]] = []
        self.samples: list[tuple[Sequence, int]] = []
        self.probes: list[tuple[Sequence, int]] = []
        self.members: dict[Sequence, None] = {}  # whose slot and pages it uses (a new branch has a sample but no row)
        self.publishing: list[int] = []  # rows after which pages may be complete, to be published
        self.tokens = 0  # of all rows
        self.drafts = False  # whether any row has a draft budget

    def admit(self, seq: Sequence) -> None:
        """Fill the sequence's slot."""
        params, request = seq.request.params, seq.request
        seq.unsent = 0
        self.plan.admits.append(
            Admit(
                slot=seq.slot,
                key=seq.key,
                tokens=list(seq.tokens),
                prompt_len=seq.prompt_len,
                params=params,
                seed=params.seed or 0,
                branch=seq.branch,
                stop_ids=seq.stops,
                salt=request.salt,
                prediction=request.prediction,
                adapter=request.lora_slot,
                unread=seq.computed if seq.plain and not params.reads_history else 0,
            )
        )

    def change(self, seq: Sequence, change: Change) -> None:
        """Tell what became of the sequence's page tables."""
        if change is not UNCHANGED:
            self.plan.deltas += [PageDelta(seq.slot, group, index, pages) for group, index, pages in change.deltas]
            self.plan.copies += change.copies
            self.plan.rope_shifts += change.rope_shifts

    def page_tables(self, seq: Sequence) -> None:
        """Tell the sequence's page tables whole."""
        self.plan.deltas += [PageDelta(seq.slot, g, 0, list(pages)) for g, pages in enumerate(seq.table.pages)]

    def row(self, seq: Sequence, count: int, drafts: int = 0) -> None:
        """Let the sequence catch up by `count` tokens, and by as many of `drafts` more as are accepted."""
        request, start, hook = seq.request, seq.computed, seq.hook
        if seq.unsent:
            at = len(seq.tokens) - seq.unsent
            self.plan.writes.append(Write(seq.slot, at, seq.tokens[at:]))
            seq.unsent = 0
        seq.computed = start + count
        seq.attained += count
        row = Row(seq.slot, start, count, drafts=drafts)
        if request.params.prompt_logprobs is not None:
            row.score = start < seq.prompt_len - 1 and not seq.outputs
        if request.pooling and (request.pooling == "mean" or seq.computed == seq.prompt_len):
            row.pool = request.pooling
        if hook is not None:
            row.shift, row.mass = hook.evicted, hook.wants_mass(start)
        self.publishing.append(len(self.rows))
        self.plan.rows.append(row)
        self.rows.append((seq, seq.epoch))
        self.members[seq] = None
        self.tokens += count
        self.drafts = self.drafts or drafts > 0

    def decode_rows(self, batch: DecodeBatch) -> None:
        """As `row` and `sample`, of sequences that lack one token each, have no hook, draw, and whose slots have all
        other tokens."""
        plan, first = self.plan, len(self.rows)
        starts = [seq.computed for seq in batch.sequences]
        ends: list[int] = []
        for row, seq in enumerate(batch.sequences, first):
            computed = seq.computed = seq.computed + 1
            seq.attained += 1
            seq.pending += 1
            ends.append(computed)
            if computed >= seq.table.next_publish:
                self.publishing.append(row)
        plan.samples += map(Sample, count(first), batch.slots, ends)
        plan.rows += map(Row, batch.slots, starts, repeat(1))
        self.rows += batch.whose
        self.samples += batch.whose
        self.members |= batch.members
        self.tokens += len(starts)

    def probe(self, seq: Sequence, start: int, count: int) -> None:
        """Find out how far the sequence's KV is from what it would be here."""
        self.plan.probes.append(Probe(seq.slot, start, count))
        self.probes.append((seq, seq.epoch))
        self.members[seq] = None

    def sample(self, seq: Sequence) -> None:
        """Draw the sequence's next token from the latest row."""
        self.plan.samples.append(Sample(len(self.plan.rows) - 1, seq.slot, seq.known))
        self.samples.append((seq, seq.epoch))
        self.members[seq] = None
        seq.pending += 1
