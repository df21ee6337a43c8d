"""Chunks of a prompt (documents) reused at other places than they were computed for: the idea of CacheBlend.

    prompt     │ head │ chunk A │ chunk B │ chunk C │ question │
    cached     │ head │ chunk A │     │ head │ chunk B │     │ another head │ chunk C │

A chunk is computed once, right after a head, as a prompt of its own: ordinary pages under their true names, which
whoever has the same prompt may share, and which eviction, tiers and pins treat like any others. Behind the request's
own head it is nearest to the truth; where it is cached behind another only, that serves. A request then gets pages of
its own for the whole prompt and

    shifts   what is cached of chunks to its places, keys rotated by the distance;
    probes   the first layers of all these tokens, which shows whose KV their new neighbours change most;
    rows     for as many of them as the request's share and error ask for, and for all that no chunk covers, as usual.

From the first shifted token on, its pages are not what their names would say, and are never named.

Knows: sequences, pages, plans. Refuses to know: models, text, who runs when.
"""

from __future__ import annotations

import math
import secrets
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

from quire.memory.manager import Hit, KVManager, PageTable
from quire.memory.tiers import Directory
from quire.scheduling.feature import SchedulingFeature
from quire.scheduling.features.timeline_recorder import TimelineRecorder
from quire.scheduling.plan_builder import PlanBuilder
from quire.scheduling.prefill_budget import Budget
from quire.scheduling.sequence import Sequence
from quire.scheduling.sequence_table import SequenceTable
from quire.types.blend import MAX_CHUNKS, Blend
from quire.types.errors import InputError
from quire.types.plan import Capacity, RopeShift, StepResult
from quire.types.request import FinishReason, Request, Status
from quire.types.sampling_params import SamplingParams

Span = tuple[int, int]  # positions [start, end)
MAX_KNOWN_CHUNKS = 8192  # of which is remembered behind which heads they were computed
MAX_HEADS = 4  # of each


def check_blend(request: Request, blend: Blend, memory: KVManager, capacity: Capacity) -> None:
    """Refuse what cannot be blended, here or at all."""
    if not memory.prefix_cache:
        raise InputError("blend reuses cached chunks, and this engine's prefix cache is off", param="blend")
    if len(memory.layout.groups) > 1 or memory.layout.groups[0].window is not None:
        raise InputError("blend needs full attention in every layer; this model has sliding windows", param="blend")
    if memory.layout.states:
        problem = "blend moves cached keys to other positions; states of this model's recurrent layers cannot move"
        raise InputError(problem, param="blend")
    if not capacity.rope_shifts:
        problem = "blend moves cached keys to other positions; this model learned its positions one by one"
        raise InputError(problem, param="blend")
    if request.beam or request.pooling or request.params.prompt_logprobs is not None or request.params.kv_budget:
        problem = "blend goes with neither beam search nor embeddings nor prompt_logprobs nor kv_budget"
        raise InputError(problem, param="blend")
    bounds = [0, *(position for chunk in blend.chunks for position in chunk), len(request.prompt)]
    if len(blend.chunks) > MAX_CHUNKS or bounds != sorted(bounds):
        raise InputError(f"chunks must be at most {MAX_CHUNKS} and follow each other inside the prompt", param="blend")


@dataclass(frozen=True)
class Source:
    """A chunk behind a head, and the names of the pages that both fill."""

    head: list[int]
    names: list[bytes]


@dataclass
class Part:
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
        return self.start - len(self.source.head)


class Sources:
    """Behind which heads chunks were computed, those used last first."""

    def __init__(self, memory: KVManager):
        self._memory = memory
        self._known: OrderedDict[tuple[int, bytes], list[Source]] = OrderedDict()  # by length and name of the chunk

    def of(self, salt: str, head: list[int], chunk: list[int]) -> list[Source]:
        """Behind this head, then behind others."""
        padding = -len(chunk) % self._memory.layout.alignment
        key = len(chunk), self._names(salt, chunk + [0] * padding)[-1]
        known = self._known.pop(key, [])
        own = next((source for source in known if source.head == head), None)
        own = own or Source(head, self._names(salt, head + chunk))
        self._known[key] = [own, *(source for source in known if source is not own)][:MAX_HEADS]
        if len(self._known) > MAX_KNOWN_CHUNKS:
            self._known.popitem(last=False)
        return self._known[key]

    def _names(self, salt: str, tokens: list[int]) -> list[bytes]:
        """Of the pages that tokens fill."""
        table = PageTable(1)
        self._memory.hash_pages(table, tokens, salt)
        return table.hashes[0]


@dataclass
class ChunkedPrompt:
    """A request between its start and its first token."""

    seq: Sequence
    covered: list[Span]  # what was shifted
    exact: int  # where computing begins: all before it was found as it is
    probed: int  # positions before this are probed, or about to be
    end: int  # probed up to here
    awaited: int = 0  # probes in flight
    deviations: dict[int, list[float]] = field(default_factory=dict)  # by first position
    runs: list[Span] | None = None  # to compute; None: not known yet

    def choose(self, blend: Blend) -> tuple[int, float]:
        """What to compute: of the shifted tokens those that deviate most, and all others. Returns how many, and the
        error that is left: the deviation of those that are not, relative to the values of all."""
        changed = np.array([change for at in sorted(self.deviations) for change in self.deviations[at]])
        shifted = np.concatenate([np.arange(*span) for span in self.covered])
        chosen, error = np.zeros(0, np.int64), math.nan
        if len(changed):
            changed = changed[shifted - self.exact]
            order = np.argsort(-changed, kind="stable")
            left = np.sqrt((changed.sum() - np.cumsum(changed[order])).clip(0) / len(shifted))
            left = np.concatenate(([math.sqrt(changed.sum() / len(shifted))], left))
            count = min(math.ceil(blend.recompute * len(shifted)), int((left > blend.max_error).sum()))
            chosen, error = shifted[order[:count]], float(left[count])
        wanted = np.ones(self.seq.known - self.exact, bool)
        wanted[shifted - self.exact] = False
        wanted[chosen - self.exact] = True
        edges = np.flatnonzero(np.diff(np.concatenate(([False], wanted, [False])))) + self.exact
        self.runs = list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
        return len(chosen), error


