"""Context parallelism of one step: which of its tokens each rank computes, and which keys they meet.

    a row of 12 tokens on 3 ranks    | 0 0 | 1 1 | 2 2 | 2 2 | 1 1 | 0 0 |

Zig-zag: a rank has one piece from either end, so that its queries have as many keys before them as those of the others.

Rows that are too short for it, decode above all, are computed by every rank. Whoever computes them, K and V at position
p are kept by rank p % N alone: slot s of the scheduler's pages is slot s // N of the pages of rank s % N. Refuses to
know: how ranks talk, layers.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import torch

from quire.kernels.attention_backend import Batch, GroupBatch


def zigzag(count: int, rank: int, size: int) -> tuple[range, range]:
    """Of a row of so many tokens, a rank's two pieces, the earlier one first."""

    def piece(index: int) -> range:
        return range(index * count // (2 * size), (index + 1) * count // (2 * size))

    return piece(rank), piece(2 * size - 1 - rank)


class RingBlock(NamedTuple):
    """Queries of one row, among a rank's own, and keys that came round the ring."""

    queries: slice
    keys: slice
    diagonal: bool  # whether queries and keys are of the same tokens, in order: they see no later ones
    gap: int  # positions from the last key to the first query


class ContextSplit:
    """`tokens`: of the whole batch, those whose queries this rank has, row by row. `replicated` and `divided`: which of
    them every rank has too, and which it alone. `ends`: the last one only of each row."""

    def __init__(self, whole: Batch, rank: int, size: int, *, ends: bool = False):
        self.whole, self.rank, self.size = whole, rank, size
        self._ends = ends
        self._starts = list(accumulate(whole.counts, initial=0))
        self.rows = [row for row, count in enumerate(whole.counts) if count >= 2 * size]  # that are divided
        self._pieces = [{row: zigzag(whole.counts[row], other, size) for row in self.rows} for other in range(size)]
        asked = [self._asked(row, rank) for row in range(whole.rows)]
        self.counts = [len(places) for places in asked]
        self._begins = list(accumulate(self.counts, initial=0))
        self.tokens = self._ship([place for places in asked for place in places])
        divided = set(self.rows)
        self.replicated = self._ship(self._own([row for row in range(whole.rows) if row not in divided]))
        self.divided = self._ship(self._own(self.rows))
        self.keys = [  # by rank: which of the whole batch's tokens it makes keys of, of rows that are divided
            self._ship([place for row in self.rows for place in self._places(row, other)]) for other in range(size)
        ]

    def _ship(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.whole.positions.device)

    def _places(self, row: int, rank: int) -> list[int]:
        if row not in self._pieces[rank]:
            return list(range(self._starts[row], self._starts[row + 1]))
        return [self._starts[row] + i for piece in self._pieces[rank][row] for i in piece]

    def _asked(self, row: int, rank: int) -> list[int]:
        places = self._places(row, rank)
        return places[-1:] if self._ends else places

    def _own(self, rows: list[int]) -> list[int]:
        return [token for row in rows for token in range(self._begins[row], self._begins[row + 1])]

    def last(self) -> ContextSplit:
        """The same keys, asked by the last token that each rank has of a row: on the first rank, the row's last."""
        return ContextSplit(self.whole, self.rank, self.size, ends=True)

    def batch(self) -> Batch:
        """This rank's tokens as a batch; its rows are those of the whole."""
        whole = self.whole
        starts = torch.tensor(self._begins, dtype=torch.int32, device=whole.positions.device)
        groups = (GroupBatch(g.tokens_per_page, g.page_table, g.kv_slots[self.tokens]) for g in whole.groups)
        positions = whole.positions[self.tokens]
        return replace(
            whole, positions=positions, query_start=starts, counts=self.counts, groups=tuple(groups), context=self
        )

    def own_slots(self, kv_slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of tokens that go to these slots of the scheduler's pages: which of them this rank keeps, and where."""
        here = (kv_slots % self.size == self.rank).nonzero().flatten()
        return here, kv_slots[here] // self.size

    def ring(self, source: int) -> list[RingBlock]:
        """What this rank's queries see of the keys that rank `source` has made, block by block; what they see nothing
        of is left out."""
        found, at = [], 0
        for row in self.rows:
            early, late = self._pieces[source][row]
            begin, end = self._begins[row], self._begins[row + 1]
            keys, asked = slice(at, at + len(early) + len(late)), self._asked(row, self.rank)
            last = late[-1]
            if source < self.rank:
                keys, last = slice(at, at + len(early)), early[-1]
            elif source > self.rank and not self._ends:
                begin += len(self._pieces[self.rank][row][0])
            gap = asked[begin - self._begins[row]] - self._starts[row] - last
            found.append(RingBlock(slice(begin, end), keys, source == self.rank and not self._ends, gap))
            at += len(early) + len(late)
        return found

    def cached_rows(self) -> list[int]:
        """Divided rows that have keys before them, in pages: of earlier steps, or of other rows of this one."""
        return [row for row in self.rows if self.whole.kv_lens[row] > self.whole.counts[row]]

    def cached_queries(self, rank: int) -> list[int]:
        """Of the whole batch's tokens, those that a rank asks with in such rows."""
        return [place for row in self.cached_rows() for place in self._asked(row, rank)]

    def own_cached(self) -> torch.Tensor:
        return self._ship(self._own(self.cached_rows()))

    def first_token(self, row: int) -> int:
        return self._starts[row]
