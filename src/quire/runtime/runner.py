"""The model runner: one plan in, drawn tokens and log-probabilities out.

Nothing here waits for the device; results are copied to the host in the background and read by the ticket.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from quire.generation.grammars import Accepted, GrammarStore, SlotGrammars
from quire.generation.logprobs import LogprobTensors, begin_copy, score
from quire.generation.order import best
from quire.generation.sampler import Sampled, Sampler
from quire.generation.speculation import Branch, Expanded, Speculation
from quire.kernels.attention import NO_TREE, Batch, Paths
from quire.kernels.tap import Tap
from quire.model import KVViews, Model, NativeModel, allocate_kv
from quire.runtime.captured import CapturedSteps, StepOutput
from quire.runtime.probing import probe
from quire.runtime.sharing import SharedPrefixes
from quire.runtime.slots import SlotState
from quire.runtime.staging import Ints, Staging
from quire.runtime.turning import begin_turns
from quire.types.kv import KVLayout
from quire.types.plan import Capacity, StepPlan, StepResult, TokenLogprobs
from quire.types.seams import Tree

DRAFT_ROWS = 512  # rows up to which steps with drafts are captured
SHORT_PROMPT = 512  # tokens: such rows are attended from pages, whatever else they are
SCORE_SLICE = 64  # rows of logits held at once for prompt log-probabilities


class ModelRunner:
    def __init__(
        self,
        model: Model | NativeModel,
        layout: KVLayout,
        capacity: Capacity,
        device: torch.device,
        grammars: GrammarStore,
        speculation: Speculation | None = None,
    ):
        self.model = model
        self._capacity = capacity
        self._device = device
        self.pages = allocate_kv(layout, capacity.pages, device)  # bytes
        self._kv = KVViews(self.pages, layout)
        self._staging = Staging(device, capacity.depth)
        self._slots = SlotState(layout, capacity, device, self._staging)
        self._tops = [0] * capacity.slots  # how many alternatives each slot's prompt log-probabilities list
        self._sampler = Sampler(
            slots=capacity.slots,
            vocab_size=model.spec.vocab_size,
            device=device,
            draw=model.draw if isinstance(model, NativeModel) else None,
        )
        self.speculate(speculation)
        self._grammars = SlotGrammars(grammars, vocab_size=model.spec.vocab_size, max_len=capacity.max_model_len)
        (group,) = layout.groups if len(layout.groups) == 1 else (None,)
        self._sharing = None
        invariant = isinstance(model, Model) and model.stages.invariant  # attending together sums in another order
        if device.type == "cuda" and group is not None and group.window is None and not invariant:
            self._sharing = SharedPrefixes(capacity.slots, group.tokens_per_page, model.spec.heads // group.kv_heads)
        self._captured = CapturedSteps(
            self._last_logits,
            max_rows=max(capacity.slots, min(capacity.slots * (1 + capacity.drafts), DRAFT_ROWS)),
            max_kv=capacity.longest,
            max_tokens=capacity.max_batch_tokens,
            nobody=self._slots.nobody,
            device=device,
            sharing=self._sharing,
        )

    def speculate(self, speculation: Speculation | None) -> None:
        self._speculation = speculation
        sees = speculation.sees if speculation is not None else None
        self._tap = None if sees is None else Tap(sees)

    def close(self) -> None:
        self._grammars.close()
        del self._captured  # they know each other: pages would wait for the garbage collector

    def read_pages(self, pages: list[int]) -> torch.Tensor:
        """Their bytes, in host memory."""
        return self.pages[torch.tensor(pages, device=self._device)].cpu()

    def write_pages(self, pages: list[int], content: torch.Tensor | None) -> None:
        if pages and content is not None:
            self.pages[torch.tensor(pages, device=self._device)] = content.to(self._device)

    @torch.inference_mode()
    def capture(self) -> None:
        """Record the steps a GPU will replay."""
        self._captured.capture(largest=self.rehearse, alone=self._tap is not None)

    @torch.inference_mode()
    def rehearse(self) -> None:
        """Steps of all kinds that are not captured, in nobody's slot: before anybody waits for one, their kernels are
        made, and it is known that memory suffices."""
        for counts in self._rehearsals():
            spans = [(self._slots.nobody, 0, count, 0) for count in counts]
            table = torch.tensor(spans, device=self._device).T.contiguous()
            input_ids, batch = self._slots.batch(table, sum(counts), counts, counts)
            self.model.logits(self.model.forward(input_ids, batch, self._kv, last=True))
        self._sampler.rehearse()

    def _rehearsals(self) -> list[list[int]]:
        """Tokens of each row: the largest step there may be, then a short prompt, then several."""
        most, slots = self._capacity.max_batch_tokens, self._capacity.slots
        longest = min(most, self._capacity.longest)
        full = min(most // longest, slots)
        short = min(longest, SHORT_PROMPT)
        return [[longest] * full + [1] * (slots - full), [short], [short] * min(most // short, slots, 8)]

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> PendingStep:
        began = time.perf_counter()
        self._staging.turn()
        asked = Expanded(plan, [[]] * len(plan.samples))
        if self._speculation is not None:
            asked = self._speculation.expand(plan)
        plan = asked.plan
        for admit in plan.admits:
            self._sampler.admit(admit)
            self._tops[admit.slot] = admit.params.prompt_logprobs or 0
        self._grammars.apply(plan.frees, plan.admits)
        self._grammars.begin([(s.slot, draft) for s, draft, _ in asked.samples() if not isinstance(draft, Tree)])
        self._slots.apply(plan)
        if self._sharing is not None:
            self._sharing.apply(plan)
        end_turns = begin_turns(plan, self._kv, self.model.inverse_frequencies) if plan.turns else None
        if plan.copies:
            pairs = self._staging.upload(np.array(plan.copies, dtype=np.int64).T)
            self.pages[pairs[1]] = self.pages[pairs[0]]  # reads all sources before it writes
        if end_turns is not None:
            end_turns()
        probed = probe(plan.probes, self.model, self._kv, self._slots, self._staging) if plan.probes else None
        computed = self._forward(asked) if plan.rows else Computed(None)
        computed.probed = probed
        return PendingStep(asked, computed, began, self._device, self._grammars, self._speculation, self._keep)

    def _forward(self, asked: Expanded) -> Computed:
        """By a capture, if one fits."""
        plan = asked.plan
        counts = [row.count for row in plan.rows]
        # captures do not show hidden states or attention
        looked_at = any(row.score or row.pool or row.mass for row in plan.rows)
        size = None if looked_at or asked.branches or not self._captured.ready else self._captured.fit(counts)
        return self._replay(plan, size) if size is not None else self._compute(asked, counts, looked_at)

    def _compute(self, asked: Expanded, counts: list[int], looked_at: bool) -> Computed:
        """The step as it is, operation by operation."""
        plan = asked.plan
        spans = [(r.slot, r.start, r.count, r.shift) for r in plan.rows]
        table = self._staging.upload(np.array(spans, dtype=np.int64).T)
        kv_lens = [row.start - row.shift + row.count for row in plan.rows]
        input_ids, batch = self._slots.batch(table, sum(counts), counts, kv_lens)
        if asked.branches:
            batch = self._branched(batch, asked.branches)
        batch.asks = [i for i, row in enumerate(plan.rows) if row.mass]
        if batch.asks:
            batch.mass = torch.zeros(batch.rows, batch.groups[0].page_table.shape[1], device=self._device)
        tap = None if plan.rests else self._tap
        # [tokens or rows, hidden]
        hidden = self.model.forward(input_ids, batch, self._kv, last=not looked_at, tap=tap)
        scores: dict[int, list[LogprobTensors]] = {}
        pooled: dict[int, torch.Tensor] = {}
        if looked_at:
            scores, pooled, hidden = self._score(plan, hidden), _pool(plan, hidden), hidden[batch.ends]
        shown = tap.beside(hidden) if tap is not None else None
        sampled = None
        if plan.samples:
            rows = [s.row for s in plan.samples]
            if rows != list(range(len(hidden))):
                where = self._staging.upload(np.array(rows, dtype=np.int64))
                hidden, shown = hidden[where], shown[where] if shown is not None else None
            sampled = self._sample(plan, self.model.logits(hidden))
        size = batch.groups[0].tokens_per_page
        mass = {i: batch.mass[i, : -(-kv_lens[i] // size)] for i in batch.asks if batch.mass is not None}
        return Computed(sampled, scores, pooled, mass, shown=shown)

    def _branched(self, batch: Batch, branches: dict[int, Branch]) -> Batch:
        """Rows of trees at the positions their depths give them, each with the keys of its own branch."""
        table = np.zeros((3, batch.rows), dtype=np.int64)
        table[0] = NO_TREE
        kv_lens = list(batch.kv_lens)
        for row, branch in branches.items():
            kv_lens[row] = branch.base + branch.depth + 1
            signed = branch.path - (branch.path >> 63 << 64)
            table[:, row] = branch.base, signed, batch.kv_lens[row] - kv_lens[row]
        sent, lifts = self._staging.upload(table), self._staging.upload(np.repeat(table[2], batch.counts))
        paths = Paths(sent[0].int(), sent[1].contiguous())
        return replace(
            batch, positions=batch.positions - lifts, kv_len=batch.kv_len - sent[2].int(), kv_lens=kv_lens, paths=paths
        )

    def _keep(self, slot: int, position: int, tokens: list[int], places: list[int]) -> None:
        """Of a tree of guesses that began at `position`: these tokens, whose K and V (but the last one's) are at these
        places from there on. They move to where a chain would have left them."""
        at = torch.arange(position, position + len(tokens), device=self._device)
        self._slots.tokens[slot, at] = torch.tensor(tokens, dtype=torch.int32, device=self._device)
        moved = [(place, i) for i, place in enumerate(places) if place != i]
        if moved:
            sides = (torch.tensor(side, device=self._device) + position for side in zip(*moved, strict=True))
            for group, (there, here) in enumerate(zip(*(self._slots.kv_slots(slot, s) for s in sides), strict=True)):
                self._kv.move(group, there, here)

    def _replay(self, plan: StepPlan, size: tuple[int, int]) -> Computed:
        """The step as one launch of a capture. Greedy draws are part of it; others follow."""
        greedy = self._sampler.all_greedy([s.slot for s in plan.samples])
        alone = len({s.row for s in plan.samples}) == len(plan.samples)
        target = [self._slots.nobody] * len(plan.rows)
        if greedy and alone:
            for sample in plan.samples:
                target[sample.row] = sample.slot
        table = np.array(
            [[r.slot, r.start, r.count, r.shift, t] for r, t in zip(plan.rows, target, strict=True)], dtype=np.int64
        ).T
        output = self._shared_step(plan, size, table) or self._captured.replay(size, table, self._staging)
        sampled = None
        if plan.samples:
            rows = [s.row for s in plan.samples]
            if not (greedy and alone):
                sampled = self._sample(plan, output.logits[self._staging.upload(np.array(rows, dtype=np.int64))])
            elif rows == list(range(len(rows))):
                sampled = Sampled(output.best[: len(rows)])
            else:
                sampled = Sampled(output.best[self._staging.upload(np.array(rows, dtype=np.int64))])
        computed = output.logits.shape[0] if size[0] == size[1] else size[0]
        shown = None
        if plan.samples and self._tap is not None and not plan.rests:  # the next replay writes over it: indexing copies
            shown = output.shown[self._staging.upload(np.array(rows, dtype=np.int64))]
        return Computed(sampled, padding=computed - plan.tokens, shown=shown)

    def _shared_step(self, plan: StepPlan, size: tuple[int, int], table: Ints) -> StepOutput | None:
        """The step by a capture that reads shared prefixes once, if its rows share any."""
        rows = self._captured.prefix_rows(len(plan.rows)) if size[0] == size[1] else None
        if self._sharing is None or rows is None or any(row.drafts for row in plan.rows):
            return None  # with drafts the rows differ from step to step: finding groups anew costs more than it saves
        lists = self._sharing.lists(plan, rows)
        return None if lists is None else self._captured.replay_shared(rows, table, lists, self._staging)

    def _last_logits(
        self, rows: torch.Tensor, tokens: int, counts: list[int], kv_lens: list[int], prefix: Any
    ) -> StepOutput:
        """What is captured: rows table in, logits of each row's last token and greedy draws out."""
        input_ids, batch = self._slots.batch(rows, tokens, counts, kv_lens, prefix)
        batch.exact = False
        hidden = self.model.forward(input_ids, batch, self._kv, last=True, tap=self._tap)
        logits = self.model.logits(hidden)
        chosen = best(logits)
        self._slots.store(rows[4], (rows[1] + rows[2]).clamp(max=self._slots.tokens.shape[1] - 1), chosen)
        return StepOutput(logits, chosen, self._tap.beside(hidden) if self._tap is not None else hidden)

    def _sample(self, plan: StepPlan, logits: torch.Tensor) -> Sampled:
        slots, positions = [s.slot for s in plan.samples], [s.position for s in plan.samples]
        sampled = self._sampler.sample(logits, slots, positions, self._slots.tokens, self._grammars.masks())
        where = self._staging.upload(np.array([slots, positions], dtype=np.int64))
        self._slots.store(where[0], where[1], sampled.token_ids)
        return sampled

    def _score(self, plan: StepPlan, hidden: torch.Tensor) -> dict[int, list[LogprobTensors]]:
        """Log-probability of the known token after each position of rows that ask for it."""
        found: dict[int, list[LogprobTensors]] = {}
        end = 0
        for i, row in enumerate(plan.rows):
            begin, end = end, end + row.count
            if not row.score:
                continue
            following = self._slots.tokens[row.slot, row.start + 1 : row.start + row.count + 1].long()
            count = following.shape[0]
            found[i] = [
                score(
                    self.model.logits(hidden[begin + a : begin + min(a + SCORE_SLICE, count)]).float(),
                    following[a : a + SCORE_SLICE],
                    self._tops[row.slot],
                )
                for a in range(0, count, SCORE_SLICE)
            ]
        return found


def _pool(plan: StepPlan, hidden: torch.Tensor) -> dict[int, torch.Tensor]:
    """Of rows that ask for it: their hidden states, summed, or the last of them. [tokens, hidden] → float32 [hidden]"""
    pooled: dict[int, torch.Tensor] = {}
    end = 0
    for i, row in enumerate(plan.rows):
        begin, end = end, end + row.count
        if row.pool:
            pooled[i] = hidden[begin:end].float().sum(0) if row.pool == "mean" else hidden[end - 1].float()
    return pooled


@dataclass
class Computed:
    """What a step came to, on the device."""

    sampled: Sampled | None
    scores: dict[int, list[LogprobTensors]] = field(default_factory=dict)
    pooled: dict[int, torch.Tensor] = field(default_factory=dict)
    mass: dict[int, torch.Tensor] = field(default_factory=dict)  # by row: attention paid to each page
    padding: int = 0
    shown: torch.Tensor | None = None  # [samples, hidden or more], what was drawn from; if somebody wants to know
    probed: torch.Tensor | None = None  # [tokens of all probes]


class PendingStep:
    """A step whose results are on their way to the host; `result` waits for them."""

    def __init__(
        self,
        asked: Expanded,
        computed: Computed,
        began: float,
        device: torch.device,
        grammars: SlotGrammars,
        speculation: Speculation | None,
        keep: Callable[[int, int, list[int], list[int]], None],
    ):
        self._asked = asked
        self._keep = keep
        self._counted: list[list[int]] = []  # by sample: its draws that count
        self._grammars = grammars
        self._speculation = speculation
        self._padding = computed.padding
        self._shown = computed.shown
        self._began = began
        sampled = computed.sampled
        self._tokens = begin_copy(sampled.token_ids) if sampled is not None else None
        logprobs = sampled.logprobs if sampled is not None else None
        self._logprobs = logprobs.start_copy() if logprobs is not None else None
        self._scores = {row: [part.start_copy() for part in parts] for row, parts in computed.scores.items()}
        self._pooled = {row: begin_copy(vector) for row, vector in computed.pooled.items()}
        self._mass = {row: begin_copy(paid) for row, paid in computed.mass.items()}
        self._probed = begin_copy(computed.probed) if computed.probed is not None else None
        self._event = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()
            self._event.record()

    def result(self) -> StepResult:
        if self._event is not None:
            self._event.synchronize()
        accepted = self._accept(self._tokens.tolist()) if self._tokens is not None else []
        return StepResult(
            step=self._asked.plan.step,
            tokens=[a.tokens for a in accepted],
            drafts={
                i: (draws - 1, a.drawn - 1)
                for i, ((_, _, draws), a) in enumerate(zip(self._asked.samples(), accepted, strict=True))
                if draws > 1
            },
            ended=[i for i, a in enumerate(accepted) if a.done],
            errors={i: a.error for i, a in enumerate(accepted) if a.error},
            logprobs=self._drawn_logprobs(self._logprobs.to_host()) if self._logprobs is not None else {},
            scores={
                row: [entry for part in parts for entry in part.to_host() if entry is not None]
                for row, parts in self._scores.items()
            },
            pooled={row: vector.tolist() for row, vector in self._pooled.items()},
            mass={row: paid.tolist() for row, paid in self._mass.items()},
            deviations=self._deviations(),
            seconds=time.perf_counter() - self._began,
            padding=self._padding,
        )

    def _deviations(self) -> list[list[float]]:
        """By probe."""
        if self._probed is None:
            return []
        return [part.tolist() for part in self._probed.split([p.count for p in self._asked.plan.probes])]

    def _accept(self, drawn: list[int]) -> list[Accepted]:
        """What the draws of each sample come to: those that its draft led to, as its grammar allows."""
        found, end = [], 0
        for sample, draft, draws in self._asked.samples():
            begin, end = end, end + draws
            tokens, which = drawn[begin:end], [0]
            if draft:
                assert self._speculation is not None
                tokens, which = self._speculation.settled(draft, tokens)
                if isinstance(draft, Tree):
                    self._keep(sample.slot, sample.position, tokens, [i - 1 for i in which[1:]])
            accepted = self._grammars.accept(sample.slot, sample.position, tokens)
            which = [begin + i for i in which[: accepted.drawn]]
            if self._speculation is not None:
                seen = None
                if self._shown is not None:
                    seen = self._shown[which if isinstance(draft, Tree) else slice(begin, begin + accepted.drawn)]
                self._speculation.observe(sample.slot, sample.position, accepted.tokens, seen)
            self._counted.append(which)
            found.append(accepted)
        return found

    def _drawn_logprobs(self, entries: list[TokenLogprobs | None]) -> dict[int, list[TokenLogprobs]]:
        """By sample, of the draws that count."""
        found = {}
        for i, which in enumerate(self._counted):
            if some := [entry for j in which if (entry := entries[j]) is not None]:
                found[i] = some
        return found