class ChunkReuse(SchedulingFeature):
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
        self._parts: dict[Sequence, list[Part]] = {}
        self._apart: dict[Sequence, None] = {}  # chunks being computed
        self._prompts: dict[Sequence, ChunkedPrompt] = {}
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

    def _look(self, seq: Sequence, blend: Blend) -> list[Part]:
        memory, request = self._memory, seq.request
        memory.hash_pages(seq.table, seq.tokens, request.salt)
        exact = memory.lookup(seq.table, seq.reusable).tokens
        if seq.cached < 0:  # what is computed for it now was not found
            seq.cached = exact
            self._timeline.stats.cached_tokens += exact
        head = request.prompt[: blend.chunks[0][0]] if blend.chunks else []
        found = (self._part(request, head, start, end) for start, end in blend.chunks if end > max(start, exact))
        return [part for part in found if part is not None]

    def _part(self, request: Request, head: list[int], start: int, end: int) -> Part | None:
        """Where a chunk's KV is to come from: the device, else a tier, else it is computed behind this head; None: as
        it stands here it is, or becomes, an ordinary prefix."""
        chunk, size = request.prompt[start:end], self._memory.layout.alignment
        sources = self._sources.of(request.salt, head, chunk)
        here = [s for s in sources if len(self._memory.cached(0, s.names)) == len(s.names)]
        near = here or [s for s in sources if len(self._directory.run(0, s.names)) == len(s.names)] or sources
        if near[0] is sources[0] and start == len(head):
            return None
        part = Part(start, end, near[0])
        if not here:
            # With one token more, which must be computed, all pages may come from a tier.
            tokens = (part.source.head + chunk)[: len(part.names) * size + 1]
            part.apart = self._table.enter_apart(_alone(request, tokens))
            self._apart[part.apart] = None
        return part

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
            pages, by = self._memory.cached(0, part.names), part.by
            first, last = max(part.start, exact), min(len(pages) * size + by, part.end)
            if first >= last:
                continue
            positions = range(first, last)
            sources = [pages[(p - by) // size] * size + (p - by) % size for p in positions]
            targets = [own[p // size] * size + p % size for p in positions]
            builder.plan.rope_shifts.append(RopeShift(0, sources, targets, by))
            held.pages[0] += pages[(first - by) // size :]
            covered.append((first, last))
            if part.apart is None:
                seq.log.blended += last - first
        if not covered:
            return False
        self._memory.hold(held.pages[0])
        self._held[seq] = builder.plan.step, held
        seq.table.named_until = covered[0][0]
        prompt = self._prompts[seq] = ChunkedPrompt(seq, covered, exact, exact, covered[-1][1])
        seq.computed = seq.known  # its rows are planned here, not with those of others
        self._timeline.stats.blended_tokens += seq.log.blended
        if blend.recompute == 0:
            prompt.choose(blend)
        self._go_on(builder, prompt, Budget(max(1, count)))
        return True

    def contribute(self, builder: PlanBuilder) -> None:
        """Let all that are under way go on."""
        for seq, prompt in list(self._prompts.items()):
            if seq.status is Status.RUNNING:  # else its pages are about to go
                builder.budget = self._go_on(builder, prompt, builder.budget)

    def _go_on(self, builder: PlanBuilder, prompt: ChunkedPrompt, budget: Budget) -> Budget:
        """Probe what is left of it, or compute what was chosen, by position: what comes later depends on it. Returns
        what is left of the budget."""
        seq = prompt.seq
        if prompt.runs is None:
            room = max(1, self._most - sum(probe.count for probe in builder.plan.probes))
            count = min(prompt.end - prompt.probed, room)
            if count:
                builder.probe(seq, prompt.probed, count)
                prompt.probed += count
                prompt.awaited += 1
            return budget
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

    def step_landed(self, step: PlanBuilder, result: StepResult) -> None:
        """Take in what probes found, let go of the pages that shifts read, and of chunks that are computed."""
        for at, (seq, epoch) in enumerate(step.probes):
            prompt = self._prompts.get(seq)
            if prompt is None or seq.epoch != epoch:
                continue
            prompt.awaited -= 1
            prompt.deviations[step.plan.probes[at].start] = result.deviations[at]
            blend = seq.request.blend
            if blend is not None and not prompt.awaited and prompt.probed == prompt.end:
                again, seq.log.blend_error = prompt.choose(blend)
                seq.log.recomputed += again
                self._timeline.stats.recomputed_tokens += again
        for seq in [seq for seq, (number, _) in self._held.items() if number <= step.plan.step]:
            self._let_go(seq)
        for seq in list(self._apart):
            if seq.status is Status.RUNNING and not seq.inflight and seq.computed == seq.known:
                self._table.retire(seq)

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
