"""`torch-sdpa`: ragged paged attention out of gathers and scaled_dot_product_attention, on any device.

Rows with the same number of query tokens and similar lengths form a bucket: their pages are gathered into one
padded buffer and attended in one call. Single-token rows lay the query heads that share a KV head side by side
as if they were queries, so K and V are read once and never repeated.

    rows (count, pages):   (1,9) (1,8) (512,40) (1,2)    ──►   {(1,9) (1,8)}  {(1,2)}  {(512,40)}

Everything that layers share (buckets, page ids, masks, the gather buffer) is in the plan. Host lengths only size
the buckets; what a query may see is decided by the lengths on the device, so host lengths may be upper bounds.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F

from quire.kernels.attention_backend import PATH, AttentionSpec, Batch, GroupBatch, Paths
from quire.kernels.kv_views import LayerKV, take_pages, take_tokens

PADDING = 1 << 17  # gathered elements a bucket may waste: about what one more bucket costs on a CPU
SCORES = 1 << 24  # held at once where there is a soft cap
BUCKET = 1 << 24  # gathered elements a bucket may hold unless one row alone needs more: bounds the buffer


class Branches(NamedTuple):
    """What rows of a tree read elsewhere than where they gathered."""

    tokens: torch.Tensor  # gathered ones, to be replaced
    pages: torch.Tensor
    offsets: torch.Tensor


@dataclass
class Bucket:
    tokens: slice | torch.Tensor  # its query tokens on the flat token axis
    rows: int
    count: int  # query tokens of each row
    keys: int  # gathered KV tokens of each row
    pages: torch.Tensor  # [rows * pages each], what to gather
    mask: torch.Tensor | None = None  # [rows, 1, count, keys]; None: causal from position 0
    stale: torch.Tensor | None = None  # gathered tokens to clear, see `_stale`
    branches: Branches | None = None

    @property
    def gathered(self) -> int:
        return self.rows * self.keys


@dataclass
class Plan:
    buckets: list[Bucket]
    buffer: torch.Tensor | None = field(default=None)  # made by the first layer, used by all

    def gather(self, bucket: Bucket, kv: LayerKV, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a bucket, each [rows, keys, kv_heads, dim] in q's dtype; valid until the next gather."""
        page, heads, dim = *kv.k_pages.shape[1:3], q.shape[-1]
        width = heads * dim
        if self.buffer is None:
            most = max(b.gathered for b in self.buckets) + 1  # one more token to absorb stale indices without a place
            self.buffer = q.new_empty(2 * most * width)
        count = bucket.gathered
        both = self.buffer[: 2 * (count + 1) * width].view(2, count + 1, width)
        for (numbers, scales), flat in zip(kv.sides[: 1 if kv.shared else 2], both, strict=False):
            into = flat[:count].view(count // page, page, heads, dim)
            if numbers.dtype == q.dtype:
                torch.index_select(numbers, 0, bucket.pages, out=into)
            else:
                into.copy_(take_pages(numbers, scales, bucket.pages))
            if bucket.branches is not None:
                to, *where = bucket.branches
                flat[to] = take_tokens(numbers, scales, *where).flatten(1).to(flat.dtype)
        if bucket.stale is not None:
            both.index_fill_(1, bucket.stale, 0)
        k, v = both[:, :count].view(2, bucket.rows, bucket.keys, heads, dim)
        return k, k[..., dim - kv.v_pages.shape[-1] :] if kv.shared else v


class TorchSdpa:
    name = "torch-sdpa"
    shares = False

    def supports(self, spec: AttentionSpec, device: torch.device) -> str | None:
        return None

    def plan(self, batch: Batch, group: GroupBatch, spec: AttentionSpec) -> Plan:
        starts = list(accumulate(batch.counts, initial=0))
        return Plan([_bucket(batch, group, spec, starts, *part) for part in _split(batch, group, spec)])

    def forward(
        self,
        spec: AttentionSpec,
        q: torch.Tensor,
        kv: LayerKV,
        batch: Batch,
        group: GroupBatch,
        plan: Plan,
    ) -> torch.Tensor:
        if len(plan.buckets) == 1:
            return _attend(spec, q, plan, plan.buckets[0], kv)
        out = q.new_empty(*q.shape[:2], spec.value_dim)
        for bucket in plan.buckets:
            out[bucket.tokens] = _attend(spec, q[bucket.tokens], plan, bucket, kv)
        return out


def _split(batch: Batch, group: GroupBatch, spec: AttentionSpec) -> list[tuple[list[int], int, bool]]:
    """(rows, pages to gather for each, causal from position 0) of each bucket."""
    size, window = group.tokens_per_page, spec.window
    kinds: defaultdict[tuple[int, bool], list[tuple[int, int]]] = defaultdict(list)
    for row, (count, kv_len) in enumerate(zip(batch.counts, batch.kv_lens, strict=True)):
        causal = 1 < count == kv_len and (window is None or count <= window)
        pages = -(-kv_len // size)
        if window is not None:
            pages = min(pages, (window + count + size - 3) // size + 1)  # window + count - 1 tokens, any alignment
        kinds[count, causal].append((pages, row))
    page_elements = 2 * size * spec.kv_heads * spec.head_dim
    buckets = []
    for (_, causal), rows in kinds.items():
        rows.sort(reverse=True)
        first = waste = 0
        for i, (pages, _) in enumerate(rows):
            most = rows[first][0]
            waste += most - pages
            if waste * page_elements > PADDING or (i > first and (i + 1 - first) * most * page_elements > BUCKET):
                buckets.append((sorted(row for _, row in rows[first:i]), most, causal))
                first, waste = i, 0
        buckets.append((sorted(row for _, row in rows[first:]), rows[first][0], causal))
    return buckets


def _bucket(
    batch: Batch, group: GroupBatch, spec: AttentionSpec, starts: list[int], rows: list[int], pages: int, causal: bool
) -> Bucket:
    size, count, device = group.tokens_per_page, batch.counts[rows[0]], batch.positions.device
    which: slice | torch.Tensor
    tokens: slice | torch.Tensor
    if rows[-1] - rows[0] == len(rows) - 1:  # neighbours: slices instead of copies
        which, tokens = slice(rows[0], rows[-1] + 1), slice(starts[rows[0]], starts[rows[-1] + 1])
    else:
        which = torch.tensor(rows, device=device)
        tokens = torch.tensor([t for row in rows for t in range(starts[row], starts[row + 1])], device=device)
    table = group.page_table[which]
    bucket = Bucket(tokens, len(rows), count, pages * size, table[:, :pages].reshape(-1))
    if causal:
        return bucket

    positions = batch.positions[tokens].view(len(rows), count)
    keys = torch.arange(bucket.keys, device=device)[None]  # KV position of each gathered token, [rows or 1, keys]
    oldest = spec.first_seen(positions)
    if oldest is not None:
        first = oldest[:, :1] // size  # page of the oldest token in sight
        wanted = first + torch.arange(pages, device=device)
        bucket.pages = table.gather(1, wanted.clamp_(max=table.shape[1] - 1)).view(-1)
        keys = keys + first * size
    visible = keys[:, None, :] <= positions[:, :, None]  # [rows, count, keys]
    if oldest is not None:
        visible &= keys[:, None, :] >= oldest[:, :, None]
    bucket.mask = torch.zeros(visible.shape, device=device).masked_fill_(~visible, float("-inf"))[:, None]
    bucket.stale = _stale(bucket, batch.kv_len[which] - keys[:, 0], size)
    if batch.paths is not None and count == 1:
        these = torch.arange(batch.rows, device=device)[which]
        bucket.branches = _branches(batch.paths, these, positions, keys, table, size)
    return bucket


def _branches(
    paths: Paths, rows: torch.Tensor, positions: torch.Tensor, keys: torch.Tensor, table: torch.Tensor, size: int
) -> Branches:
    """PATH of each row; those that are none go to the one more token that is there for such."""
    at = paths.base[rows].long()[:, None] + torch.arange(PATH, device=rows.device)  # [rows, PATH] positions
    there, width = (at <= positions) & (at >= keys[:, :1]), keys.shape[1]
    to = torch.arange(len(rows), device=rows.device)[:, None] * width + at - keys[:, :1]
    places = paths.places(rows[:, None], torch.where(there, at, 0))
    page_of = table.gather(1, (places // size).clamp_(max=table.shape[1] - 1)).long()
    return Branches(torch.where(there, to, len(rows) * width).view(-1), page_of.view(-1), (places % size).view(-1))


def _stale(bucket: Bucket, lengths: torch.Tensor, size: int) -> torch.Tensor:
    """Indices, among the gathered tokens, of the unwritten ends of last pages. A page keeps what its previous
    owner left, and a mask does not hide NaN (0 * NaN): one request's overflow must not reach the next owner."""
    ends = lengths.long()[:, None] + torch.arange(size, device=lengths.device)  # [rows, size]
    base = torch.arange(bucket.rows, device=lengths.device)[:, None] * bucket.keys
    return torch.where(ends < bucket.keys, base + ends, bucket.gathered).view(-1)


def _attend(spec: AttentionSpec, q: torch.Tensor, plan: Plan, bucket: Bucket, kv: LayerKV) -> torch.Tensor:
    """q [rows * count, heads, dim] of one bucket → the same shape."""
    k, v = plan.gather(bucket, kv, q)
    if bucket.mask is None:
        k, v = k[:, : bucket.count], v[:, : bucket.count]
    elif bucket.mask.dtype != q.dtype:
        bucket.mask = bucket.mask.to(q.dtype)
    k, v = k.transpose(1, 2), v.transpose(1, 2)  # [rows, kv_heads, keys, dim]
    if spec.softcap is not None or spec.sinks is not None:
        return _attend_plainly(spec, q, k, v, bucket)
    if bucket.count == 1:
        share = spec.heads // spec.kv_heads
        grouped = q.view(bucket.rows, spec.kv_heads, share, spec.head_dim)
        out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=bucket.mask, scale=spec.scale)
        return out.reshape(len(q), spec.heads, -1)
    out = F.scaled_dot_product_attention(
        q.view(bucket.rows, bucket.count, spec.heads, spec.head_dim).transpose(1, 2),
        k,
        v,
        attn_mask=bucket.mask,
        is_causal=bucket.mask is None,
        scale=spec.scale,
        enable_gqa=spec.heads != spec.kv_heads,
    )
    return out.transpose(1, 2).reshape(len(q), spec.heads, -1)


def _attend_plainly(
    spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bucket: Bucket
) -> torch.Tensor:
    """The same in plain products: torch's attention has no soft cap, no sinks. Some queries of each row at a time."""
    share, keys = spec.heads // spec.kv_heads, k.shape[2]
    grouped = q.view(bucket.rows, bucket.count, spec.kv_heads, share, spec.head_dim).permute(0, 2, 3, 1, 4)
    out = grouped.new_empty(*grouped.shape[:-1], spec.value_dim)
    step = max(1, SCORES // (bucket.rows * spec.heads * keys))
    k, v = k.float(), v.float()
    for first in range(0, bucket.count, step):
        some = grouped[:, :, :, first : first + step]  # [rows, kv_heads, share, queries, dim]
        queries = some.shape[3]
        scores = some.float().flatten(2, 3) @ k.transpose(2, 3) * spec.scale
        scores = spec.capped(scores).unflatten(2, (share, queries))
        if bucket.mask is None:
            hidden = torch.ones(queries, keys, dtype=torch.bool, device=q.device).triu_(first + 1)
            scores.masked_fill_(hidden, float("-inf"))
        else:
            scores += bucket.mask[:, :, None, first : first + step]
        mixed = spec.softmax(scores, spec.kv_heads, share).flatten(2, 3) @ v
        out[:, :, :, first : first + step] = mixed.unflatten(2, (share, queries)).to(q.dtype)
    return out.permute(0, 3, 1, 2, 4).reshape(len(q), spec.heads, -1)
