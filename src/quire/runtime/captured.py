"""Steps captured once and replayed: fixed sizes, so that a GPU runs the whole forward pass from one launch.

A captured step is keyed by (tokens, rows). A real step takes the smallest that holds it and pads itself: spare
rows belong to nobody's slot, and the first of them takes all spare tokens. What varies between replays is only
the small integer table of rows, copied in before.

    rows table [4, rows]:   slot | start | count | slot that receives the drawn token (nobody's: draws nothing)

Everything is captured at start, never while serving.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from quire.runtime.staging import Ints, Staging

MIXED_TOKENS = (64, 128, 256, 512)  # steps with rows of several tokens are captured up to here


@dataclass
class StepOutput:
    logits: torch.Tensor  # [rows, vocabulary], of each row's last token
    best: torch.Tensor  # [rows], the greedy choice


Forward = Callable[[torch.Tensor, int, list[int], list[int]], StepOutput]  # rows table, tokens, counts, kv_lens


@dataclass
class _Capture:
    rows: torch.Tensor  # [4, rows] static input
    output: StepOutput
    replay: Callable[[], Any]


def row_buckets(most: int) -> list[int]:
    """1, 2, 4, 8, then by 8 to 64, by 16 to 256, by 64 beyond: at most a few per cent of padding."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, most + 1, 64)]
    return sorted({*(s for s in sizes if s < most), most})


class CapturedSteps:
    def __init__(self, forward: Forward, *, max_rows: int, max_kv: int, max_tokens: int, device: torch.device):
        self._forward = forward
        self._device = device
        self._max_kv = max_kv
        self._row_sizes = row_buckets(max_rows)
        self._token_sizes = [t for t in MIXED_TOKENS if t <= max_tokens]
        self._captures: dict[tuple[int, int], _Capture] = {}

    @property
    def ready(self) -> bool:
        return bool(self._captures)

    def capture(self) -> None:
        """Record all sizes, largest first, so that the smaller ones fit into memory already taken."""
        pool = torch.cuda.graph_pool_handle()
        for key in sorted(self.sizes(), reverse=True):
            self._captures[key] = self._record(*key, pool)
        torch.cuda.synchronize()

    def sizes(self) -> list[tuple[int, int]]:
        """(tokens, rows) of all captures; equal numbers mean that every row has one token."""
        single = [(rows, rows) for rows in self._row_sizes]
        mixed = [(t, r) for t in self._token_sizes for r in self._mixed_rows(t)]
        return single + mixed

    def _mixed_rows(self, tokens: int) -> list[int]:
        return sorted({min(r, self._row_sizes[-1] + 1) for r in (8, 32, 128, self._row_sizes[-1] + 1) if r < tokens})

    def fit(self, counts: list[int]) -> tuple[int, int] | None:
        """The capture a step of these rows goes into, if any."""
        rows, tokens = len(counts), sum(counts)
        if tokens == rows:
            at = bisect_left(self._row_sizes, rows)
            return (self._row_sizes[at],) * 2 if at < len(self._row_sizes) else None
        for size in self._token_sizes:
            if size >= tokens:
                for most in self._mixed_rows(size):
                    if most > rows or (most == rows and size == tokens):
                        return size, most
                return None
        return None

    def replay(self, size: tuple[int, int], table: Ints, nobody: int, staging: Staging) -> StepOutput:
        """Run the capture of `size` on a table [4, rows]; the output is overwritten by the next replay."""
        capture = self._captures[size]
        capture.rows.copy_(staging.stage(pad_table(table, size, nobody)), non_blocking=True)
        capture.replay()
        return capture.output

    def _record(self, tokens: int, rows: int, pool: Any) -> _Capture:
        counts, kv_lens = bounds(tokens, rows, self._max_kv)
        table = torch.from_numpy(pad_table(np.zeros((4, 0), np.int64), (tokens, rows), 0)).to(self._device)
        self._forward(table, tokens, counts, kv_lens)  # compiles kernels and sizes workspaces outside the capture
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            output = self._forward(table, tokens, counts, kv_lens)
        return _Capture(table, output, graph.replay)


def bounds(tokens: int, rows: int, max_kv: int) -> tuple[list[int], list[int]]:
    """Counts and KV lengths that hold for every step of this size (no row looks as if it had no context)."""
    counts = [1] * rows if tokens == rows else [tokens - rows + 1, *[1] * (rows - 1)]
    return counts, [max(max_kv, tokens + 1)] * rows


def pad_table(table: Ints, size: tuple[int, int], nobody: int) -> Ints:
    """A table of `size`: spare rows are nobody's, the first of them holds all spare tokens."""
    tokens, rows = size
    padded = np.zeros((4, rows), dtype=np.int64)
    used = table.shape[1]
    padded[:, :used] = table
    padded[0, used:] = padded[3, used:] = nobody
    spare = tokens - int(table[2].sum())
    if tokens == rows:
        padded[2, used:] = 1
    elif spare:
        padded[2, used] = spare
    return padded
