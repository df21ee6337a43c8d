"""The sampler: logits of many slots to one token each, hundreds of rows at once.

Which passes run is decided on the host from the slots' parameters at admission; values stay on the device and are
never waited for. Rows that draw in the same way are drawn together. History is read from the worker's tokens each
time and never kept, so forks, preemption and rolled-back drafts need no care here.

Refuses to know: the model, pages, requests, where a row's logits came from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from quire.generation.sampling import logit_processors as processors
from quire.generation.sampling.compiled_sampling import CompiledSampling
from quire.generation.sampling.gumbel_draw import draw_nucleus, draw_plain, draw_top_k
from quire.generation.sampling.logprobs import LogprobTensors, join, score_rows
from quire.generation.sampling.noise import row_keys
from quire.generation.sampling.slot_params import DRAWS, PROCESSORS, Ints, Need, SlotTable, to_device
from quire.generation.sampling.top_k import argmax_tokens
from quire.kernels.cpu import NativeSampling
from quire.kernels.triton import why_not
from quire.types.grammar import TokenMasks
from quire.types.plan import Admit

SLICE_ROWS = 256  # rows drawn at once: copies of their logits must fit beside everything else, however many there are
_GREEDY, _DRAWN = int(Need.GREEDY), int(DRAWS | Need.MIN_P)  # the latter: what compiled draws do by themselves


@dataclass(frozen=True)
class Sampled:
    token_ids: torch.Tensor  # int64 [n], on the device
    logprobs: LogprobTensors | None = None  # if any row wants them


@dataclass(frozen=True)
class Rows:
    """The rows of a batch that one pass concerns: m of n, on the device and as the host knows them."""

    sent: torch.Tensor  # int64 [3, m]: index into the batch, slot, position
    host_needs: Ints
    host_slots: Ints
    host_positions: Ints
    all_rows: bool  # m == n

    @property
    def index(self) -> torch.Tensor:
        return self.sent[0]

    @property
    def slots(self) -> torch.Tensor:
        return self.sent[1]

    @property
    def positions(self) -> torch.Tensor:
        return self.sent[2]

    def any(self, need: Need) -> bool:
        return bool((self.host_needs & int(need)).any())

    def of(self, batch: torch.Tensor) -> torch.Tensor:
        """[n, ...] → [m, ...]"""
        return batch if self.all_rows else batch.index_select(0, self.index)


class Sampler:
    def __init__(
        self,
        *,
        slots: int,
        vocab_size: int,
        device: torch.device,
        native: NativeSampling | None = None,
        graphs: bool = True,
    ):
        """`native`: compiled code in place of torch's; on a GPU Triton kernels are, captured if `graphs` may be."""
        self._vocab = vocab_size
        self._rooms: dict[str, torch.Tensor] = {}
        self._table = SlotTable(slots=slots, vocab_size=vocab_size, device=device)
        self._compiled = CompiledSampling(native, self._table, vocab_size) if native is not None else None
        self._kernels: KernelSampling | None = None
        if why_not(device) is None:
            from quire.generation.sampling.kernel_sampling import KernelSampling

            graphs = graphs and device.type == "cuda"
            self._kernels = KernelSampling(self._table, vocab_size, most=min(slots, SLICE_ROWS), graphs=graphs)

    def admit(self, admit: Admit) -> None:
        """Take a slot's parameters; they reach the device with the next `sample` or `captured`."""
        self._table.admit(admit)

    def captured(self, slots: list[int], positions: list[int]) -> bool:
        """Whether `draw` is all that these draws ask for; their slots' parameters are on the device then."""
        self._table.flush()
        needs = self._table.needs(np.array(slots, np.int64), np.array(positions, np.int64))
        return not int(np.bitwise_or.reduce(needs, initial=0)) & ~(_GREEDY if self._kernels is None else _DRAWN)

    def draw(self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """For a step that is captured: nothing here is known to the host. int64 [n], [n] → int64 [n]"""
        return argmax_tokens(logits) if self._kernels is None else self._kernels.draw(logits, slots, positions)

    def warm_up(self) -> None:
        """Launch each of the sampling kernels, so that they are compiled before the first request."""
        if self._kernels is not None:
            self._kernels.warm_up()

    def sample(
        self,
        logits: torch.Tensor,  # [n, vocab]; left as it is
        slots: list[int],
        positions: list[int],  # index in its slot of each token to draw: as many tokens are known before it
        tokens: torch.Tensor,  # int32 [slots, max_len]
        masks: Sequence[TokenMasks] = (),  # one for each of these slots that has a grammar, in their order
    ) -> Sampled:
        table = self._table
        table.flush()
        host_slots, host_positions = np.array(slots, np.int64), np.array(positions, np.int64)
        needs = table.needs(host_slots, host_positions)
        asked = int(np.bitwise_or.reduce(needs, initial=0))
        if not asked & ~_DRAWN and (drawn := self._draw_all(logits, host_slots, host_positions)) is not None:
            return Sampled(drawn)
        if self._compiled is not None and self._compiled.suits(asked):
            return Sampled(*self._compiled.sample(logits, needs, host_slots, host_positions, tokens))
        if Need(asked) in (Need.GREEDY, Need(0)):
            return Sampled(argmax_tokens(logits))  # the latter: no rows
        parts, masked = [], 0
        for first in range(0, max(len(slots), 1), SLICE_ROWS):
            rows = slice(first, first + SLICE_ROWS)
            before, masked = masked, masked + int(((needs[rows] & int(Need.GRAMMAR)) != 0).sum())
            part_masks = masks[before:masked]
            of_part = logits[rows], needs[rows], host_slots[rows], host_positions[rows], tokens, part_masks
            if self._kernels is not None and self._kernels.suits(asked):
                captured = len(slots) <= self._kernels.most
                parts.append(Sampled(*self._kernels.sample(*of_part, captured=captured)))
            else:
                parts.append(self._sample(*of_part))
        if len(parts) == 1:
            return parts[0]
        drawn = torch.cat([part.token_ids for part in parts])
        return Sampled(drawn, join([(part.logprobs, len(part.token_ids)) for part in parts]))

    def _sample(
        self,
        logits: torch.Tensor,
        needs: Ints,
        slots: Ints,
        positions: Ints,
        tokens: torch.Tensor,
        masks: Sequence[TokenMasks],
    ) -> Sampled:
        """Of one slice. [n, vocab]"""
        logits = logits.float()
        wanted = Need(int(np.bitwise_or.reduce(needs)))
        plain = self._kernels is None and self._compiled is None
        passed = wanted if plain else wanted & (PROCESSORS | Need.LOGPROBS)
        passes = self._passes(passed, needs, slots, positions) if passed else {}
        processed = self._process(logits, passes, tokens, masks) if wanted & PROCESSORS else logits
        drawn = self._draw_all(processed, slots, positions)
        if drawn is None:
            drawn = torch.empty(len(slots), dtype=torch.int64, device=logits.device)
            for need in DRAWS & wanted:
                rows = passes[need]
                drawn.index_copy_(0, rows.index, self._draw(need, rows, rows.of(processed)))
        if Need.LOGPROBS not in wanted:
            return Sampled(drawn)
        rows = passes[Need.LOGPROBS]
        tops = [None if top < 0 else top for top in self._table.logprobs[slots].tolist()]
        return Sampled(drawn, self._score(rows.of(logits), rows.of(drawn), tops))

    def score(self, logits: torch.Tensor, targets: torch.Tensor, top: int) -> LogprobTensors:
        """Log-probabilities of given tokens and of the `top` most likely. [m, vocab], int64 [m]"""
        return self._score(logits.float(), targets, [top] * len(targets))

    def _score(self, logits: torch.Tensor, targets: torch.Tensor, tops: list[int | None]) -> LogprobTensors:
        score = score_rows if self._compiled is None else self._compiled.score
        return score(logits, targets, tops)

    def _passes(self, wanted: Need, needs: Ints, slots: Ints, positions: Ints) -> dict[Need, Rows]:
        """The rows of every pass, sent to the device in one copy."""
        picked = [np.flatnonzero(needs & int(need)) for need in wanted]
        flat = np.concatenate(picked)
        sent = to_device(np.stack([flat, slots[flat], positions[flat]]), self._table.device)
        parts = sent.split([len(rows) for rows in picked], 1)
        return {
            need: Rows(part, needs[rows], slots[rows], positions[rows], len(rows) == len(slots))
            for need, rows, part in zip(wanted, picked, parts, strict=True)
        }

    def _process(
        self, logits: torch.Tensor, passes: dict[Need, Rows], tokens: torch.Tensor, masks: Sequence[TokenMasks]
    ) -> torch.Tensor:
        """A copy with allowed tokens, logit bias, bad words, minimum length, penalties and grammars applied, in this
        order."""
        table = self._table
        logits = self._room("processed", len(logits)).copy_(logits)
        if rows := passes.get(Need.ALLOWED):
            processors.apply_masks(logits, rows.index, to_device(table.allowed(rows.host_slots), table.device))
        if rows := passes.get(Need.BIAS):
            ids, values = table.bias_ids.read(rows.slots), table.bias_values.read(rows.slots)
            processors.add_bias(logits, rows.index, ids, values)
        if rows := passes.get(Need.BAD_WORDS):
            starts, ends = table.word_starts.read(rows.slots), table.word_ends.read(rows.slots)
            tails = processors.last_tokens(tokens, rows.slots, rows.positions, starts.shape[-1])
            processors.apply_bad_words(logits, rows.index, starts, ends, tails)
        if rows := passes.get(Need.MIN_TOKENS):
            processors.forbid(logits, rows.index, table.stop_ids.read(rows.slots))
        if rows := passes.get(Need.PENALTIES):
            known = tokens[:, : rows.host_positions.max()].index_select(0, rows.slots)
            params = table.params(rows.slots)
            counts = self._room("counts", len(known)) if rows.any(Need.COUNTS) else None
            processors.apply_penalties(logits, rows.index, params, known, rows.positions, counts=counts)
        if rows := passes.get(Need.GRAMMAR):
            processors.apply_masks(logits, rows.index, to_device(np.stack(masks), table.device))
        return logits

    def _room(self, name: str, rows: int) -> torch.Tensor:
        """Zeros at first: float32 [rows, vocab]. On a CPU it is kept, for memory that is new each time takes the system
        longer to hand out than what is done in it."""
        if self._table.device.type != "cpu":
            return torch.zeros(rows, self._vocab, device=self._table.device)
        kept = self._rooms.get(name)
        if kept is None or len(kept) < rows:
            kept = self._rooms[name] = torch.zeros(rows, self._vocab)
        return kept[:rows]

    def _draw_all(self, logits: torch.Tensor, slots: Ints, positions: Ints) -> torch.Tensor | None:
        """All draws by compiled code; None: torch draws."""
        compiled = self._kernels or self._compiled
        return compiled.draw_rows(logits, slots, positions) if compiled is not None else None

    def _draw(self, need: Need, rows: Rows, logits: torch.Tensor) -> torch.Tensor:
        """[m, vocab] → int64 [m]"""
        if need is Need.GREEDY:
            return argmax_tokens(logits)
        table = self._table
        params = table.params(rows.slots)
        keys = row_keys(params.stream.squeeze(-1), rows.positions)
        if need is Need.PLAIN:
            return draw_plain(logits, keys, params, min_p=rows.any(Need.MIN_P))
        if need is Need.TOP_P:
            return draw_nucleus(logits, keys, params, min_p=rows.any(Need.MIN_P))
        return draw_top_k(logits, keys, params, width=int(table.top_k[rows.host_slots].max()))
