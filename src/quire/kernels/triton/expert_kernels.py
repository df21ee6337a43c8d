# mypy: allow-untyped-defs, allow-incomplete-defs
"""Mixtures of experts: choose them, list the rows of each, multiply every run of rows with its expert's matrix.

    chosen [tokens, top_k]       pairs (token, choice) sorted by expert, each run padded to whole blocks of BLOCK_M rows
      3 1 | 1 2 | 3 1     ──►    expert 1: 1 2 5 .    expert 2: 3 . . .    expert 3: 0 4 . .

Everything is counted on the device, and launches are as large as the worst case needs: a captured step serves any
choice. Plain twin: `model.blocks.experts` in torch. Refuses to know: layers, where weights lie.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from quire.kernels.op_signatures import SWIGLU_LIMIT
from quire.kernels.triton.activation import silu
from quire.kernels.triton.launch import overlap, power_of_two

LIST_CHUNK = 4096  # pairs that the listing looks at in one go


@dataclass(frozen=True)
class ExpertLists:
    pairs: torch.Tensor  # int32 [blocks * block_m]: token * top_k + choice; their number where there is none
    experts: torch.Tensor  # int32 [blocks]; -1: a block without rows
    block_m: int


@triton.jit
def choose_kernel(
    logits, correction, chosen, weights, stride, scale,
    COUNT: tl.constexpr, PADDED: tl.constexpr, TOP_K: tl.constexpr, TOP_PADDED: tl.constexpr, SIGMOID: tl.constexpr,
    CORRECTED: tl.constexpr, NORMALISED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One token a program."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0)
    e = tl.arange(0, PADDED)
    x = tl.load(logits + token.to(tl.int64) * stride + e, mask=e < COUNT, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-x))
    else:
        score = tl.exp(x - tl.max(x, 0))
        score = score / tl.sum(score, 0)
    choice = score
    if CORRECTED:
        choice += tl.load(correction + e, mask=e < COUNT, other=0.0)
    choice = tl.where(e < COUNT, choice, float("-inf"))
    slot = tl.arange(0, TOP_PADDED)
    picked = tl.zeros([TOP_PADDED], tl.float32)
    which = tl.zeros([TOP_PADDED], tl.int32)
    for j in tl.static_range(TOP_K):
        best = tl.minimum(tl.argmax(choice, 0), COUNT - 1)  # whatever NaN compares to
        picked = tl.where(slot == j, tl.sum(tl.where(e == best, score, 0.0), 0), picked)
        which = tl.where(slot == j, best, which)
        choice = tl.where(e == best, float("-inf"), choice)
    if NORMALISED:
        picked = picked / (tl.sum(picked, 0) + 1e-20)
    where = token * TOP_K + slot
    tl.store(chosen + where, which, mask=slot < TOP_K)
    tl.store(weights + where, picked * scale, mask=slot < TOP_K)


def choose_experts(
    logits: torch.Tensor,  # [tokens, experts]
    top_k: int,
    *,
    sigmoid: bool = False,
    normalised: bool = True,
    scale: float = 1.0,
    correction: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(which experts int32, how much each counts float32), [tokens, top_k]."""
    tokens, count = logits.shape
    chosen = torch.empty(tokens, top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=logits.device)
    choose_kernel[(tokens,)](
        logits, logits if correction is None else correction, chosen, weights, logits.stride(0), scale,
        COUNT=count, PADDED=power_of_two(count), TOP_K=top_k, TOP_PADDED=power_of_two(top_k), SIGMOID=sigmoid,
        CORRECTED=correction is not None, NORMALISED=normalised, num_warps=1 if count <= 256 else 4,
        **overlap(logits.device),
    )  # fmt: skip
    return chosen, weights


