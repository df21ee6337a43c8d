# mypy: allow-untyped-defs, allow-incomplete-defs
"""8-bit pages copied out at the queries' precision, for rows with many queries.

A tensor core takes the keys of a large tile from shared memory, where 8-bit ones would have to be widened and put back
by every block of queries. Once for all of them costs less.

    listed pages, 8 bits:  [ 7 | 3 | 9 ]  ──►  [ 0 | 1 | 2 ]  at 16 bits, with page tables that say so

Plain twin: `kernels.kv.take_pages`. Refuses to know: attention.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
import triton
import triton.language as tl

from quire.kernels.attention_backend import Batch, GroupBatch
from quire.kernels.kv_views import LayerKV
from quire.kernels.triton.launch import overlap, power_of_two

MOST_TOKENS = 32768  # of pages that are copied; what more would take is better left to requests


@triton.jit
def widen_kernel(
    pages, source, scales, out_ptr, stride_page, stride_slot, stride_head, stride_scale_page, stride_scale_slot,
    PAGE: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, VECTORS: tl.constexpr, DP: tl.constexpr,
    SCALED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: VECTORS heads of tokens of one page."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    index = tl.program_id(0).to(tl.int64)
    page = tl.load(pages + index).to(tl.int64)
    vector = tl.program_id(1) * VECTORS + tl.arange(0, VECTORS)
    slot, head, d = vector // KV, vector % KV, tl.arange(0, DP)
    valid = vector < PAGE * KV
    there = valid[:, None] & (d < D)[None, :]
    x = tl.load(source + (page * stride_page + slot * stride_slot + head * stride_head)[:, None] + d[None, :], there)
    x = x.to(tl.float32)
    if SCALED:
        beside = page * stride_scale_page + slot * stride_scale_slot + head
        x *= tl.load(scales + beside, mask=valid, other=0.0).to(tl.float32)[:, None]
    tl.store(out_ptr + (index * PAGE * KV + vector)[:, None] * D + d[None, :], x.to(out_ptr.dtype.element_ty), there)


def widen_pages(kv: LayerKV, pages: torch.Tensor, dtype: torch.dtype) -> LayerKV:
    """The pages [n] int32 of both sides, [n, tokens_per_page, kv_heads, head_dim]."""
    k, v = (_widen(*side, pages, dtype) for side in kv.sides)
    return LayerKV(k, v, kv.group)


def _widen(numbers: torch.Tensor, scales: torch.Tensor | None, pages: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    _, page, heads, dim = numbers.shape
    out = torch.empty(len(pages), page, heads, dim, dtype=dtype, device=numbers.device)
    beside = (0, 0) if scales is None else scales.stride()[:2]
    vectors = min(power_of_two(page * heads), 64)
    widen_kernel[(len(pages), -(-page * heads // vectors))](
        pages, numbers, out if scales is None else scales, out, *numbers.stride()[:3], *beside,
        PAGE=page, KV=heads, D=dim, VECTORS=vectors, DP=power_of_two(dim), SCALED=scales is not None,
        num_warps=4, **overlap(out.device),
    )  # fmt: skip
    return out


@dataclass(frozen=True)
class Wide:
    """Which pages to copy out, and the same batch's page tables over the copies."""

    pages: torch.Tensor  # [n] int32
    group: GroupBatch

    @classmethod
    def of(cls, batch: Batch, group: GroupBatch, least: int) -> Wide | None:
        """The pages of rows with at least so many query tokens; None: there are none, or too many."""
        size = group.tokens_per_page
        need = [-(-n // size) if c >= least else 0 for c, n in zip(batch.counts, batch.kv_lens, strict=True)]
        if not 0 < sum(need) * size <= MOST_TOKENS:
            return None
        rows = np.repeat(np.arange(len(need)), need)
        columns = np.arange(len(rows)) - np.repeat(np.cumsum(need) - need, need)
        device = group.page_table.device
        sent = torch.from_numpy(np.stack((rows, columns)))
        sent = sent.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else sent
        table = torch.zeros(len(need), max(need), dtype=torch.int32, device=device)
        table[sent[0], sent[1]] = torch.arange(len(rows), dtype=torch.int32, device=device)
        return cls(group.page_table[sent[0], sent[1]], replace(group, page_table=table))
