# mypy: allow-untyped-defs, allow-incomplete-defs
"""RMS norm, alone or after adding to the residual stream, of whole rows or of each head; optionally to 8 bits.

Plain twins: `reference.ops.rms_norm`, `add_rms_norm`, `twins.quantise_fp8`. Refuses to know: layers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.triton.launch import overlap, power_of_two

FP8 = torch.float8_e4m3fn


@triton.jit
def store_fp8(y, factor, out, scales, where, row, mask, valid):
    """y [ROWS, BLOCK] times `factor` [ROWS] as 8-bit floats times a scale a row: its largest becomes the largest
    there is. The factor goes into the scale alone, and need not be known first."""
    scale = tl.maximum(tl.max(tl.abs(y), 1), 1e-12) * (1.0 / 448.0)
    tl.store(scales + row, scale * factor, mask=valid)
    tl.store(out + where, tl.clamp(y / scale[:, None], -448.0, 448.0).to(tl.float8e4nv), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, scales_ptr, rows, heads, stride_t, stride_h, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, ADD: tl.constexpr, QUANTISE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Row r of the contiguous output is x[r // heads, r % heads]; the residual is contiguous."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    valid = row < rows
    mask = valid[:, None] & (column < WIDTH)[None, :]
    weight = tl.load(weight_ptr + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    source = (row // heads).to(tl.int64) * stride_t + (row % heads) * stride_h
    x = tl.load(x_ptr + source[:, None] + column[None, :], mask=mask, other=0.0)
    where = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    if ADD:
        x = (tl.load(residual_ptr + where, mask=mask, other=0.0).to(tl.float32) + x.to(tl.float32)).to(
            residual_ptr.dtype.element_ty
        )
        tl.store(residual_ptr + where, x, mask=mask)
    wide = x.to(tl.float32)
    rms = tl.rsqrt(tl.sum(wide * wide, 1) / WIDTH + eps)
    if QUANTISE:
        store_fp8(wide * weight[None, :], rms, out_ptr, scales_ptr, where, row, mask, valid)
    else:
        tl.store(out_ptr + where, (wide * rms[:, None] * weight[None, :]).to(out_ptr.dtype.element_ty), mask=mask)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., width], one or two leading dimensions of any strides (heads of a fused projection, say)."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, None, weight, eps, out, None)
    return out


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """residual += x in place; returns rms_norm(residual)."""
    out = torch.empty_like(residual)
    _launch(x, residual, weight, eps, out, None)
    return out


def rms_norm_fp8(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm (after residual += x, where given) as (8-bit floats [tokens, width], float32 scales [tokens])."""
    out = torch.empty(x.shape, dtype=FP8, device=x.device)
    scales = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    _launch(x, residual, weight, eps, out, scales)
    return out, scales


def _launch(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, out: torch.Tensor,
    scales: torch.Tensor | None,
) -> None:  # fmt: skip
    width = x.shape[-1]
    heads = x.shape[1] if x.dim() == 3 else 1
    assert x.stride(-1) == 1 and x.dim() <= 3 and (residual is None or residual.is_contiguous())
    rows = x.numel() // width
    if rows == 0:
        return
    block = power_of_two(width)
    together = max(1, min(16, 1024 // block))  # small rows (heads) share a program
    norm_kernel[(-(-rows // together),)](
        x, x if residual is None else residual, weight, out, out if scales is None else scales, rows, heads,
        x.stride(0) if x.dim() > 1 else 0, x.stride(1) if x.dim() == 3 else 0, eps,
        WIDTH=width, BLOCK=block, ROWS=together, ADD=residual is not None, QUANTISE=scales is not None,
        num_warps=min(16, max(4, block // 512)), **overlap(x.device),
    )  # fmt: skip
