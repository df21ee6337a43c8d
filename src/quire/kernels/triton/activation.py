# mypy: allow-untyped-defs, allow-incomplete-defs
"""SiLU of the gate times up, over a fused projection; optionally to 8 bits. And plain rows to 8 bits.

Plain twins: `reference.ops.act_and_mul` with "silu", `twins.quantise_fp8`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.triton.launch import overlap, power_of_two
from quire.kernels.triton.norm import FP8, store_fp8


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def silu_and_mul_kernel(x_ptr, out_ptr, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """x [tokens, 2 WIDTH]: gate, then up."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    gate = tl.load(x_ptr + token * stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + token * stride + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * WIDTH + column, (silu(gate) * up).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def quantise_kernel(
    x_ptr, out_ptr, scales_ptr, stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row a program, whole: its largest element sets its scale."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0) + tl.arange(0, 1)
    column = tl.arange(0, BLOCK)
    inside = (row >= 0)[:, None] & (column < WIDTH)[None, :]
    where = row.to(tl.int64)[:, None] * stride + column[None, :]
    y = tl.load(x_ptr + where, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        y = silu(y) * tl.load(x_ptr + WIDTH + where, mask=inside, other=0.0).to(tl.float32)
    at = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    store_fp8(y, 1.0, out_ptr, scales_ptr, at, row, inside, row >= 0)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """x [tokens, 2 n] holds gate then up: silu(gate) * up, [tokens, n]."""
    tokens, width = x.shape[0], x.shape[1] // 2
    out = torch.empty(tokens, width, dtype=x.dtype, device=x.device)
    if tokens:
        block = min(power_of_two(width), 2048)
        silu_and_mul_kernel[(tokens, -(-width // block))](
            x, out, x.stride(0), WIDTH=width, BLOCK=block, num_warps=4, **overlap(x.device)
        )
    return out


def quantise_fp8(x: torch.Tensor, *, gated: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows (after silu(gate) * up, where gated) as (8-bit floats [tokens, n], float32 scales [tokens])."""
    tokens, width = x.shape[0], x.shape[1] // (2 if gated else 1)
    out = torch.empty(tokens, width, dtype=FP8, device=x.device)
    scales = torch.empty(tokens, dtype=torch.float32, device=x.device)
    if tokens:
        block = power_of_two(width)
        quantise_kernel[(tokens,)](
            x, out, scales, x.stride(0), WIDTH=width, BLOCK=block, GATED=gated,
            num_warps=min(16, max(4, block // 512)), **overlap(x.device),
        )  # fmt: skip
    return out, scales
