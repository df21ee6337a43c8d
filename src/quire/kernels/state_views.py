"""States of recurrent layers: where each layer keeps its own, and which runs of a step's tokens go on from which.

    cells float32 [cells, numbers];  cell:  [layer][window: taps - 1, channels][matrix]

A step is cut into segments, each of which goes on from the state in one cell and leaves its own in another. A row is
one segment, or several where snapshots are taken within it; drafts follow their row. Segments of one sequence follow
each other, so they are in rounds, at most one of a sequence in each:

    tokens     a a a a a a | b | c c c c             round 1   a[0:4]  b  c
    snapshot         ^                               round 2   a[4:6]

Refuses to know: what a state means, who owns which cell.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from quire.types.kv import KVLayout

CHUNK = 64  # tokens that are computed in parallel form


class LayerState(NamedTuple):
    """Where one layer keeps its states."""

    window: torch.Tensor  # [cells, taps - 1, channels], strided
    matrix: torch.Tensor  # [cells, ...], strided


def cells_in(pages: torch.Tensor, layout: KVLayout) -> torch.Tensor:
    """Pages, zeroed bytes, as cells: [cells, numbers] float32. The null cell stays zero."""
    return pages.view(-1, layout.state_pages * layout.page_bytes).view(torch.float32)[:, : layout.state_numbers]


def state_views(cells: torch.Tensor, layout: KVLayout) -> dict[int, LayerState]:
    """By layer."""
    views: dict[int, LayerState] = {}
    at = 0
    for group in layout.states:
        window, matrix = group.shape.window, group.shape.matrix or (0,)
        inner = window[0] * window[1]
        for layer in group.layers:
            end = at + group.shape.numbers
            views[layer] = LayerState(
                cells[:, at : at + inner].unflatten(1, window), cells[:, at + inner : end].unflatten(1, matrix)
            )
            at = end
    return views


@dataclass
class ChunkedTokens:
    """Tokens of segments in chunks of equal size, padded with nothing: the first chunk of every segment, then the
    second of those that have one, ... Segments with more chunks come first, so that those that go on are a prefix."""

    order: torch.Tensor  # [segments]: which segment is where
    pack: torch.Tensor  # [chunks * CHUNK]: a token, or the one behind the last, which is nothing
    unpack: torch.Tensor  # [tokens]: where each is in the chunks
    going_on: list[int]  # segments that have a first chunk, a second ...

    def packed(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, heads, ...] → [chunks, heads, CHUNK, ...] float32"""
        padded = torch.cat((x, x.new_zeros(1, *x.shape[1:])))[self.pack]
        return padded.unflatten(0, (-1, CHUNK)).transpose(1, 2).float()

    def unpacked(self, x: torch.Tensor) -> torch.Tensor:
        """[chunks, heads, CHUNK, dim] → [tokens, heads, dim]"""
        return x.transpose(1, 2).flatten(0, 1)[self.unpack]


@dataclass
class Segments:
    """Runs of tokens that lie together, each of another sequence; all of one token, or all of several."""

    starts: list[int]  # on the token axis
    counts: list[int]
    sources: torch.Tensor  # [segments] cells whose states they go on from
    targets: torch.Tensor  # [segments] cells that get the states behind them
    whole: bool = False  # all tokens of the step, in order
    apart: bool = False  # no cell is written by one segment and read by another
    _taps: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    _chunks: ChunkedTokens | None = None
    _index: torch.Tensor | None = None

    @property
    def single(self) -> bool:
        return self.counts[0] == 1

    def _ship(self, values: np.ndarray) -> torch.Tensor:
        tensor, device = torch.from_numpy(values), self.sources.device
        return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """Their tokens of [tokens, ...]."""
        return x if self.whole else x[self.index()]

    def index(self) -> torch.Tensor:
        if self._index is None:
            runs = [np.arange(start, start + n) for start, n in zip(self.starts, self.counts, strict=True)]
            self._index = self._ship(np.concatenate(runs))
        return self._index

    def taps(self, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """For a convolution over `width` inputs: which entries of (their tokens, then each segment's last width - 1
        inputs) every token sees, oldest first [tokens, width], and which are the last inputs behind it [segments,
        width - 1]."""
        if width not in self._taps:
            counts = np.asarray(self.counts)
            ends = counts.cumsum()
            first = ends - counts
            which = np.repeat(np.arange(len(counts)), counts)
            offset = np.arange(ends[-1]) - first[which]

            def entry(segment: np.ndarray, place: np.ndarray) -> np.ndarray:
                """Of the token at a place of a segment, negative ones before it."""
                before = ends[-1] + segment * (width - 1) + place + width - 1
                return np.where(place < 0, before, first[segment] + place)

            seen = entry(which[:, None], offset[:, None] + np.arange(1 - width, 1)[None])
            last = entry(np.arange(len(counts))[:, None], counts[:, None] + np.arange(1 - width, 0)[None])
            self._taps[width] = self._ship(seen), self._ship(last)
        return self._taps[width]

    def chunks(self) -> ChunkedTokens:
        if self._chunks is None:
            counts = np.asarray(self.counts)
            order = np.argsort(-counts, kind="stable")
            first, chunks = (counts.cumsum() - counts)[order], -(-counts[order] // CHUNK)
            going_on = [int((chunks > i).sum()) for i in range(int(chunks[0]))]
            total = int(counts.sum())
            pack = np.full((sum(going_on), CHUNK), total)
            row = 0
            for i, active in enumerate(going_on):
                place = i * CHUNK + np.arange(CHUNK)[None]
                inside = place < counts[order[:active], None]
                pack[row : row + active] = np.where(inside, first[:active, None] + place, total)
                row += active
            flat = pack.reshape(-1)
            unpack = np.empty(total + 1, dtype=np.int64)
            unpack[flat] = np.arange(len(flat))
            self._chunks = ChunkedTokens(self._ship(order), self._ship(flat), self._ship(unpack[:total]), going_on)
        return self._chunks


Round = list[Segments]  # at most one of single tokens and one of several


class Run(NamedTuple):
    """A segment as a plan has it."""

    start: int  # on the token axis
    tokens: int
    source: int
    target: int
    round: int


def rounds_of(runs: Sequence[Run], device: torch.device) -> list[Round]:
    total = sum(run.tokens for run in runs)
    rounds: list[Round] = []
    for number in range(1 + max(run.round for run in runs)):
        mine = [run for run in runs if run.round == number]
        rounds.append([])
        for some in ([r for r in mine if r.tokens == 1], [r for r in mine if r.tokens > 1]):
            if some:
                cells = torch.tensor([[r.source for r in some], [r.target for r in some]])
                cells = cells.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else cells
                starts, counts = [r.start for r in some], [r.tokens for r in some]
                whole = sum(counts) == total and starts == sorted(starts)
                rounds[-1].append(Segments(starts, counts, cells[0], cells[1], whole, apart(some)))
    return rounds


def apart(runs: Sequence[Run]) -> bool:
    """Whether no cell is written by one and read by another."""
    writers = {run.target: run for run in runs}
    return all(writers.get(run.source, run) is run for run in runs)


def single_tokens(sources: torch.Tensor, targets: torch.Tensor) -> list[Round]:
    """Of a step whose rows have a token each, and cells apart."""
    rows = len(sources)
    return [[Segments(list(range(rows)), [1] * rows, sources, targets, whole=True, apart=True)]]
