# mypy: allow-untyped-defs, allow-incomplete-defs
"""LoRA of many adapters in one batch: the grouped products of `expert_kernels` with adapters in the place of experts,
and an expanding one that adds to the base's outputs (SGMV of Punica, shrink and expand).

    tokens by adapter, each run padded to whole blocks ──► shrink: x A^T, all parts ──► expand: += B, part by part

Blocks of one size for every batch: a token's bits do not depend on the others. Plain twin: `eager/grouped_lora.py`.
Refuses to know: layers, names.
"""

from __future__ import annotations

from functools import cache
from itertools import accumulate

import torch
import triton
import triton.language as tl

from quire.kernels.triton.expert_kernels import ExpertLists, expert_matmul, list_rows
from quire.kernels.triton.launch import overlap, power_of_two

BLOCK_ROWS = 16


def segments(adapters: torch.Tensor, slots: int) -> ExpertLists:
    """Of a step's tokens, by the adapter slot of each; once for all layers."""
    return list_rows(adapters.int()[:, None], slots, BLOCK_ROWS)


@triton.jit(do_not_specialize=["total"])
def lora_expand_kernel(
    low, b_ptr, out, starts, pairs, adapters, total, stride_low, stride_out,
    N: tl.constexpr, RANK: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
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
    x = tl.load(
        low + row[:, None] * stride_low + (part * RANK + r)[None, :],
        mask=there[:, None] & (r < RANK)[None, :],
        other=0.0,
    )
    w = tl.load(
        b_ptr + adapter.to(tl.int64) * N * RANK + n.to(tl.int64)[None, :] * RANK + r[:, None],
        mask=(r < RANK)[:, None] & inside[None, :],
        other=0.0,
    )
    where = out + row[:, None] * stride_out + n[None, :]
    mask = there[:, None] & inside[None, :]
    base = tl.load(where, mask=mask, other=0.0).to(tl.float32)
    added = tl.dot(x, w, base, input_precision=PRECISION)
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
    low = expert_matmul(x, a, found, x.shape[0])
    rank, block_n = b.shape[2], 64
    grid = (triton.cdiv(max(parts), block_n), found.experts.shape[0], len(parts))
    lora_expand_kernel[grid](
        low, b, out, _starts(parts, x.device), found.pairs, found.experts, x.shape[0], low.stride(0), out.stride(0),
        N=sum(parts), RANK=rank, BLOCK_R=max(16, power_of_two(rank)), BLOCK_M=found.block_m, BLOCK_N=block_n,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", **overlap(x.device),
    )  # fmt: skip
