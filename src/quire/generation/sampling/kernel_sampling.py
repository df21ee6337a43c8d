"""Sampling on a GPU by Triton kernels: draws, what is done to logits before, log-probabilities after.

Draws alone are part of captured steps. The rest follows a step, and is captured by itself, since with a few kernels it
takes the host longer to launch them than the device to run them:

    logits, rows, masks ─copied─► bias, minimum length, penalties ─► masks ─► draw ─► log-probabilities     one launch

Refuses to know: bad words and allowed tokens, which `sampler.py` does with torch; what a grammar is.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from quire.generation.sampling.logprobs import LogprobTensors
from quire.generation.sampling.slot_params import SAMPLED, Ints, Need, SlotTable, pinned, to_device
from quire.kernels.triton.adjust_kernels import BIAS, PENALTIES, STOPS, adjust, counting_memory, mask
from quire.kernels.triton.draw_kernels import draw
from quire.kernels.triton.logprob_kernels import logprobs
from quire.kernels.triton.sampling_kernels import argmax
from quire.types.grammar import TokenMasks

log = logging.getLogger(__name__)

ADJUSTED = {Need.BIAS: BIAS, Need.MIN_TOKENS: STOPS, Need.PENALTIES: PENALTIES}


NO_ROW = -1  # that a mask is for
SENDING = 3  # masks of so many launches may be on their way to the device


class _Kind(NamedTuple):
    rows: int
    dtype: torch.dtype
    adjusted: bool
    masked: bool
    width: int | None  # of the likeliest tokens wanted; None: no log-probabilities


class _Given(NamedTuple):
    """What one launch samples from."""

    logits: torch.Tensor  # [n, vocab]
    table: torch.Tensor  # int64 [5, n]: index, slot, position, adjustments; the row that the mask of this place is for
    masks: torch.Tensor | None  # uint8 [n or fewer, bytes]
    tokens: torch.Tensor  # of all slots


@dataclass
class _Capture:
    replay: Callable[[], Any]
    drawn: torch.Tensor
    scores: torch.Tensor | None  # as `logprobs` returns them


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _wider(top: int) -> int:
    """Few widths, so that few kinds are captured."""
    return next((width for width in (0, 5, 20) if top <= width), top)


class KernelSampling:
    def __init__(self, table: SlotTable, vocab_size: int, *, most: int, graphs: bool):
        """At most so many rows are captured, if `graphs` may be."""
        self.most = most
        self._table = table
        self._vocab = vocab_size
        self._counts: torch.Tensor | None = None  # where penalties count
        self._captures: dict[_Kind, _Capture] = {}
        self._lists_captured: list[tuple[int, torch.Size]] = []  # where they were then
        self._graphs = graphs
        self._logits: dict[torch.dtype, torch.Tensor] = {}  # [rows, vocab], copied into
        self._rows = torch.zeros(5 * _power_of_two(most), dtype=torch.int64, device=table.device)
        self._masks = torch.empty(0, -(-vocab_size // 8), dtype=torch.uint8, device=table.device)  # copied into
        self._sending: deque[tuple[torch.Tensor, torch.cuda.Event | None]] = deque()
        self._pool: Any = None

    def suits(self, needs: int) -> bool:
        return not needs & ~(SAMPLED | int(Need.GRAMMAR))

    def draw(self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Nothing of which is known to the host. [n, vocab], int64 [n], [n] → int64 [n]"""
        return draw(logits, self._table.numbers, slots, positions)

    def draw_rows(self, logits: torch.Tensor, slots: Ints, positions: Ints) -> torch.Tensor:
        sent = to_device(np.stack([slots, positions]), logits.device)
        return self.draw(logits, sent[0], sent[1])

    def sample(
        self,
        logits: torch.Tensor,
        needs: Ints,
        slots: Ints,
        positions: Ints,
        tokens: torch.Tensor,
        masks: Sequence[TokenMasks],  # one for each row that needs it, in their order
        *,
        captured: bool,
    ) -> tuple[torch.Tensor, LogprobTensors | None]:
        """Rows that this suits. `captured`: what is returned is read before the next call."""
        rows, device = len(needs), logits.device
        what = np.zeros(rows, np.int64)
        for need, bit in ADJUSTED.items():
            what += np.where(needs & int(need), bit, 0)
        masked = np.flatnonzero(needs & int(Need.GRAMMAR))
        scored = (needs & int(Need.LOGPROBS)) != 0
        tops = np.where(scored, self._table.logprobs[slots], -1)
        width = min(_wider(int(tops.max())), self._vocab) if scored.any() else None
        table = np.stack([np.arange(rows), slots, positions, what, np.full(rows, NO_ROW)])
        table[4, : len(masked)] = masked
        kind = _Kind(_power_of_two(rows), logits.dtype, bool(what.any()), bool(len(masked)), width)
        capture = self._capture_of(kind, tokens) if captured and self._graphs else None
        if capture is not None:
            drawn, scores = self._replay(capture, kind, logits, table, masks)
        else:
            sent = to_device(np.stack(masks), device) if kind.masked else None
            drawn, scores = self._launch(kind, _Given(logits, to_device(table, device), sent, tokens))
        if scores is None:
            return drawn, None
        wanted: Any = slice(None) if scored.all() else to_device(np.flatnonzero(scored), device)
        each = [top if top >= 0 else None for top in tops.tolist()]
        return drawn, LogprobTensors.of(drawn[wanted], scores[wanted], each)

    def _replay(
        self, capture: _Capture, kind: _Kind, logits: torch.Tensor, table: Ints, masks: Sequence[TokenMasks]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        rows, device = len(logits), logits.device
        padded = np.zeros((len(table), kind.rows), np.int64)
        padded[0], padded[1] = np.arange(kind.rows), len(self._table.numbers) - 1  # which is greedy
        padded[4] = NO_ROW
        padded[:, :rows] = table
        self._logits[kind.dtype][:rows].copy_(logits)
        self._table_of(kind).copy_(pinned(padded, device), non_blocking=True)
        if kind.masked:
            self._send_masks(masks)
        capture.replay()
        scores = capture.scores
        return capture.drawn[:rows], None if scores is None else scores[:rows]

    def _send_masks(self, masks: Sequence[TokenMasks]) -> None:
        """From memory that the device reads by itself, once it has read what was there before."""
        sending, sent = self._sending.popleft()
        if sent is not None:
            sent.synchronize()
        np.stack(masks, out=sending[: len(masks)].numpy())
        self._masks[: len(masks)].copy_(sending[: len(masks)], non_blocking=True)
        if self._masks.is_cuda:
            sent = torch.cuda.Event()
            sent.record()
        self._sending.append((sending, sent))

    def _table_of(self, kind: _Kind) -> torch.Tensor:
        return self._rows[: 5 * kind.rows].view(5, kind.rows)

    def _launch(self, kind: _Kind, given: _Given) -> tuple[torch.Tensor, torch.Tensor | None]:
        logits, table, masks, tokens = given
        numbers, adjustable = self._table.numbers, logits
        if kind.adjusted or kind.masked:
            adjustable = logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        if kind.adjusted:
            adjust(adjustable, table[:4], numbers, *self._lists, tokens, self._counting)
        if kind.masked:
            assert masks is not None
            mask(adjustable, table[4, : len(masks)], masks)
        drawn = draw(adjustable, numbers, table[1], table[2])
        return drawn, None if kind.width is None else logprobs(logits, drawn, kind.width)

    @property
    def _lists(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self._table.bias_ids.data, self._table.bias_values.data, self._table.stop_ids.data

    @property
    def _counting(self) -> torch.Tensor:
        if self._counts is None:
            self._counts = counting_memory(self._vocab, self._table.device)
        return self._counts

    def _capture_of(self, kind: _Kind, tokens: torch.Tensor) -> _Capture | None:
        """Recorded as it is first met, and again when lists have moved because one grew."""
        lists = [(tensor.data_ptr(), tensor.shape) for tensor in (*self._lists, tokens)]
        if lists != self._lists_captured:
            self._captures.clear()
            self._lists_captured, self._pool = lists, None
        if kind not in self._captures:
            try:
                self._captures[kind] = self._record(kind, tokens)
            except torch.OutOfMemoryError:
                log.warning("no device memory to capture sampling; its kernels are launched one by one")
                self._graphs = False
                self._captures.clear()
                self._logits.clear()
                self._masks = self._masks[:0].clone()
        return self._captures.get(kind)

    def _record(self, kind: _Kind, tokens: torch.Tensor) -> _Capture:
        given = self._memory_of(kind, tokens)
        self._launch(kind, given)  # memory that outlasts the launch is there then
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            drawn, scores = self._launch(kind, given)
        return _Capture(graph.replay, drawn, scores)

    def _memory_of(self, kind: _Kind, tokens: torch.Tensor) -> _Given:
        """Where a captured launch of this kind finds what it samples from."""
        most = _power_of_two(self.most)
        if kind.dtype not in self._logits:
            self._logits[kind.dtype] = torch.zeros(most, self._vocab, dtype=kind.dtype, device=self._table.device)
        if kind.masked and not len(self._masks):
            self._masks = self._masks.new_zeros(most, self._masks.shape[1])
            pin = self._masks.is_cuda
            self._sending = deque(
                (torch.empty(self._masks.shape, dtype=torch.uint8, pin_memory=pin), None) for _ in range(SENDING)
            )
        masks = self._masks[: kind.rows] if kind.masked else None
        return _Given(self._logits[kind.dtype][: kind.rows], self._table_of(kind).zero_(), masks, tokens)

    def warm_up(self) -> None:
        """Launch each of the kernels, so that they are compiled before the first request."""
        slot = torch.zeros(1, dtype=torch.int64, device=self._table.device)
        for dtype in (torch.float32, torch.bfloat16):
            logits = torch.zeros(1, self._vocab, dtype=dtype, device=slot.device)
            argmax(logits)
            self._launch(_Kind(1, dtype, False, False, 1), _Given(logits, slot.new_zeros(5, 1), None, slot))
        adjust(logits.float(), slot.new_zeros(4, 1), self._table.numbers, *self._lists, *[slot.int()[None]] * 2)
        mask(logits.float(), slot, slot.new_zeros(1, -(-self._vocab // 8), dtype=torch.uint8))
