"""The attention seam: a ragged batch over paged KV, and what a backend must do with it.

A step is a batch of rows; row r owns query tokens query_start[r] .. query_start[r+1] of the flat token axis.
Its keys and values lie in pages; query i of a row attends KV positions 0 .. positions[i] (or the last `window`
of them). All K/V of the step are written to their pages before any row attends, so rows may read pages that
another row of the same step fills.

    page table row:  [ 7 | 3 | 9 | 0 ]      KV position p lives in page table[p // T], offset p % T
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Protocol

import torch

from quire.kernels.kv import LayerKV


@dataclass(frozen=True)
class AttentionSpec:
    """One layer's attention as data."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None  # tokens a query sees, itself included
    itemsize: int = 2  # bytes of a query element


@dataclass
class GroupBatch:
    """The part of a batch that differs by KV group."""

    tokens_per_page: int
    page_table: torch.Tensor  # [rows, pages] int32; entries past a row's need are the null page
    kv_slots: torch.Tensor  # [tokens] int64: page * tokens_per_page + offset, where each token's K/V goes
    prefix: Any = None  # rows that share their first pages, in the form of the backend that reads it


@dataclass
class Batch:
    """One step's rows, on the device. Host lists are upper bounds of the device's values (equal unless drafts
    are in flight)."""

    positions: torch.Tensor  # [tokens] int64
    query_start: torch.Tensor  # [rows + 1] int32
    kv_len: torch.Tensor  # [rows] int32: KV length of the row once this step's tokens are written
    counts: list[int]  # query tokens per row
    kv_lens: list[int]  # host's view of kv_len
    groups: tuple[GroupBatch, ...]
    asks: list[int] = field(default_factory=list)  # rows that want to know how much attention they pay to each page
    mass: torch.Tensor | None = None  # [rows, pages] float32: all layers add to it what those rows pay

    @property
    def rows(self) -> int:
        return len(self.counts)

    @property
    def tokens(self) -> int:
        return self.positions.shape[0]

    @property
    def ends(self) -> torch.Tensor:
        """The last token of each row, [rows]."""
        return (self.query_start[1:] - 1).long()

    def last(self) -> Batch:
        """The same rows and keys, asked by each row's last token alone."""
        ends = self.ends
        return Batch(
            positions=self.positions[ends],
            query_start=torch.arange(self.rows + 1, dtype=torch.int32, device=ends.device),
            kv_len=self.kv_len,
            counts=[1] * self.rows,
            kv_lens=self.kv_lens,
            groups=tuple(replace(group, kv_slots=group.kv_slots[ends], prefix=None) for group in self.groups),
        )


@dataclass
class Part:
    """Some rows of a batch as a batch of their own."""

    tokens: torch.Tensor  # their places on the whole batch's token axis
    batch: Batch
    group: GroupBatch


def part_of(batch: Batch, group: GroupBatch, rows: list[int]) -> Part:
    starts = list(accumulate(batch.counts, initial=0))
    counts = [batch.counts[row] for row in rows]
    tokens = _ship([t for row in rows for t in range(starts[row], starts[row + 1])], batch)
    which = _ship(rows, batch)
    part = Batch(
        positions=batch.positions[tokens],
        query_start=_ship(list(accumulate(counts, initial=0)), batch).int(),
        kv_len=batch.kv_len[which],
        counts=counts,
        kv_lens=[batch.kv_lens[row] for row in rows],
        groups=(),
    )
    return Part(tokens, part, GroupBatch(group.tokens_per_page, group.page_table[which], group.kv_slots[tokens]))


def _ship(values: list[int], batch: Batch) -> torch.Tensor:
    tensor = torch.tensor(values)
    device = batch.positions.device
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


class AttentionBackend(Protocol):
    name: str

    def supports(self, spec: AttentionSpec, device: torch.device) -> str | None:
        """None if it can run this layer here, else the reason it cannot."""
        ...

    def plan(self, batch: Batch, group: GroupBatch, spec: AttentionSpec) -> Any:
        """Work shared by all layers of a KV group in one step (host-side choices, work lists)."""
        ...

    def forward(
        self,
        spec: AttentionSpec,
        q: torch.Tensor,  # [tokens, heads, head_dim]
        kv: LayerKV,
        batch: Batch,
        group: GroupBatch,
        plan: Any,
    ) -> torch.Tensor:  # [tokens, heads, head_dim]
        ...
