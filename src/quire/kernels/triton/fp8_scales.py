# mypy: allow-untyped-defs, allow-incomplete-defs
"""The scale of each row of a matrix by which it loses least when it becomes 8-bit floats: all scales tried in a launch.

Plain twin: `reference.fp8_rows.row_scales`, which says what is tried. Refuses to know: what rows are multiplied with.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.reference import fp8_rows
from quire.kernels.triton.launch import power_of_two


@triton.jit
def _rounded(x):
    """To the bits that an 8-bit float has, three behind the first; the few too small for them lose next to nothing."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)


@triton.jit
def row_scales_kernel(
    rows_ptr, scales_ptr, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, LARGEST: tl.constexpr, STEP: tl.constexpr
):
    """One row a program."""
    row = rows_ptr + tl.program_id(0).to(tl.int64) * stride
    column = tl.arange(0, BLOCK)
    most = tl.zeros([BLOCK], tl.float32)
    for first in range(0, WIDTH, BLOCK):
        x = tl.load(row + first + column, mask=first + column < WIDTH, other=0.0).to(tl.float32)
        most = tl.maximum(most, tl.abs(x))
    largest = tl.max(most, 0)
    best, least = tl.maximum(largest / LARGEST, 1e-12), float("inf")
    for candidate in range(0, LARGEST // 2 // STEP):
        becomes = LARGEST - STEP * candidate
        scale = tl.maximum(largest / becomes, 1e-12)
        error = tl.zeros([BLOCK], tl.float32)
        for first in range(0, WIDTH, BLOCK):
            x = tl.load(row + first + column, mask=first + column < WIDTH, other=0.0).to(tl.float32) / scale
            lost = _rounded(x) - x
            error += lost * lost
        cost = tl.sum(error, 0) / (becomes * becomes)  # of the largest's square
        best = tl.where(cost < least, scale, best)
        least = tl.minimum(least, cost)
    tl.store(scales_ptr + tl.program_id(0), best)


def row_scales(rows: torch.Tensor) -> torch.Tensor:
    """Of rows [n, width]: float32 [n]."""
    count, width = rows.shape
    assert rows.stride(1) == 1
    scales = torch.empty(count, dtype=torch.float32, device=rows.device)
    if count:
        block = min(power_of_two(width), 4096)
        row_scales_kernel[(count,)](
            rows, scales, rows.stride(0), WIDTH=width, BLOCK=block, LARGEST=fp8_rows.LARGEST, STEP=fp8_rows.STEP,
            num_warps=max(1, min(8, block // 512)),
        )  # fmt: skip
    return scales
