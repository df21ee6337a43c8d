"""The forward worker, what every parallel rank has: slots, KV pages, the forward pass, captured steps.

    plan, drafts laid out ──► slot state, page copies ──► forward, by a captured step where one fits ──► ForwardOutput

Nothing here waits for the device. Refuses to know: how tokens are sampled (`sampling_head.py`), grammars, drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from quire.generation.drafting.speculation import ExpandedPlan, TreeRow
from quire.generation.sampling.top_k import argmax_tokens
from quire.kernels.attention_backend import NO_TREE, Batch, LayerObserver, Paths
from quire.kernels.hidden_state_tap import HiddenStateTap
from quire.kernels.product_choices import CHUNKS
from quire.kernels.state_views import single_tokens
from quire.model import KVViews, Runnable, allocate_kv
from quire.model.blocks.class_head import ClassHeadBlock
from quire.model.ranks import Ranks
from quire.model.runnable import Sketch
from quire.runtime.attention_measures import measure_attention, measured_attention
from quire.runtime.capture import CapturedSteps, StepOutput
from quire.runtime.kv_deviation import probe, relative
from quire.runtime.prefix_groups import SharedPrefixes
from quire.runtime.recurrent_states import RecurrentStates
from quire.runtime.rope_shift import begin_rope_shifts
from quire.runtime.slot_state import SlotState
from quire.runtime.sparse_slots import SparseSlots
from quire.runtime.staging import Ints, Staging
from quire.types.kv import KVLayout
from quire.types.plan import Capacity, Probe, StepPlan

MAX_CAPTURED_DRAFT_ROWS = 512  # steps with drafts are captured up to here
SHORT_PROMPT_TOKENS = 512  # rows up to this are attended from pages, whatever else they are
GATHERED_BYTES = 256 << 20  # of pages that are read or written at once
SKETCHES = 3  # of a step that is timed: as many layers as queue up
PROMPT_LOGITS_ROWS = 64  # logits held at once for prompt log-probabilities


Draw = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Pair = tuple[int, int]


@dataclass(frozen=True)
class PromptLogits:
    """Logits of some positions of a row, and the known token after each."""

    row: int
    slot: int
    logits: torch.Tensor  # [m, vocab]
    next_tokens: torch.Tensor  # int64 [m]


@dataclass
class ForwardOutput:
    """What a forward pass left on the device."""

    logits: torch.Tensor | None = None  # [samples that were not drawn, vocab]; None: there are none
    drawn: torch.Tensor | None = None  # int64 [others]: sampled by the captured step and stored in their slots
    hidden: torch.Tensor | None = None  # [samples, hidden or more], for a proposer that reads hidden states
    prompt_logits: Iterable[PromptLogits] = ()  # computed as they are read
    pooled: dict[int, torch.Tensor] = field(default_factory=dict)  # by row: float32 [hidden]
    mass: dict[int, torch.Tensor] = field(default_factory=dict)  # by row: attention paid to each page
    deviations: torch.Tensor | None = None  # [tokens of all probes]
    padding: int = 0  # tokens computed only to fill a captured size
    attention_bytes: tuple[int, int] = (0, 0)  # that sparse attention read, and those of all pages


class ForwardWorker:
    def __init__(
        self,
        model: Runnable,
        layout: KVLayout,
        capacity: Capacity,
        device: torch.device,
        *,
        ranks: Ranks | None = None,
    ):
        """`ranks`: those that have the model's other heads."""
        self.model = model
        self._ranks = ranks
        self.capacity = capacity
        self.device = device
        more = RecurrentStates.pages_for(layout, capacity)
        self.pages = allocate_kv(layout, capacity.pages + more, device)  # bytes
        self._states = RecurrentStates(layout, capacity, self.pages) if layout.states else None  # of recurrent layers
        self.staging = Staging(device, capacity.depth)
        self.slots = SlotState(layout, capacity, device, self.staging)
        cells = None if self._states is None else self._states.cells
        self._kv = KVViews(self.pages[: capacity.pages], layout.own, cells)
        self.sparse = SparseSlots(model.spec, self._kv)
        self._tap: HiddenStateTap | None = None
        self._draw: Draw = lambda logits, slots, positions: argmax_tokens(logits)
        self.observer: LayerObserver | None = None  # of the step that is run; captured ones tell nothing
        self._warmup_model = model.sketch()  # few layers, all kernels
        self._sharing = None
        if heads_per_kv := model.prefix_heads(layout):
            self._sharing = SharedPrefixes(capacity.slots, layout.groups[0].tokens_per_page, heads_per_kv)
        self._unprepared = model.prepared_lengths(min(capacity.max_batch_tokens, capacity.longest))
        self._captured = self._captures(self._decode, self._sharing)
        decode = partial(self._decode, adapted=True)
        self._adapted_steps = self._captures(decode, None) if model.adapter_slots else None

    def _captures(self, decode: Callable[..., StepOutput], sharing: SharedPrefixes | None) -> CapturedSteps:
        capacity = self.capacity
        return CapturedSteps(
            decode,
            max_rows=max(capacity.slots, min(capacity.slots * (1 + capacity.drafts), MAX_CAPTURED_DRAFT_ROWS)),
            max_kv=capacity.longest,
            max_tokens=capacity.max_batch_tokens,
            null_slot=self.slots.null_slot,
            device=self.device,
            warmups=[self._attention, partial(decode, warmup=True)],
            sharing=sharing,
            waste_cell=None if self._states is None else self._states.waste,
        )

    @property
    def captures_ready(self) -> bool:
        return self._captured.ready

    @property
    def capture_pool(self) -> Any:
        """Of memory, for whoever works while no step does."""
        return self._captured.pool

    @property
    def captured_sizes(self) -> tuple[tuple[int, int], ...]:
        """(tokens, rows) that steps with rows of several tokens are padded to."""
        return tuple(self._captured.mixed_sizes) if self.captures_ready else ()

    @property
    def product_sizes(self) -> set[int]:
        """Numbers of rows in products of captured steps, and some of larger ones."""
        fixed = {size for pair in self._captured.sizes() for size in pair}
        return fixed | {size for size in CHUNKS if size <= self.capacity.max_batch_tokens}

    def tap_hidden_states(self, layers: tuple[int, ...] | None) -> None:
        """Forward passes return hidden states after these layers and the last; None: none at all. Steps captured
        before know nothing of it."""
        self._tap = None if layers is None else HiddenStateTap(layers)

    def draw_with(self, draw: Draw) -> None:
        """Captured steps draw with this: from logits of rows, for these slots, at these positions."""
        self._draw = draw

    def close(self) -> None:
        del self._captured, self._adapted_steps  # they know each other: pages would wait for the garbage collector

    def read_pages(self, pages: list[int]) -> torch.Tensor:
        """Their bytes, in host memory."""
        content = torch.empty(len(pages), *self.pages.shape[1:], dtype=self.pages.dtype)
        for part, at in self._parts(pages):
            content[part] = self.pages[at].cpu()
        return content

    def write_pages(self, pages: list[int], content: torch.Tensor | None) -> None:
        if pages and content is not None:
            for part, at in self._parts(pages):
                self.pages[at] = content[part].to(self.device)
            self.sparse.forget(pages)

    def _parts(self, pages: list[int]) -> Iterator[tuple[slice, torch.Tensor]]:
        """Some of them at a time, for what is gathered takes device memory beside the pages, which leave little."""
        most = max(1, GATHERED_BYTES // self.pages[:1].nbytes)
        for start in range(0, len(pages), most):
            part = slice(start, start + most)
            yield part, torch.tensor(pages[part], device=self.device, dtype=torch.long)

    # ---- before the first request ----------------------------------------------------------------------------

    @torch.inference_mode()
    def capture(self, *, beside: Sequence[Callable[[], None]] = (), whole: bool = True) -> None:
        """Record the steps a GPU will replay; if not `whole`, some of them with `prepare_next`. `beside`: what else to
        compile with their kernels."""
        self._null_batch([1])  # one kernel alone: what Triton looks up once, all threads would look up at once
        if self._states is not None:
            self._null_step(self._warmup_model or self.model, [2])  # torch loads its solvers once, not once a thread
        self._captured.capture(beside=[*self._warmups(self._warmup_model or self.model), *beside], whole=whole)
        if self.model.updated:
            self.capture_adapted()

    @torch.inference_mode()
    def prepare_next(self) -> bool:
        """Record one more of those steps or, after the last, have attention prepare for one more length of prompts;
        whether there is more to do."""
        adapted = self._adapted_steps
        if self._captured.capture_next() or (adapted is not None and adapted.ready and adapted.capture_next()):
            return True
        if self._unprepared and self._warmup_model is not None:
            self._warmup_model.attention(self._null_batch([self._unprepared.pop(0)])[1], self._kv)
        return bool(self._unprepared)

    @torch.inference_mode()
    def try_again(self, tokens: int) -> bool:
        """Whether a step of so many is faster by the kernels that are chosen now; else it stays as it was captured."""
        return self._captured.try_again(tokens)

    @torch.inference_mode()
    def sketch_step(self, tokens: int) -> None:
        """Some layers of a large step, in the null slot, until the device has done them."""
        whole, rest = divmod(tokens, min(tokens, self.capacity.longest))
        counts = [min(tokens, self.capacity.longest)] * whole + [rest] * (rest > 0)
        for _ in range(SKETCHES):
            self._null_step(self._warmup_model or self.model, counts)
        torch.cuda.synchronize(self.device)

    def record_again(self, sizes: set[int]) -> None:
        """Have `prepare_next` record steps of so many tokens or rows anew."""
        for steps in (self._captured, self._adapted_steps):
            if steps is not None:
                steps.renew(sizes)

    @torch.inference_mode()
    def capture_adapted(self) -> None:
        """Record the steps of rows with LoRA adapters, by the matrices that those loaded so far update; most of them
        with `prepare_next`."""
        assert self._adapted_steps is not None and self._captured.ready
        self._adapted_steps.capture(beside=[], within=self._captured, whole=False)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """All that is launched and not captured, in the null slot: before the first request its kernels are compiled
        and it is known that memory suffices."""
        for step in self._warmups(self.model):
            step()

    def _warmups(self, model: Runnable | Sketch) -> list[Callable[[], None]]:
        """The largest step there may be, a short prompt, several of them, a long one, drafts in every slot."""
        budget, slots, drafts = self.capacity.max_batch_tokens, self.capacity.slots, self.capacity.drafts
        longest = min(budget, self.capacity.longest)
        if self.model.spec.learned_positions:
            longest = min(longest, self.model.spec.max_position)  # learned, and no more of them
        whole, rest = divmod(budget, longest)
        prompts = ([longest] * whole + [rest] * (rest > 0))[:slots]
        short = min(longest, SHORT_PROMPT_TOKENS)
        steps = [prompts + [1] * (slots - len(prompts)), [short], [short] * min(budget // short, slots, 8)]
        if longest > 1:
            steps.append([longest - 1])  # attention pads rows of such lengths
        if drafts:
            steps.append([1] * min(budget, slots * (1 + drafts)))
        warm: list[Callable[[], None]] = [partial(self._null_step, model, counts) for counts in steps]
        if self._states is not None:  # others have captured steps for the rest of a prompt
            warm += [partial(self._null_step, model, [rest], longest - rest) for rest in (2, short) if rest < longest]
        return warm

    def _null_step(self, model: Runnable | Sketch, counts: list[int], context: int = 0) -> None:
        input_ids, batch = self._null_batch(counts, context)
        model.logits(model.forward(input_ids, batch, self._kv, last=True))

    def _null_batch(self, counts: list[int], context: int = 0) -> tuple[torch.Tensor, Batch]:
        """Input ids and batch of rows with so many tokens behind so many, all in the null slot."""
        spans = [(self.slots.null_slot, context, count, 0) for count in counts]
        table = torch.tensor(spans, device=self.device).T.contiguous()
        input_ids, batch = self.slots.batch(table, sum(counts), counts, [context + count for count in counts])
        if self._states is not None:
            batch.states = self._states.null_rounds(counts)
        return input_ids, batch

    # ---- a step ----------------------------------------------------------------------------------------------

    def forward(self, expanded: ExpandedPlan, *, draws: bool) -> ForwardOutput:
        """`draws`: a captured step may take all samples but late ones."""
        self.staging.rotate()
        plan = expanded.plan
        self._apply(plan)
        deviations = self._probe(plan.probes) if plan.probes else None
        output = self._forward(expanded, draws) if plan.rows else ForwardOutput()
        output.deviations = deviations
        return output

    def _probe(self, probes: list[Probe]) -> torch.Tensor:
        found = probe(probes, self.model, self._kv, self.slots, self.staging)
        if self._ranks is not None and not self._ranks.pipeline:
            found = self._ranks.reduce(found)
        return relative(found, probes)

    def _apply(self, plan: StepPlan) -> None:
        """Changes of slots and pages, before anything is computed."""
        self.slots.apply(plan)
        self.sparse.apply(plan)
        if self._sharing is not None:
            self._sharing.apply(plan)
        end_rope_shifts = None
        if plan.rope_shifts:
            end_rope_shifts = begin_rope_shifts(plan, self._kv, self.model.inverse_frequencies)
        if plan.copies:
            pairs = self.staging.upload(np.array(plan.copies, dtype=np.int64).T)
            self.pages[pairs[1]] = self.pages[pairs[0]]  # reads all sources before it writes
        if end_rope_shifts is not None:
            end_rope_shifts()

    def _forward(self, expanded: ExpandedPlan, draws: bool) -> ForwardOutput:
        """By a captured step, if one fits."""
        plan = expanded.plan
        counts = [row.count for row in plan.rows]
        # captured steps return neither all hidden states nor attention
        inspected = any(row.score or row.pool or row.mass or row.token_mass for row in plan.rows)
        eager = inspected or expanded.tree_rows or not self._captured.ready
        size = None if eager else self._captured.fit(counts)
        cells = None if self._states is None or size is None else self._states.single(plan.rows)
        adapted = self.model.adapter_slots > 0 and self.slots.adapted(row.slot for row in plan.rows)
        if size is not None and (self._states is None or cells is not None):
            return self._replay(expanded, size, draws, adapted, cells)
        return self._eager(expanded, counts, inspected, adapted)

    def _eager(self, expanded: ExpandedPlan, counts: list[int], inspected: bool, adapted: bool) -> ForwardOutput:
        """The step launched operation by operation."""
        plan = expanded.plan
        spans = [(r.slot, r.start, r.count, r.shift) for r in plan.rows]
        table = self.staging.upload(np.array(spans, dtype=np.int64).T)
        kv_lens = [row.start - row.shift + row.count for row in plan.rows]
        input_ids, batch = self.slots.batch(table, sum(counts), counts, kv_lens, adapted=adapted)
        if self._states is not None:
            batch.states = self._states.rounds(plan.rows)
        if expanded.tree_rows:
            batch = self._tree_batch(batch, expanded.tree_rows)
        measure_attention(batch, plan.rows)
        batch.sparse = self.sparse.sparse(plan, batch)
        batch.observer = self.observer
        tap = None if plan.rests else self._tap
        # [tokens or rows, hidden]
        hidden = self.model.forward(input_ids, batch, self._kv, last=not inspected, tap=tap)
        if batch.mass is not None and self._ranks is not None:
            batch.mass = self._ranks.reduce(batch.mass)
        output = ForwardOutput(attention_bytes=self.sparse.counted())
        if inspected:
            output.prompt_logits = self._prompt_logits(plan, hidden)
            output.pooled, hidden = _pool(plan, hidden, self.model.class_head), hidden[batch.ends]
        tapped = tap.beside(hidden) if tap is not None else None
        if plan.samples:
            rows = [s.row for s in plan.samples]
            hidden, tapped = self.pick(hidden, rows), self.pick(tapped, rows) if tapped is not None else None
            output.logits = self.model.logits(hidden)
        output.hidden = tapped
        output.mass = measured_attention(batch, plan.rows)
        return output

    def _tree_batch(self, batch: Batch, tree_rows: dict[int, TreeRow]) -> Batch:
        """Rows of draft trees at the positions their depths give them, each with the keys of its own branch."""
        table = np.zeros((3, batch.rows), dtype=np.int64)
        table[0] = NO_TREE
        kv_lens = list(batch.kv_lens)
        for row, tree_row in tree_rows.items():
            kv_lens[row] = tree_row.base + tree_row.depth + 1
            signed = tree_row.path - (tree_row.path >> 63 << 64)
            table[:, row] = tree_row.base, signed, batch.kv_lens[row] - kv_lens[row]
        sent, lifts = self.staging.upload(table), self.staging.upload(np.repeat(table[2], batch.counts))
        paths = Paths(sent[0].int(), sent[1].contiguous())
        return replace(
            batch, positions=batch.positions - lifts, kv_len=batch.kv_len - sent[2].int(), kv_lens=kv_lens, paths=paths
        )

    def store(self, slots: list[int], positions: list[int], token_ids: torch.Tensor) -> None:
        """Sampled tokens are stored in their slots, unread by the host."""
        where = self.staging.upload(np.array([slots, positions], dtype=np.int64))
        self.slots.store(where[0], where[1], token_ids)

    def keep_branch(self, slot: int, position: int, tokens: list[int], indices: list[int]) -> None:
        """Of a draft tree that began at `position`: these tokens were accepted, and K and V of all but the last are at
        these indices from there on. They move to where a chain would have left them."""
        at = torch.arange(position, position + len(tokens), device=self.device)
        self.slots.tokens[slot, at] = torch.tensor(tokens, dtype=torch.int32, device=self.device)
        moved = [(index, i) for i, index in enumerate(indices) if index != i]
        if moved:
            sides = (torch.tensor(side, device=self.device) + position for side in zip(*moved, strict=True))
            for group, (source, target) in enumerate(zip(*(self.slots.kv_slots(slot, s) for s in sides), strict=True)):
                self._kv.move(group, source, target)
                self.sparse.moved(group, target)

    def keep_state(self, slot: int, accepted: int) -> None:
        """Of the tokens drafted in a slot's last row, so many were accepted."""
        if self._states is not None:
            self._states.keep(slot, accepted)

    def _replay(
        self, expanded: ExpandedPlan, size: Pair, draws: bool, adapted: bool, cells: list[Pair] | None
    ) -> ForwardOutput:
        """The step as one launch of a captured one. `cells` that rows read and write."""
        plan, receivers = expanded.plan, [self.slots.null_slot] * len(expanded.plan.rows)
        drawn, late = expanded.split() if draws else ([], expanded.plan.samples)
        for sample in drawn:
            receivers[sample.row] = sample.slot
        table = np.array(
            [
                [r.slot, r.start, r.count, r.shift, to, *states]
                for r, to, states in zip(plan.rows, receivers, cells or [(0, 0)] * len(receivers), strict=True)
            ],
            dtype=np.int64,
        ).T
        if adapted and self._adapted_steps is not None:
            step = self._adapted_steps.replay(size, table, self.staging)
        else:
            step = self._shared_step(plan, size, table) or self._captured.replay(size, table, self.staging)
        computed = step.logits.shape[0] if size[0] == size[1] else size[0]
        output = ForwardOutput(padding=computed - plan.tokens)
        if drawn:
            output.drawn = self.pick(step.drawn, [s.row for s in drawn])
        if late:
            output.logits = self.pick(step.logits, [s.row for s in late])
        if plan.samples and self._tap is not None and not plan.rests:  # the next replay writes over it: indexing copies
            output.hidden = step.hidden[self.staging.upload(np.array([s.row for s in plan.samples], dtype=np.int64))]
        return output

    def pick(self, batch: torch.Tensor, rows: list[int]) -> torch.Tensor:
        """These rows of a batch; a copy, unless they are its first."""
        if rows == list(range(len(rows))):
            return batch[: len(rows)]
        return batch[self.staging.upload(np.array(rows, dtype=np.int64))]

    def _shared_step(self, plan: StepPlan, size: tuple[int, int], table: Ints) -> StepOutput | None:
        """The step by a captured one that reads shared prefixes once, if its rows share any."""
        rows = self._captured.prefix_rows(len(plan.rows)) if size[0] == size[1] else None
        if self._sharing is None or rows is None or any(row.drafts for row in plan.rows):
            return None  # with drafts the rows differ from step to step: finding groups anew costs more than it saves
        lists = self._sharing.lists(plan, rows)
        return None if lists is None else self._captured.replay_shared(rows, table, lists, self.staging)

    def _decode(
        self,
        rows: torch.Tensor,
        tokens: int,
        counts: list[int],
        kv_lens: list[int],
        prefix: Any,
        *,
        warmup: bool = False,
        adapted: bool = False,
    ) -> StepOutput:
        """What is captured: rows table in, logits of each row's last token and a token drawn for each out."""
        input_ids, batch = self.slots.batch(rows, tokens, counts, kv_lens, prefix, adapted=adapted)
        batch.exact = False
        if self._states is not None:
            batch.states = single_tokens(rows[5], rows[6])
        model, tap = (self._warmup_model or self.model, None) if warmup else (self.model, self._tap)
        hidden = model.forward(input_ids, batch, self._kv, last=True, tap=tap)
        logits = model.logits(hidden)
        positions = rows[1] + rows[2]
        drawn = self._draw(logits, rows[4], positions)
        self.slots.store(rows[4], positions.clamp(max=self.slots.tokens.shape[1] - 1), drawn)
        return StepOutput(logits, drawn, tap.beside(hidden) if tap is not None else hidden)

    def _attention(self, rows: torch.Tensor, tokens: int, counts: list[int], kv_lens: list[int], prefix: Any) -> None:
        """Only the attention of such a step."""
        assert self._warmup_model is not None
        _, batch = self.slots.batch(rows, tokens, counts, kv_lens, prefix)
        batch.exact = False
        self._warmup_model.attention(batch, self._kv)

    def _prompt_logits(self, plan: StepPlan, hidden: torch.Tensor) -> Iterator[PromptLogits]:
        """Of rows with `score`, some positions at a time. hidden [tokens, hidden]"""
        end = 0
        for i, row in enumerate(plan.rows):
            begin, end = end, end + row.count
            if not row.score:
                continue
            known = self.slots.tokens[row.slot, row.start + 1 : row.start + row.count + 1].long()
            for at in range(0, known.shape[0], PROMPT_LOGITS_ROWS):
                upto = min(at + PROMPT_LOGITS_ROWS, known.shape[0])
                yield PromptLogits(i, row.slot, self.model.logits(hidden[begin + at : begin + upto]), known[at:upto])


def _pool(plan: StepPlan, hidden: torch.Tensor, head: ClassHeadBlock | None) -> dict[int, torch.Tensor]:
    """Of rows with `pool`: their hidden states, summed, or the first or last of them, [tokens, hidden] → float32
    [hidden]; or what the classification head makes of them, [labels]."""
    pooled: dict[int, torch.Tensor] = {}
    begin = 0
    for i, row in enumerate(plan.rows):
        end = begin + row.count
        if row.pool == "classify":
            assert head is not None, "refused where requests are made"
            pooled[i] = head(hidden[begin:end])
        elif row.pool:
            states = hidden[begin:end].float()
            pooled[i] = states.sum(0) if row.pool == "mean" else states[0 if row.pool == "cls" else -1]
        begin = end
    return pooled
