"""`sparse+`: queries that read only some pages of each KV head; all other rows take another backend.

Of a long context a single query pays nearly all its attention to a few pages. The first page and the last tokens are
always read; of the others, those where an upper bound of the scores is highest (Quest), or at even distances. Pages
that were chosen are attended to as if there were no others. In plain torch, query by query: the compiled decoder has
its own way (`csrc/attend_sparse.h`). Refuses to know: requests, how bounds are kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from quire.kernels.attention_backend import (
    SPARSE_LOCAL,
    AttentionBackend,
    AttentionSpec,
    Batch,
    GroupBatch,
    Part,
    part_of,
)
from quire.kernels.kv_views import LayerKV, decode


def local_page(position: int, size: int, budget: int, *, bounded: bool) -> int:
    """The first of the last pages, which are always read."""
    local = max(0, position - SPARSE_LOCAL) // size
    return local if bounded else min(local, position // size + 1 - budget // 2)


def chosen_pages(q: torch.Tensor, position: int, size: int, budget: int, bounds: torch.Tensor | None) -> torch.Tensor:
    """q [heads, dim] of one query, bounds [pages of the row, 2, kv_heads, dim] → the pages that it reads of each KV
    head, as places in the row's table, [kv_heads or 1, budget]."""
    pages, local = position // size + 1, local_page(position, size, budget, bounded=bounds is not None)
    free = min(budget - 1 - (pages - local), local - 1)
    around = torch.tensor([0, *range(local, pages)])
    if bounds is None:
        middle = 1 + torch.arange(free) * (local - 1) // max(free, 1)
        return torch.cat((around, middle)).sort().values[None]
    low, high = bounds[1:local].float().permute(1, 2, 3, 0)  # each [kv_heads, dim, pages]
    grouped = q.float().unflatten(0, (low.shape[0], -1))  # [kv_heads, share, dim]
    most = (grouped.clamp(min=0) @ high + grouped.clamp(max=0) @ low).amax(1)
    middle = 1 + most.topk(free, dim=1).indices
    return torch.cat((around.expand(len(middle), -1), middle), dim=1).sort().values


@dataclass
class Plan:
    rows: list[int]  # whose queries choose
    rest: Part | None
    other: Any


class SparseRows:
    def __init__(self, other: AttentionBackend, place: int):
        """`place`: which of its group's layers this is."""
        self.other = other
        self._place = place
        self.name = f"{other.name}, some pages where they are asked for"
        self.shares = other.shares

    def supports(self, spec: AttentionSpec, device: torch.device) -> str | None:
        return self.other.supports(spec, device)

    def plan(self, batch: Batch, group: GroupBatch, spec: AttentionSpec) -> Plan:
        assert batch.sparse is not None
        rows = [row for row, pages in enumerate(batch.sparse.pages) if pages]
        rest = [row for row, pages in enumerate(batch.sparse.pages) if not pages]
        part = part_of(batch, group, rest) if rest else None
        return Plan(rows, part, None if part is None else self.other.plan(part.batch, part.group, spec))

    def forward(
        self, spec: AttentionSpec, q: torch.Tensor, kv: LayerKV, batch: Batch, group: GroupBatch, plan: Plan
    ) -> torch.Tensor:
        assert batch.sparse is not None
        out = q.new_empty(*q.shape[:2], spec.value_dim)
        if rest := plan.rest:
            out[rest.tokens] = self.other.forward(spec, q[rest.tokens], kv, rest.batch, rest.group, plan.other)
        bounds, size = batch.sparse.bounds[kv.group], group.tokens_per_page
        starts = list(accumulate(batch.counts, initial=0))
        positions = batch.positions.tolist()
        for row in plan.rows:
            table, budget = group.page_table[row].long(), batch.sparse.pages[row]
            for token in range(starts[row], starts[row + 1]):
                pages = positions[token] // size + 1
                if pages > budget:
                    mine = None if bounds is None else bounds[table[:pages], self._place]
                    chosen = chosen_pages(q[token], positions[token], size, budget, mine)
                else:
                    chosen = torch.arange(pages)[None]
                out[token] = _attend(spec, q[token], kv, table, chosen, positions[token]).to(q.dtype)
        return out


def _attend(
    spec: AttentionSpec, q: torch.Tensor, kv: LayerKV, table: torch.Tensor, chosen: torch.Tensor, position: int
) -> torch.Tensor:
    """q [heads, dim] over the pages chosen for each KV head."""
    size, heads = kv.k_pages.shape[1], spec.kv_heads
    chosen = chosen.expand(heads, -1)
    pages, which = table[chosen], torch.arange(heads)[:, None]
    k, v = (
        decode(_heads(numbers, pages, which), None if scales is None else _heads(scales, pages, which))
        .flatten(1, 2)
        .float()
        for numbers, scales in kv.sides
    )  # [kv_heads, keys, dim]
    hidden = (chosen[..., None] * size + torch.arange(size) > position).flatten(1)  # [kv_heads, keys]
    scores = spec.capped(q.float().unflatten(0, (heads, -1)) @ k.transpose(1, 2) * spec.scale)
    scores.masked_fill_(hidden[:, None], float("-inf"))
    p = spec.softmax(scores.unsqueeze(2), *scores.shape[:2]).squeeze(2)
    return (p @ v.masked_fill(hidden[..., None], 0)).flatten(0, 1)


def _heads(pages: torch.Tensor, which: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    """[pages, tokens, kv_heads, n] → of each KV head its own pages, [kv_heads, pages, tokens, n]."""
    raw = pages.view(torch.uint8) if pages.element_size() == 1 else pages  # indexing knows no 8-bit floats
    return raw[which, :, head].view(pages.dtype)
