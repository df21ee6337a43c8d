"""Chunks of a prompt (documents) reused at other places than they were computed for: the idea of CacheBlend.

    prompt     │ head │ chunk A │ chunk B │ chunk C │ question │
    cached     │ head │ chunk A │     │ head │ chunk D │ chunk B │     │ another head │ chunk D │ chunk C │

A chunk is computed twice at most: right after a head, for where it comes first, and behind a head and another chunk,
for where others come before it, whatever they are: what a chunk makes of its tokens there is much alike, and far from
what it makes of them where it comes first. Its pages are ordinary ones under their true names, which whoever has the
same prompt may share, and which eviction, tiers and pins treat like any others. A request then gets pages of its own
for the whole prompt and

    shifts   what is cached of chunks to its places, keys rotated by the distance;
    probes   the first layers of all these tokens, which shows how far their new neighbours change them;
    looks    rows for all that no chunk covers, which show how much attention the question pays to each token;
    rows     for the tokens that it pays most attention to, as many as the request's share and error ask for, and once
             more for all that no chunk covers.

From the first shifted token on, its pages are not what their names would say, and are never named.

Knows: sequences, pages, plans. Refuses to know: models, text, who runs when.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import numpy as np

from quire.memory.manager import Hit, KVManager, PageTable
from quire.memory.tiers import Directory
from quire.scheduling.feature import SchedulingFeature
from quire.scheduling.features.blend_selection import BlendedPrompt
from quire.scheduling.features.blend_sources import Source, Sources
from quire.scheduling.features.timeline_recorder import TimelineRecorder
from quire.scheduling.plan_builder import PlanBuilder
from quire.scheduling.prefill_budget import Budget
from quire.scheduling.sequence import Sequence
from quire.scheduling.sequence_table import SequenceTable
from quire.types.blend import Blend, check_chunks
from quire.types.errors import InputError
from quire.types.plan import Capacity, RopeShift, StepResult
from quire.types.request import FinishReason, Request, Status
from quire.types.sampling_params import SamplingParams


def check_blend(request: Request, blend: Blend, memory: KVManager, capacity: Capacity) -> None:
    """Refuse what cannot be blended, here or at all."""
    if not memory.prefix_cache:
        raise InputError("blend reuses cached chunks, and this engine's prefix cache is off", param="blend")
    if len(memory.layout.groups) > 1 or memory.layout.groups[0].window is not None:
        raise InputError("blend needs full attention in every layer; this model has sliding windows", param="blend")
    if memory.layout.states:
        problem = "blend moves cached keys to other positions; states of this model's recurrent layers cannot move"
        raise InputError(problem, param="blend")
    if memory.layout.ranks > 1:
        raise InputError("blend moves cached keys, which context-parallel ranks divide by position", param="blend")
    if not capacity.rope_shifts:
        problem = "blend moves cached keys to other positions; this model learned its positions one by one"
        raise InputError(problem, param="blend")
    if request.beam or request.pooling or request.params.prompt_logprobs is not None or request.params.kv_budget:
        problem = "blend goes with neither beam search nor embeddings nor prompt_logprobs nor kv_budget"
        raise InputError(problem, param="blend")
    check_chunks(blend.chunks, len(request.prompt))


@dataclass
class BlendChunk:
    """A chunk that may be reused: where it stands, and where its KV comes from."""

    start: int
    end: int
    source: Source
    apart: Sequence | None = None  # computes it for this request, or did

    @property
    def names(self) -> list[bytes]:
        return self.source.names

    @property
    def by(self) -> int:
        """How far it moves."""
        return self.start - len(self.source.before)


class BlendReuse(SchedulingFeature):
    def __init__(
        self,
        memory: KVManager,
        capacity: Capacity,
        directory: Directory,
        table: SequenceTable,
        timeline: TimelineRecorder,
    ):
        self._directory = directory
        self._sources = Sources(memory)
        self._table = table
        self._timeline = timeline
        self._memory = memory
        self._most = capacity.max_batch_tokens
        self._parts: dict[Sequence, list[BlendChunk]] = {}
        self._apart: dict[Sequence, None] = {}  # chunks being computed
        self._prompts: dict[Sequence, BlendedPrompt] = {}
        self._held: dict[Sequence, tuple[int, PageTable]] = {}  # pages that a step (its number) reads for a sequence

    def tables(self) -> list[PageTable]:
        return [table for _, table in self._held.values()]

    # ---- before it starts -----------------------------------------------------------------------------------

    def holds(self, seq: Sequence, builder: PlanBuilder) -> bool:
        """Whether chunks of a waiting sequence are being computed; looks, once, which have to be."""
        if seq.request.blend is None:
            return False
        if seq not in self._parts:
            self._parts[seq] = self._look(seq, seq.request.blend)
        parts = self._parts[seq]
        if any(part.apart and part.apart.status is not Status.FINISHED for part in parts):
            return True
        run, written = self._memory.cached, self._written(builder)  # rope shifts come before rows
        return any(page in written for part in parts for page in run(0, part.names))

    def _written(self, builder: PlanBuilder) -> set[int]:
        """Pages that rows of this very step fill."""
        size, rows = self._memory.layout.alignment, zip(builder.rows, builder.plan.rows, strict=True)
        return {
            page
            for (seq, _), row in rows
            for page in seq.table.pages[0][row.start // size : (row.start + row.count - 1) // size + 1]
        }

    def _look(self, seq: Sequence, blend: Blend) -> list[BlendChunk]:
        memory, request = self._memory, seq.request
        memory.hash_pages(seq.table, seq.tokens, request.salt)
        exact = memory.lookup(seq.table, seq.reusable).tokens
        if seq.cached < 0:  # what is computed for it now was not found
            seq.cached = exact
            self._timeline.stats.cached_tokens += exact
        parts: list[BlendChunk] = []
        for start, end in blend.chunks:
            if end > max(start, exact) and (part := self._part(request, blend, start, end, ordinary=not parts)):
                parts.append(part)
        return parts

    def _part(self, request: Request, blend: Blend, start: int, end: int, *, ordinary: bool) -> BlendChunk | None:
        """Where a chunk's KV is to come from: the device, else a tier, else it is computed behind the head, or the head
        and the first chunk. None: as it stands here it becomes an ordinary prefix, if all before it is one."""
        prompt, salt, (first, behind) = request.prompt, request.salt, blend.chunks[0]
        chunk, later = prompt[start:end], start > first
        known = [source for source in self._sources.of(salt, chunk) if source.later == later]
        here = [source for source in known if self._complete(self._memory.cached(0, source.names), source)]
        near = here or [source for source in known if self._complete(self._directory.run(0, source.names), source)]
        before = prompt[: behind if later else first]
        source = near[0] if near else self._sources.add(salt, before, chunk, later=later)
        if ordinary and source.before == prompt[:start]:
            return None
        part = BlendChunk(start, end, source)
        if not here:
            # With one token more, which must be computed, all pages may come from a tier.
            tokens = source.before + chunk
            whole = len(tokens) - len(tokens) % self._memory.layout.alignment
            part.apart = self._table.enter_apart(_alone(request, tokens[: whole + 1]))
            self._apart[part.apart] = None
        return part

    @staticmethod
    def _complete(pages: list[int], source: Source) -> bool:
        return len(pages) == len(source.names)

    def finished(self, seq: Sequence, reason: FinishReason | None) -> None:
        """What is being computed for it need not be any more."""
        self._apart.pop(seq, None)
        for part in self._parts.pop(seq, ()):
            if part.apart and part.apart.status is not Status.FINISHED:
                self._table.retire(part.apart)

    # ---- from its start to its first token ------------------------------------------------------------------

    def takes_over(self, builder: PlanBuilder, seq: Sequence, hit: Hit, count: int) -> bool:
        """A sequence has pages for all its tokens, of which those of the hit are there: shift what is cached of its
        chunks. False: nothing is, and it is computed like any other."""
        blend, exact = seq.request.blend, hit.tokens
        if blend is None:
            return False
        size, own, held, covered = self._memory.layout.alignment, seq.table.pages[0], PageTable(1), []
        for part in self._parts.get(seq, ()):
            pages, by = self._memory.cached(0, part.names), part.by + part.source.start
            first, last = max(part.start, exact), min(len(pages) * size + by, part.end, seq.known - 1)
            if first >= last:
                continue
            positions = range(first, last)
            sources = [pages[(p - by) // size] * size + (p - by) % size for p in positions]
            targets = [own[p // size] * size + p % size for p in positions]
            builder.plan.rope_shifts.append(RopeShift(0, sources, targets, part.by))
            held.pages[0] += pages[(first - by) // size :]
            covered.append((first, last))
        if not covered:
            return False
        self._memory.hold(held.pages[0])
        self._held[seq] = builder.plan.step, held
        seq.table.named_until = covered[0][0]
        prompt = self._prompts[seq] = BlendedPrompt.of(seq, blend, covered, exact)
        seq.computed = seq.known  # its rows are planned here, not with those of others
        moved = sum(last - first for first, last in covered)
        seq.log.blended = max(seq.log.blended, moved)
        self._timeline.stats.blended_tokens += moved
        if blend.recompute == 1 and prompt.runs is not None:
            self._count(seq, moved, 0.0)
        self._go_on(builder, prompt, Budget(max(1, count)))
        return True

    def contribute(self, builder: PlanBuilder) -> None:
        """Let all that are under way go on."""
        for seq, prompt in list(self._prompts.items()):
            if seq.status is Status.RUNNING:  # else its pages are about to go
                builder.budget = self._go_on(builder, prompt, builder.budget)

    def _go_on(self, builder: PlanBuilder, prompt: BlendedPrompt, budget: Budget) -> Budget:
        """Probe what is left of it and let the question look, or compute what was chosen, by position: what comes later
        depends on it. Returns what is left of the budget."""
        seq = prompt.seq
        if prompt.runs is None:
            room = max(1, self._most - sum(probe.count for probe in builder.plan.probes))
            count = min(prompt.end - prompt.probed, room)
            if count:
                builder.probe(seq, prompt.probed, count)
                prompt.probed += count
                prompt.awaited += 1
            return self._look_on(builder, prompt, budget) if prompt.probed == prompt.end else budget
        while prompt.runs and (room := budget.fit(prompt.runs[0][0])):
            start, end = prompt.runs[0]
            count = min(end - start, room)
            seq.computed = start
            self._table.add_row(builder, seq, count)
            prompt.runs[:1] = [(start + count, end)] if start + count < end else []
            budget = budget.less(start, count)
        if prompt.runs:
            seq.computed = seq.known
        else:
            del self._prompts[seq]
        return budget

    def _look_on(self, builder: PlanBuilder, prompt: BlendedPrompt, budget: Budget) -> Budget:
        """Compute what no chunk covers over chunks as they are, and have the question's rows report their attention."""
        seq = prompt.seq
        while prompt.looks and (room := budget.fit(prompt.looks[0][0])):
            start, end = prompt.looks[0]
            until = prompt.looking if start < prompt.looking < end else end
            count = min(until - start, room)
            seq.computed = start
            builder.row(seq, count)
            if start >= prompt.looking:
                builder.plan.rows[-1].token_mass = True
                prompt.awaited += 1
            prompt.looks[:1] = [(start + count, end)] if start + count < end else []
            budget = budget.less(start, count)
        seq.computed = seq.known
        return budget

    def step_landed(self, step: PlanBuilder, result: StepResult) -> None:
        """Take in what was found, let go of the pages that shifts read, and of chunks that are computed."""
        for at, (seq, epoch) in enumerate(step.probes):
            if (prompt := self._prompts.get(seq)) is not None and seq.epoch == epoch:
                prompt.awaited -= 1
                prompt.deviations[step.plan.probes[at].start] = result.deviations[at]
                self._chosen(prompt)
        for row, paid in result.mass.items():
            seq, epoch = step.rows[row]
            if (prompt := self._prompts.get(seq)) is not None and seq.epoch == epoch:
                prompt.awaited -= 1
                prompt.mass = np.zeros(seq.known) if prompt.mass is None else prompt.mass
                prompt.mass[: len(paid)] += paid
                self._chosen(prompt)
        if not (self._held or self._apart):
            return
        for seq in [seq for seq, (number, _) in self._held.items() if number <= step.plan.step]:
            self._let_go(seq)
        for seq in list(self._apart):
            if seq.status is Status.RUNNING and not seq.inflight and seq.computed == seq.known:
                self._table.retire(seq)

    def _chosen(self, prompt: BlendedPrompt) -> None:
        """All that was asked for is known: choose."""
        blend = prompt.seq.request.blend
        if prompt.looked and blend is not None:
            self._count(prompt.seq, *prompt.choose(blend))

    def _count(self, seq: Sequence, again: int, error: float | None) -> None:
        seq.log.blend_error = error
        seq.log.recomputed = max(seq.log.recomputed, again)  # it may have started anew
        self._timeline.stats.recomputed_tokens += again

    def released(self, seq: Sequence) -> None:
        """A sequence lost its pages; if it starts again, it is all to do again."""
        self._prompts.pop(seq, None)
        if seq.status is not Status.FINISHED:
            self._parts.pop(seq, None)
        self._let_go(seq)

    def _let_go(self, seq: Sequence) -> None:
        if seq in self._held:
            _, table = self._held.pop(seq)
            self._memory.let_go(table.pages[0])


def _alone(request: Request, tokens: list[int]) -> Request:
    """A chunk as a prompt of its own."""
    return Request(
        id=secrets.token_hex(12),
        prompt=tokens,
        params=SamplingParams(temperature=0.0, max_tokens=1),
        arrival=request.arrival,
        priority=request.priority,
        tenant=request.tenant,
        salt=request.salt,
        lora_slot=request.lora_slot,
    )
