"""Drawing tokens in compiled code: any mix of greedy, temperature, top-k, top-p and min-p rows in one call.

`generation/sampling/gumbel_draw.py` is its plain twin. Both draw the same tokens from the same logits, except where
rounding decides: two scores, or the mass at the border of top-p, within about 1e-6 of each other. Refuses to
know: slots beyond the numbers kept for them, requests, what was done to the logits before.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from quire.kernels.cpu import shared_object as lib

WORDS = 11  # of a slot's numbers; csrc/module.cpp says which


class CompiledDraw:
    """Runs on a program's threads, between its steps."""

    def __init__(self, pool: int, isa: str | None = None):
        self._library = lib.native()
        self._kernels, self._pool = lib.kernels(isa), pool

    def __call__(
        self,
        logits: torch.Tensor,  # float32 [rows, vocab], each row contiguous
        numbers: torch.Tensor,  # int64 [slots, WORDS]: parameters, floats as their bits
        slots: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        greedy: npt.NDArray[np.bool_],
    ) -> torch.Tensor:  # int64 [rows]
        assert logits.stride(1) == 1 and numbers.is_contiguous() and numbers.shape[1] == WORDS
        assert logits.dtype == torch.float32 and greedy.flags.c_contiguous
        rows, vocab = logits.shape
        drawn = torch.empty(rows, dtype=torch.int64)
        self._library.quire_draw(
            self._kernels, self._pool, logits.data_ptr(), logits.stride(0), vocab, rows, numbers.data_ptr(),
            slots.ctypes.data, positions.ctypes.data, greedy.ctypes.data, drawn.data_ptr(),
        )  # fmt: skip
        return drawn
