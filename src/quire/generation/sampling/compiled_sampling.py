"""Sampling on a CPU by compiled code: what is done to logits, draws and log-probabilities, each row in one go.

Refuses to know: bad words, allowed tokens and grammars, which `sampler.py` does with torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from quire.generation.sampling.logprobs import LogprobTensors
from quire.generation.sampling.slot_params import SAMPLED, Ints, Need, SlotTable
from quire.kernels.cpu import NativeSampling
from quire.kernels.cpu.native_sampling import BIAS, PENALTIES, SCORED, STOPS, SlotLists

_ASKED = {Need.BIAS: BIAS, Need.MIN_TOKENS: STOPS, Need.PENALTIES: PENALTIES, Need.LOGPROBS: SCORED}
_ADJUSTED = BIAS | STOPS | PENALTIES


class CompiledSampling:
    def __init__(self, native: NativeSampling, table: SlotTable, vocab_size: int):
        self._native = native
        self._table = table
        self._vocab = vocab_size

    def suits(self, needs: int) -> bool:
        return not needs & ~SAMPLED

    def draw_rows(self, logits: torch.Tensor, slots: Ints, positions: Ints) -> torch.Tensor:
        return self._native.sample(logits, self._table.numbers, slots, positions)[0]

    def sample(
        self, logits: torch.Tensor, needs: Ints, slots: Ints, positions: Ints, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, LogprobTensors | None]:
        """Rows that this suits."""
        asked = np.zeros(len(needs), np.int64)
        for need, bit in _ASKED.items():
            asked += np.where(needs & int(need), bit, 0)
        scored, adjusted = (asked & SCORED) != 0, bool((asked & _ADJUSTED).any())
        tops = [top if top >= 0 else None for top in np.where(scored, self._table.logprobs[slots], -1).tolist()]
        lists = None
        if adjusted:
            table = self._table
            lists = SlotLists(table.bias_ids.data, table.bias_values.data, table.stop_ids.data, tokens)
        width = self._width(tops)
        drawn, scores = self._native.sample(logits, self._table.numbers, slots, positions, asked, lists, width)
        if not scored.any():
            return drawn, None
        which = torch.from_numpy(np.flatnonzero(scored))
        return drawn, LogprobTensors.of(drawn[which], scores[which], tops)

    def score(self, logits: torch.Tensor, targets: torch.Tensor, tops: Sequence[int | None]) -> LogprobTensors:
        """As `logprobs.score_rows`."""
        return LogprobTensors.of(targets, self._native.score(logits, targets, self._width(tops)), tops)

    def _width(self, tops: Sequence[int | None]) -> int:
        return min(max((top for top in tops if top is not None), default=0), self._vocab)
