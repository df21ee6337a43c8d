"""The model runner: one plan in, drawn tokens and log-probabilities out, on their way (`pending.py`).

Nothing here waits for the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from quire.generation.drafting.speculation import Branch, Expanded, Speculation
from quire.generation.grammar.grammar_store import GrammarStore, SlotGrammars
from quire.generation.sampling.logprobs import LogprobTensors, score
from quire.generation.sampling.sampler import Sampled, Sampler
from quire.generation.sampling.top_k import best
from quire.kernels.attention_backend import NO_TREE, Batch, Paths
from quire.kernels.hidden_state_tap import HiddenStateTap
from quire.model import CompiledModel, KVViews, Model, allocate_kv
from quire.runtime.capture import CapturedSteps, StepOutput
from quire.runtime.kv_deviation import probe
from quire.runtime.prefix_groups import SharedPrefixes
from quire.runtime.rope_shift import begin_rope_shifts
from quire.runtime.slot_state import SlotState
from quire.runtime.staging import Ints, Staging
from quire.runtime.step_result import Computed, PendingStep
from quire.types.kv import KVLayout
from quire.types.plan import Capacity, StepPlan
from quire.types.seams import Tree

DRAFT_ROWS = 512  # rows up to which steps with drafts are captured
SHORT_PROMPT = 512  # tokens: such rows are attended from pages, whatever else they are
SCORE_SLICE = 64  # rows of logits held at once for prompt log-probabilities


class ModelRunner:
    def __init__(
        self,
        model: Model | CompiledModel,
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
            draw=model.draw if isinstance(model, CompiledModel) else None,
        )
        self.speculate(speculation)
        self._grammars = SlotGrammars(grammars, vocab_size=model.spec.vocab_size, max_len=capacity.max_model_len)
        self._sketch = model.sketch() if isinstance(model, Model) else None
        self._sharing = None
        if isinstance(model, Model) and len(layout.groups) == 1 and layout.groups[0].window is None:
            (group,) = layout.groups
            if model.stages.backends[None].shares:
                share = model.spec.heads // group.kv_heads
                self._sharing = SharedPrefixes(capacity.slots, group.tokens_per_page, share)
        self._captured = CapturedSteps(
            self._last_logits,
            max_rows=max(capacity.slots, min(capacity.slots * (1 + capacity.drafts), DRAFT_ROWS)),
            max_kv=capacity.longest,
            max_tokens=capacity.max_batch_tokens,
            nobody=self._slots.nobody,
            device=device,
            sketches=[self._attention, partial(self._last_logits, brief=True)],
            sharing=self._sharing,
        )

    def speculate(self, speculation: Speculation | None) -> None:
        self._speculation = speculation
        sees = speculation.sees if speculation is not None else None
        self._tap = None if sees is None else HiddenStateTap(sees)

    def close(self) -> None:
        self._grammars.close()
        del self._captured  # they know each other: pages would wait for the garbage collector

    def read_pages(self, pages: list[int]) -> torch.Tensor:
        """Their bytes, in host memory."""
        return self.pages[torch.tensor(pages, device=self._device, dtype=torch.long)].cpu()

    def write_pages(self, pages: list[int], content: torch.Tensor | None) -> None:
        if pages and content is not None:
            self.pages[torch.tensor(pages, device=self._device)] = content.to(self._device)

    @torch.inference_mode()
    def capture(self) -> None:
        """Record the steps a GPU will replay."""
        self._nobodys([1])  # one kernel alone: what Triton looks up once, all threads of a start would look up at once
        self._captured.capture(beside=self._rehearsals(self._sketch or self.model))

    @torch.inference_mode()
    def rehearse(self) -> None:
        """All that is launched and not captured, in nobody's slot: before anybody waits for it, its kernels are made
        and it is known that memory suffices."""
        for rehearsal in self._rehearsals(self.model):
            rehearsal()

    def _rehearsals(self, model: Model | CompiledModel) -> list[Callable[[], None]]:
        """The largest step there may be, a short prompt, several of them, everybody's guesses; draws."""
        most, slots, guesses = self._capacity.max_batch_tokens, self._capacity.slots, self._capacity.drafts
        longest = min(most, self._capacity.longest)
        if self.model.spec.rope is None:
            longest = min(longest, self.model.spec.max_position)  # learned, and no more of them
        whole, rest = divmod(most, longest)
        prompts = ([longest] * whole + [rest] * (rest > 0))[:slots]
        short = min(longest, SHORT_PROMPT)
        steps = [prompts + [1] * (slots - len(prompts)), [short], [short] * min(most // short, slots, 8)]
        if guesses:
            steps.append([1] * min(most, slots * (1 + guesses)))
        return [*(partial(self._rehearse, model, counts) for counts in steps), self._sampler.rehearse]

    def _rehearse(self, model: Model | CompiledModel, counts: list[int]) -> None:
        """A step of rows with so many tokens."""
        input_ids, batch = self._nobodys(counts)
        model.logits(model.forward(input_ids, batch, self._kv, last=True))

    def _nobodys(self, counts: list[int]) -> tuple[torch.Tensor, Batch]:
        """Input ids and batch of rows with so many tokens."""
        spans = [(self._slots.nobody, 0, count, 0) for count in counts]
        table = torch.tensor(spans, device=self._device).T.contiguous()
        return self._slots.batch(table, sum(counts), counts, counts)

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> PendingStep:
        began = time.perf_counter()
        self._staging.rotate()
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
        end_rope_shifts = None
        if plan.rope_shifts:
            end_rope_shifts = begin_rope_shifts(plan, self._kv, self.model.inverse_frequencies)
        if plan.copies:
            pairs = self._staging.upload(np.array(plan.copies, dtype=np.int64).T)
            self.pages[pairs[1]] = self.pages[pairs[0]]  # reads all sources before it writes
        if end_rope_shifts is not None:
            end_rope_shifts()
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
        self, rows: torch.Tensor, tokens: int, counts: list[int], kv_lens: list[int], prefix: Any, brief: bool = False
    ) -> StepOutput:
        """What is captured: rows table in, logits of each row's last token and greedy draws out. `brief`: a sketch."""
        input_ids, batch = self._slots.batch(rows, tokens, counts, kv_lens, prefix)
        batch.exact = False
        model, tap = (self._sketch or self.model, None) if brief else (self.model, self._tap)
        hidden = model.forward(input_ids, batch, self._kv, last=True, tap=tap)
        logits = model.logits(hidden)
        chosen = best(logits)
        self._slots.store(rows[4], (rows[1] + rows[2]).clamp(max=self._slots.tokens.shape[1] - 1), chosen)
        return StepOutput(logits, chosen, tap.beside(hidden) if tap is not None else hidden)

    def _attention(self, rows: torch.Tensor, tokens: int, counts: list[int], kv_lens: list[int], prefix: Any) -> None:
        """Only the attention of such a step."""
        assert self._sketch is not None
        _, batch = self._slots.batch(rows, tokens, counts, kv_lens, prefix)
        batch.exact = False
        self._sketch.attention(batch, self._kv)

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
