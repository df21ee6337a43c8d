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

from quire.kernels.kv_views import LayerKV
from quire.kernels.state_views import Round
from quire.types.sampling_params import SPARSE_LOCAL as SPARSE_LOCAL

PATH = 16  # drafts of a tree, at most: places of four bits
NO_TREE = 2**31 - 1


@dataclass(frozen=True)
class AttentionSpec:
    """One layer's attention as data."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None  # tokens a query sees, itself included
    itemsize: int = 2  # bytes of a query element
    kv_itemsize: int = 0  # bytes of a number in the pages; 0: as of queries
    chunked: bool = False  # windows do not slide: a query sees from the last multiple of `window` on
    softcap: float | None = None  # scores become softcap * tanh(score / softcap)
    sinks: torch.Tensor | None = field(default=None, compare=False)  # [heads]: a score of nothing, for each head

    values_from: int | None = None  # values are the keys from this dimension on (latent attention); None: their own

    @property
    def value_dim(self) -> int:
        return self.head_dim - (self.values_from or 0)

    @property
    def stored(self) -> int:
        return self.kv_itemsize or self.itemsize

    def first_seen(self, positions: torch.Tensor) -> torch.Tensor | None:
        """The first KV position that queries at these see; None: all from 0 on."""
        if self.window is None:
            return None
        if self.chunked:
            return positions.div(self.window, rounding_mode="floor") * self.window
        return (positions - self.window + 1).clamp(min=0)

    def capped(self, scores: torch.Tensor) -> torch.Tensor:
        """Scores (q . k * scale) under the soft cap; may write over them."""
        if self.softcap is None:
            return scores
        return scores.div_(self.softcap).tanh_().mul_(self.softcap)

    def softmax(self, scores: torch.Tensor, *heads: int) -> torch.Tensor:
        """Of scores [..., *heads, queries, keys], beside the sinks."""
        if self.sinks is None:
            return scores.softmax(-1)
        sinks = self.sinks.float().view(*heads, 1, 1).expand(*scores.shape[:-1], 1)
        return torch.cat((scores, sinks), dim=-1).softmax(-1)[..., :-1]


@dataclass
class GroupBatch:
    """The part of a batch that differs by KV group."""

    tokens_per_page: int
    page_table: torch.Tensor  # [rows, pages] int32; entries past a row's need are the null page
    kv_slots: torch.Tensor  # [tokens] int64: page * tokens_per_page + offset, where each token's K/V goes
    prefix: Any = None  # rows that share their first pages, in the form of the backend that reads it


@dataclass
class Paths:
    """Rows of a tree of drafts, one token each: from position `base` on, a row's keys are not at their own positions
    but at the places, counted from there, that four bits of `path` each name: those of the drafts that its own one
    follows, in order, and its own.

        base 40, drafts at places 40 41 42 43, the last after the one at 41:   path ...31, so positions 40 41 are 41 43

    A row that has no part in a tree has a base beyond all positions."""

    base: torch.Tensor  # [rows] int32
    path: torch.Tensor  # [rows] int64

    def of(self, rows: torch.Tensor) -> Paths:
        """The same for some of the rows."""
        return Paths(self.base[rows], self.path[rows])

    def places(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Where the keys of these rows (a broadcastable index) at these positions are."""
        base, path = self.base[rows].long(), self.path[rows]
        deep = (positions - base).clamp(0, PATH - 1)
        return torch.where(positions < base, positions, base + (path >> (4 * deep) & 15))


class LayerObserver(Protocol):
    """Is told how far a step's forward pass has come."""

    layers: frozenset[int]  # after which it is told

    def layer_written(self, layer: int) -> None:
        """K and V of all layers up to this are in their pages, or on a GPU what puts them there is launched."""
        ...


@dataclass
class SparseBatch:
    """Rows whose queries read only some pages of each KV head: the first, the last, and of the others those with the
    highest upper bound of their scores (`bounds`: Quest), or at even distances."""

    pages: list[int]  # by row: how many; 0: all
    # by group: keys' least and largest, [pages, layers, 2, kv_heads, head_dim] float16
    bounds: list[torch.Tensor | None]


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
    paths: Paths | None = None  # where rows are drafts in trees
    asks: list[int] = field(default_factory=list)  # rows that want to know how much attention they pay
    mass: torch.Tensor | None = None  # [rows, runs of tokens] float32: all layers add to it what those rows pay
    mass_tokens: int = 0  # of such a run; 0: a page
    states: list[Round] = field(default_factory=list)  # segments for recurrent layers
    adapters: torch.Tensor | None = None  # [tokens] int64: LoRA slot of each, 0: none; None: no token has any
    sparse: SparseBatch | None = None
    observer: LayerObserver | None = None
    context: Any = None  # how context-parallel ranks have divided it (`ContextSplit`), where this is a rank's part
    exact: bool = True  # False: host lists are bounds of all that a captured step will be used for

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
            paths=self.paths,
            adapters=None if self.adapters is None else self.adapters[ends],
            sparse=self.sparse,
            context=None if self.context is None else self.context.last(),
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
        paths=None if batch.paths is None else batch.paths.of(which),
    )
    return Part(tokens, part, GroupBatch(group.tokens_per_page, group.page_table[which], group.kv_slots[tokens]))


def _ship(values: list[int], batch: Batch) -> torch.Tensor:
    tensor = torch.tensor(values)
    device = batch.positions.device
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


class AttentionBackend(Protocol):
    name: str
    shares: bool  # whether rows with a common `prefix` are attended together over it

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
