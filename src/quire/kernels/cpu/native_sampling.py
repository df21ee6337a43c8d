"""Sampling in compiled code: bias, minimum length, penalties, draws of any kind, log-probabilities; rows side by side.

`generation/sampling/` has the plain twins: `logit_processors.py`, `gumbel_draw.py`, `logprobs.py`. They draw the same
tokens from the same logits, except where rounding decides: two scores, or the mass at the border of top-p, within about
1e-6 of each other. Refuses to know: slots beyond the numbers kept for them, requests, grammars.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from quire.kernels.cpu import shared_object as lib
from quire.kernels.cpu.structs import Sampling

WORDS = 11  # of a slot's numbers; csrc/sampling.cpp says which
BIAS, STOPS, PENALTIES, SCORED = 1, 2, 4, 8  # what rows ask for besides a token

Ints = npt.NDArray[np.int64]


class SlotLists(NamedTuple):
    """What slots bring besides numbers; all contiguous."""

    bias_ids: torch.Tensor  # int64 [slots, b]
    bias_values: torch.Tensor  # float32 [slots, b]; zero: padding
    stop_ids: torch.Tensor  # int64 [slots, s]; negative: padding
    tokens: torch.Tensor  # int32 [slots, length]: histories


class NativeSampling:
    """Runs on a program's threads, between its steps."""

    def __init__(self, pool: int, threads: int, isa: str | None = None):
        self._library = lib.native()
        self._kernels, self._pool, self._threads = lib.kernels(isa), pool, threads
        self._counts = torch.empty(0, dtype=torch.int32)

    def sample(
        self,
        logits: torch.Tensor,  # float32 [rows, vocab]; left as they are
        numbers: torch.Tensor,  # int64 [slots, WORDS]: parameters, floats as their bits
        slots: Ints,
        positions: Ints,
        asked: Ints | None = None,  # sums of BIAS, STOPS, PENALTIES and SCORED; None: draws alone
        lists: SlotLists | None = None,  # if anything but draws and scores is asked for
        top: int = 0,  # how many of the likeliest tokens scores have
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 [rows], and scores: int32 [rows, 2 + 2 * top], of those that asked for them."""
        logits = _apart(logits)
        rows, vocab = logits.shape
        assert numbers.is_contiguous() and numbers.shape[1] == WORDS and slots.dtype == positions.dtype == np.int64
        drawn = torch.empty(rows, dtype=torch.int64)
        scores = torch.empty(rows, 2 + 2 * top, dtype=torch.int32)
        asked = np.zeros(rows, np.int64) if asked is None else asked
        args = Sampling(
            logits=logits.data_ptr(), stride=logits.stride(0), vocab=vocab, rows=rows, slots=slots.ctypes.data,
            positions=positions.ctypes.data, asked=asked.ctypes.data, numbers=numbers.data_ptr(), top=top,
            drawn=drawn.data_ptr(), scores=scores.data_ptr(),
        )  # fmt: skip
        if lists is not None:
            if self._counts.numel() < self._threads * vocab:
                self._counts = torch.zeros(self._threads * vocab, dtype=torch.int32)
            args.bias_ids, args.bias_values = lists.bias_ids.data_ptr(), lists.bias_values.data_ptr()
            args.biases, args.stop_ids = lists.bias_ids.shape[1], lists.stop_ids.data_ptr()
            args.stops, args.tokens = lists.stop_ids.shape[1], lists.tokens.data_ptr()
            args.token_stride, args.counts = lists.tokens.stride(0), self._counts.data_ptr()
        self._library.quire_sample(self._kernels, self._pool, ctypes.byref(args))
        return drawn, scores

    def score(self, logits: torch.Tensor, tokens: torch.Tensor, top: int) -> torch.Tensor:
        """Of given tokens: float32 [rows, vocab], int64 [rows] → int32 [rows, 2 + 2 * top]"""
        assert logits.stride(1) == 1 and logits.dtype == torch.float32
        tokens = tokens.contiguous()
        rows, vocab = logits.shape
        scores = torch.empty(rows, 2 + 2 * top, dtype=torch.int32)
        self._library.quire_score(
            self._kernels, self._pool, logits.data_ptr(), logits.stride(0), vocab, rows, tokens.data_ptr(), top,
            scores.data_ptr(),
        )  # fmt: skip
        return scores


def _apart(logits: torch.Tensor) -> torch.Tensor:
    """With a row of memory for each row: what adjusts one must not be seen by another."""
    assert logits.dtype == torch.float32
    alone = logits.stride(1) == 1 and (len(logits) <= 1 or logits.stride(0) >= logits.shape[1])
    return logits if alone else logits.contiguous()