@triton.jit
def list_kernel(
    chosen, pairs, experts, starts, taken, total, blocks,
    COUNT: tl.constexpr, PADDED: tl.constexpr, BLOCK_M: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: counts, where each expert's run begins, which expert a block has, then each pair to its place."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    e = tl.arange(0, PADDED)
    i = tl.arange(0, CHUNK)
    counts = tl.zeros([PADDED], tl.int32)
    for first in range(0, total, CHUNK):
        inside = first + i < total
        expert = tl.load(chosen + first + i, mask=inside, other=0)
        counts += tl.histogram(expert, PADDED)
        counts -= tl.where(e == 0, CHUNK - tl.sum(inside.to(tl.int32), 0), 0)  # those that are none counted as 0
    used = (counts + BLOCK_M - 1) // BLOCK_M
    ends = tl.cumsum(used, 0)
    tl.store(starts + e, (ends - used) * BLOCK_M)
    tl.store(taken + e, tl.zeros([PADDED], tl.int32))
    last = tl.sum(used, 0)
    for first in range(0, blocks, 64):
        b = first + tl.arange(0, 64)
        owner = tl.sum((ends[None, :] <= b[:, None]).to(tl.int32), 1)
        tl.store(experts + b, tl.where(b < last, owner, -1), mask=b < blocks)
    for first in range(0, blocks * BLOCK_M, CHUNK):
        tl.store(pairs + first + i, tl.zeros([CHUNK], tl.int32) + total, mask=first + i < blocks * BLOCK_M)
    tl.debug_barrier()
    for first in range(0, total, CHUNK):
        inside = first + i < total
        expert = tl.load(chosen + first + i, mask=inside, other=0)
        place = tl.load(starts + expert, mask=inside, other=0) + tl.atomic_add(taken + expert, 1, mask=inside)
        tl.store(pairs + place, first + i, mask=inside)


def list_rows(chosen: torch.Tensor, count: int, block_m: int) -> ExpertLists:
    """The rows of each of `count` experts, by what tokens [tokens, top_k] chose."""
    total, device = chosen.numel(), chosen.device
    blocks = min(total, count) + total // block_m
    pairs = torch.empty(blocks * block_m, dtype=torch.int32, device=device)
    experts = torch.empty(blocks, dtype=torch.int32, device=device)
    padded = max(power_of_two(count), 16)
    scratch = torch.empty(2, padded, dtype=torch.int32, device=device)
    list_kernel[(1,)](
        chosen, pairs, experts, scratch[0], scratch[1], total, blocks,
        COUNT=count, PADDED=padded, BLOCK_M=block_m, CHUNK=min(LIST_CHUNK, max(power_of_two(total), 64)), num_warps=16,
        **overlap(device),
    )  # fmt: skip
    return ExpertLists(pairs, experts, block_m)


@triton.jit(do_not_specialize=["total"])
def expert_matmul_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, scale_ptr, pairs, experts, total, stride_x, limit,
    N: tl.constexpr, K: tl.constexpr, PER_ROW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr, SCALED: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A block of rows of one expert times BLOCK_N of its outputs. A row of x serves PER_ROW pairs."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    block = tl.program_id(1)
    expert = tl.load(experts + block)
    if expert < 0:
        return
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    pair = tl.load(pairs + block * BLOCK_M + tl.arange(0, BLOCK_M))
    there = pair < total
    row = (pair // PER_ROW).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    WIDTH: tl.constexpr = 2 * N if GATE != "" else N  # outputs of the matrix
    x = x_ptr + row[:, None] * stride_x + k[None, :]
    w = weight_ptr + expert.to(tl.int64) * WIDTH * K + n.to(tl.int64)[None, :] * K + k[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k0 in range(0, K, BLOCK_K):
        inside = k0 + k < K
        a = tl.load(x + k0, mask=there[:, None] & inside[None, :], other=0.0)
        mask = inside[:, None] & (n < N)[None, :]
        b = tl.load(w + k0, mask=mask, other=0.0, eviction_policy="evict_first")
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
        if GATE != "":
            b = tl.load(w + k0 + N * K, mask=mask, other=0.0, eviction_policy="evict_first")
            up = tl.dot(a, b, up, input_precision=PRECISION)
    if BIAS:
        at = bias_ptr + expert * WIDTH + n
        acc += tl.load(at, mask=n < N, other=0.0).to(tl.float32)[None, :]
        if GATE != "":
            up += tl.load(at + N, mask=n < N, other=0.0).to(tl.float32)[None, :]
    if GATE == "silu":
        acc = silu(acc) * up
    elif GATE == "swiglu_oai":
        acc = tl.minimum(acc, limit)
        acc = acc / (1.0 + tl.exp(-1.702 * acc)) * (tl.minimum(tl.maximum(up, -limit), limit) + 1.0)
    if SCALED:
        acc *= tl.load(scale_ptr + pair, mask=there, other=0.0)[:, None]
    where = out_ptr + pair.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(where, acc.to(out_ptr.dtype.element_ty), mask=there[:, None] & (n < N)[None, :])


def expert_matmul(
    x: torch.Tensor,  # [tokens or pairs, k]
    weight: torch.Tensor,  # [experts, n, k], contiguous
    lists: ExpertLists,
    total: int,  # pairs
    *,
    gate: str = "",  # weight holds gate then up, joined by "silu" or "swiglu_oai"
    bias: torch.Tensor | None = None,  # [experts, n]
    scale: torch.Tensor | None = None,  # [pairs] float32, of the result
) -> torch.Tensor:
    """[pairs, n], or n / 2 where gated."""
    width = weight.shape[1] // (2 if gate else 1)
    out = torch.empty(total, width, dtype=x.dtype, device=x.device)
    tile = _tile(lists.block_m, weight.shape[2])
    grid = (triton.cdiv(width, tile["BLOCK_N"]), lists.experts.shape[0])
    expert_matmul_kernel[grid](
        x, weight, x if bias is None else bias, out, x if scale is None else scale, lists.pairs, lists.experts, total,
        x.stride(0), SWIGLU_LIMIT, N=width, K=weight.shape[2], PER_ROW=total // x.shape[0], BLOCK_M=lists.block_m,
        GATE=gate, BIAS=bias is not None, SCALED=scale is not None,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", **tile, **overlap(x.device),
    )  # fmt: skip
    return out


def block_rows(pairs: int, count: int) -> int:
    """Rows of a block, by how many an expert has on average."""
    each = pairs / count
    return 16 if each <= 8 else 32 if each <= 32 else 64 if each <= 160 else 128


def _tile(block_m: int, columns: int) -> dict[str, Any]:
    """Measured on an H200 with 128 experts of 768 x 2048."""
    if block_m == 16 and columns >= 1536:
        return {"BLOCK_N": 32, "BLOCK_K": 128, "num_warps": 4, "num_stages": 4}
    if block_m <= 32:
        return {"BLOCK_N": 64, "BLOCK_K": 128, "num_warps": 4, "num_stages": 3}
    return {"BLOCK_N": 64, "BLOCK_K": 64, "num_warps": 4 if block_m <= 64 else 8, "num_stages": 3}
