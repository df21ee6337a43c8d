# mypy: allow-untyped-defs, allow-incomplete-defs
"""LoRA of many adapters in one batch: two products with the matrices of each block's adapter, the second of which adds
to the base's outputs (SGMV of Punica, shrink and expand).

    tokens by adapter, each run padded to whole blocks ──► shrink: x A^T, all parts ──► expand: += B, part by part

A reduction over thousands of columns for a few ranks leaves most of a GPU idle: several programs share it, and whoever
expands adds up what they found. Blocks and shares of one size for every batch: a token's bits do not depend on others.
Plain twin: `eager/grouped_lora.py`. Refuses to know: layers, names.
"""

from __future__ import annotations

from functools import cache
from itertools import accumulate

import torch
import triton
import triton.language as tl

from quire.kernels.triton.expert_kernels import ExpertLists, list_rows
from quire.kernels.triton.launch import overlap, power_of_two

BLOCK_ROWS = 16
SHARE = 512  # columns that a program multiplies, unless that would make more than SHARES
SHARES = 8


def segments(adapters: torch.Tensor, slots: int) -> ExpertLists:
    """Of a step's tokens, by the adapter slot of each; once for all layers."""
    return list_rows(adapters.int()[:, None], slots, BLOCK_ROWS)


@triton.jit(do_not_specialize=["total"])
def lora_shrink_kernel(
    x_ptr, a_ptr, low, pairs, adapters, total, stride_x,
    R: tl.constexpr, K: tl.constexpr, SHARE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A block of tokens of one adapter, BLOCK_R rows of its A, SHARE columns."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    block, share = tl.program_id(1), tl.program_id(2)
    adapter = tl.load(adapters + block)
    if adapter < 1:
        return
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    token = tl.load(pairs + block * BLOCK_M + tl.arange(0, BLOCK_M))
    there, row, k = token < total, token.to(tl.int64), share * SHARE + tl.arange(0, BLOCK_K)
    x_at = x_ptr + row[:, None] * stride_x + k[None, :]
    a_at = a_ptr + adapter.to(tl.int64) * R * K + r.to(tl.int64)[None, :] * K + k[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    for first in range(0, SHARE, BLOCK_K):
        inside = first + k < K
        x = tl.load(x_at + first, mask=there[:, None] & inside[None, :], other=0.0)
        a = tl.load(a_at + first, mask=inside[:, None] & (r < R)[None, :], other=0.0)
        acc = tl.dot(x, a, acc, input_precision=PRECISION)
    where = low + (share.to(tl.int64) * total + row[:, None]) * R + r[None, :]
    tl.store(where, acc, mask=there[:, None] & (r < R)[None, :])


@triton.jit(do_not_specialize=["total"])
def lora_expand_kernel(
    low, b_ptr, out, starts, pairs, adapters, total, stride_out,
    N: tl.constexpr, R: tl.constexpr, RANK: tl.constexpr, SHARES: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A block of tokens of one adapter, BLOCK_N outputs of one part."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    block, part = tl.program_id(1), tl.program_id(2)
    adapter = tl.load(adapters + block)
    if adapter < 1:
        return
    n = tl.load(starts + part) + tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < tl.load(starts + part + 1)
    token = tl.load(pairs + block * BLOCK_M + tl.arange(0, BLOCK_M))
    there = token < total
    row = token.to(tl.int64)
    r = tl.arange(0, BLOCK_R)
    low_at = low + row[:, None] * R + (part * RANK + r)[None, :]
    x = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    for share in tl.static_range(SHARES):
        x += tl.load(low_at + share * total.to(tl.int64) * R, mask=there[:, None] & (r < RANK)[None, :], other=0.0)
    w = tl.load(
        b_ptr + adapter.to(tl.int64) * N * RANK + n.to(tl.int64)[None, :] * RANK + r[:, None],
        mask=(r < RANK)[:, None] & inside[None, :],
        other=0.0,
    )
    where = out + row[:, None] * stride_out + n[None, :]
    mask = there[:, None] & inside[None, :]
    base = tl.load(where, mask=mask, other=0.0).to(tl.float32)
    added = tl.dot(x.to(w.dtype), w, base, input_precision=PRECISION)
    tl.store(where, added.to(out.dtype.element_ty), mask=mask)


@cache
def _starts(parts: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(list(accumulate(parts, initial=0)), dtype=torch.int32, device=device)


def add_lora(
    out: torch.Tensor,  # [tokens, sum(parts)]
    x: torch.Tensor,  # [tokens, columns]
    a: torch.Tensor,  # [slots, len(parts) * rank, columns]
    b: torch.Tensor,  # [slots, sum(parts), rank]
    parts: tuple[int, ...],
    found: ExpertLists,
) -> None:
    """out += B A x of each token's adapter, part by part."""
    tokens, columns, rows, rank = x.shape[0], x.shape[1], a.shape[1], b.shape[2]
    shares = min(triton.cdiv(columns, SHARE), SHARES)
    block_k, block_r, block_n = 128, min(max(16, power_of_two(rows)), 64), 128
    share = triton.cdiv(columns, shares * block_k) * block_k
    low = torch.empty(shares, tokens, rows, dtype=torch.float32, device=x.device)
    blocks, precision = found.experts.shape[0], "ieee" if x.dtype == torch.float32 else "tf32"
    lora_shrink_kernel[(triton.cdiv(rows, block_r), blocks, shares)](
        x, a, low, found.pairs, found.experts, tokens, x.stride(0),
        R=rows, K=columns, SHARE=share, BLOCK_M=found.block_m, BLOCK_R=block_r, BLOCK_K=block_k, PRECISION=precision,
        num_warps=4, num_stages=4, **overlap(x.device),
    )  # fmt: skip
    lora_expand_kernel[(triton.cdiv(max(parts), block_n), blocks, len(parts))](
        low, b, out, _starts(parts, x.device), found.pairs, found.experts, tokens, out.stride(0),
        N=sum(parts), R=rows, RANK=rank, SHARES=shares, BLOCK_R=max(16, power_of_two(rank)), BLOCK_M=found.block_m,
        BLOCK_N=block_n, PRECISION=precision, num_warps=4, **overlap(x.device),
    )  # fmt: skip
