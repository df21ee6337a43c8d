# mypy: allow-untyped-defs, allow-incomplete-defs
"""Attention over latent pages: one vector a token, [rotated key | latent], which all heads share; its latter part is
the value as well, so that a tile of keys is read once for both.

A program has one query token and BLOCK_H of its heads, and walks its keys, or a part of them (SPLITS), with an online
softmax; parts are joined by a second kernel. Refuses to know: plans of other kinds, host lengths.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.kernels.attention_backend import AttentionSpec, Batch, GroupBatch
from quire.kernels.kv_views import LayerKV
from quire.kernels.triton import why_not
from quire.kernels.triton.launch import overlap, power_of_two, processors

LOG2E = 1.4426950408889634
BLOCK_H = 16
MAX_SPLITS = 32


@dataclass(frozen=True)
class Plan:
    row_of: torch.Tensor  # int32 [tokens]
    splits: int


@triton.jit
def latent_kernel(
    q_ptr, kv_ptr, out_ptr, partial, partial_lse, page_table, positions, row_of, query_end, kv_len, scale,
    stride_qt, stride_qh, stride_page, stride_slot, stride_table,
    HEADS: tl.constexpr, ROPE: tl.constexpr, RANK: tl.constexpr, ROPE_PADDED: tl.constexpr, RANK_PADDED: tl.constexpr,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token, split = tl.program_id(0), tl.program_id(2)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = token < tl.load(query_end)  # else padding, which has no keys
    row = tl.load(row_of + token, mask=here, other=0)
    table = page_table + row.to(tl.int64) * stride_table
    keys = tl.load(positions + token, mask=here, other=-1).to(tl.int32) + 1
    keys = tl.minimum(keys, tl.load(kv_len + row))  # a spare row has none, wherever its last token is
    each = tl.cdiv(tl.cdiv(keys, SPLITS), BLOCK_N) * BLOCK_N
    begin = split * each
    end = tl.minimum(begin + each, keys)
    r = tl.arange(0, ROPE_PADDED)
    c = tl.arange(0, RANK_PADDED)
    at = q_ptr + token.to(tl.int64) * stride_qt + head[:, None] * stride_qh
    whole = head[:, None] < HEADS
    q_rotated = tl.load(at + r[None, :], mask=whole & (r < ROPE)[None, :], other=0.0)
    q_latent = tl.load(at + ROPE + c[None, :], mask=whole & (c < RANK)[None, :], other=0.0)
    acc = tl.zeros([BLOCK, RANK_PADDED], tl.float32)
    peak = tl.full([BLOCK], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK], tl.float32)
    for n0 in range(begin, end, BLOCK_N):
        n = n0 + tl.arange(0, BLOCK_N)
        inside = n < end
        page = tl.load(table + n // PAGE, mask=inside, other=0).to(tl.int64)
        where = kv_ptr + (page * stride_page + n % PAGE * stride_slot)[:, None]
        rotated = tl.load(where + r[None, :], mask=inside[:, None] & (r < ROPE)[None, :], other=0.0)
        latent = tl.load(where + ROPE + c[None, :], mask=inside[:, None] & (c < RANK)[None, :], other=0.0)
        scores = tl.dot(q_rotated, tl.trans(rotated), input_precision=PRECISION)
        scores = tl.dot(q_latent, tl.trans(latent), scores, input_precision=PRECISION) * scale
        scores = tl.where(inside[None, :], scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        p = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(peak - higher)
        mass = mass * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(latent.dtype), latent, acc * shrink[:, None], input_precision=PRECISION)
        peak = higher
    out = acc / tl.where(mass > 0.0, mass, 1.0)[:, None]
    flat = token.to(tl.int64) * HEADS + head
    there = whole & (c < RANK)[None, :]
    if SPLITS == 1:
        tl.store(out_ptr + flat[:, None] * RANK + c[None, :], out.to(out_ptr.dtype.element_ty), mask=there)
    else:
        part = flat * SPLITS + split
        tl.store(partial + part[:, None] * RANK + c[None, :], out, mask=there)
        tl.store(partial_lse + part, peak + tl.log2(mass), mask=head < HEADS)


@triton.jit
def join_kernel(
    partial, partial_lse, out_ptr,
    RANK: tl.constexpr, RANK_PADDED: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Parts of one token and head; log-sums are to base two."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    flat = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, SPLITS)
    c = tl.arange(0, RANK_PADDED)
    lse = tl.load(partial_lse + flat * SPLITS + s)
    weight = tl.exp2(lse - tl.max(lse, 0))
    weight = tl.where(weight == weight, weight, 0.0)  # a part without keys
    parts = tl.load(
        partial + (flat * SPLITS + s)[:, None] * RANK + c[None, :], mask=(c < RANK)[None, :], other=0.0
    )  # fmt: skip
    both = tl.sum(weight, 0)
    out = tl.sum(parts * weight[:, None], 0) / tl.where(both > 0.0, both, 1.0)
    tl.store(out_ptr + flat * RANK + c, out.to(out_ptr.dtype.element_ty), mask=c < RANK)


class LatentAttention:
    name = "triton, latent"
    shares = False

    def supports(self, spec: AttentionSpec, device: torch.device) -> str | None:
        if spec.values_from is None or spec.kv_heads != 1:
            return "it is for latent attention"
        if spec.window is not None or spec.softcap is not None or spec.sinks is not None:
            return "it knows no windows, soft caps or sinks"
        return why_not(device)

    def plan(self, batch: Batch, group: GroupBatch, spec: AttentionSpec) -> Plan:
        tokens = torch.arange(batch.tokens, dtype=torch.int32, device=batch.positions.device)
        row_of = torch.searchsorted(batch.query_start[1:], tokens, right=True, out_int32=True)
        row_of.clamp_(max=batch.query_start.shape[0] - 2)
        blocks = batch.tokens * -(-spec.heads // BLOCK_H)
        splits = 2 * processors(tokens.device) // max(blocks, 1)
        return Plan(row_of, min(power_of_two(max(splits, 1)), MAX_SPLITS))

    def forward(
        self,
        spec: AttentionSpec,
        q: torch.Tensor,
        kv: LayerKV,
        batch: Batch,
        group: GroupBatch,
        plan: Plan,
    ) -> torch.Tensor:
        rope, rank, splits = spec.values_from or 0, spec.value_dim, plan.splits
        tokens = q.shape[0]
        out = torch.empty(tokens, spec.heads, rank, dtype=q.dtype, device=q.device)
        parts = (tokens, spec.heads, splits) if splits > 1 else (0,)
        partial = torch.empty(*parts, rank, dtype=torch.float32, device=q.device)
        lse = torch.empty(parts, dtype=torch.float32, device=q.device)
        pages = kv.k_pages
        assert pages.dtype == q.dtype and pages.stride(3) == q.stride(2) == 1
        padded = max(power_of_two(rank), 16)
        latent_kernel[(tokens, triton.cdiv(spec.heads, BLOCK_H), splits)](
            q, pages, out, partial, lse, group.page_table, batch.positions, plan.row_of, batch.query_start[-1:],
            batch.kv_len,
            spec.scale * LOG2E,
            q.stride(0), q.stride(1), pages.stride(0), pages.stride(1), group.page_table.stride(0),
            HEADS=spec.heads, ROPE=rope, RANK=rank, ROPE_PADDED=max(power_of_two(rope), 16), RANK_PADDED=padded,
            PAGE=group.tokens_per_page, BLOCK=BLOCK_H, BLOCK_N=32 if q.element_size() == 2 else 16, SPLITS=splits,
            PRECISION="ieee" if q.dtype == torch.float32 else "tf32", num_warps=4, num_stages=2, **overlap(q.device),
        )  # fmt: skip
        if splits > 1:
            join_kernel[(tokens * spec.heads,)](
                partial, lse, out, RANK=rank, RANK_PADDED=padded, SPLITS=splits, num_warps=4, **overlap(q.device),
            )  # fmt: skip
        return out
