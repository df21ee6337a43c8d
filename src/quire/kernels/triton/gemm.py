# mypy: allow-untyped-defs, allow-incomplete-defs
"""Tiled products of many rows, with the epilogues that would otherwise be launches: SiLU-and-multiply of gate and up
halves, residual, scales of 8-bit operands (a scale per row of x and per output).

    out [rows, n] = x [rows, k] · weight [n, k]ᵀ          tiles come through tensor descriptors; programs stay and
                                                         take tile after tile, neighbours sharing operands in cache

Plain twin: `twins.matmul`. Refuses to know: which layer this is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from quire.kernels.triton import configs
from quire.kernels.triton.configs import Matmul
from quire.kernels.triton.gemv import finish
from quire.kernels.triton.launch import overlap, processors

GROUP_M = 8  # tiles of rows that walk the outputs together


@triton.jit(do_not_specialize=["M"])
def matmul_kernel(
    x_desc, weight_desc, out_ptr, residual_ptr, bias_ptr, x_scale_ptr, scale_ptr, M, stride_out,
    N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr, GATED: tl.constexpr, RESIDUAL: tl.constexpr, BIAS: tl.constexpr, X_SCALE: tl.constexpr,
    W_SCALE: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    tiles_m = tl.cdiv(M, BLOCK_M)
    TILES_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    for tile in tl.range(tl.program_id(0), tiles_m * TILES_N, tl.num_programs(0), flatten=True):
        group = tile // (GROUP * TILES_N)
        first = group * GROUP
        size = tl.minimum(tiles_m - first, GROUP)
        m0 = (first + tile % (GROUP * TILES_N) % size) * BLOCK_M
        n0 = tile % (GROUP * TILES_N) // size * BLOCK_N
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32) if GATED else acc
        for k in range(0, K, BLOCK_K):
            x = x_desc.load([m0, k])
            acc = tl.dot(x, weight_desc.load([n0, k]).T, acc, input_precision=PRECISION)
            if GATED:
                up = tl.dot(x, weight_desc.load([N + n0, k]).T, up, input_precision=PRECISION)
        m = m0 + tl.arange(0, BLOCK_M)
        n = n0 + tl.arange(0, BLOCK_N)
        if X_SCALE:
            x_scale = tl.load(x_scale_ptr + m, mask=m < M, other=0.0)
            acc *= x_scale[:, None]
            if GATED:
                up *= x_scale[:, None]
        y = finish(acc, up, bias_ptr, scale_ptr, n, n < N, N, GATED, BIAS, W_SCALE)
        where = m.to(tl.int64)[:, None] * stride_out + n[None, :]
        mask = (m < M)[:, None] & (n < N)[None, :]
        if RESIDUAL:
            y += tl.load(residual_ptr + where, mask=mask, other=0.0).to(tl.float32)
        tl.store(out_ptr + where, y.to(out_ptr.dtype.element_ty), mask=mask)


def matmul(
    x: torch.Tensor,  # [rows, k]
    weight: torch.Tensor,  # [n, k], of x's dtype
    *,
    gated: bool = False,  # weight holds gate then up: out is silu(gate) * up, [rows, n / 2]
    residual: torch.Tensor | None = None,  # added to the result; may be `out`
    bias: torch.Tensor | None = None,  # [n]
    x_scale: torch.Tensor | None = None,  # [rows], of 8-bit x
    weight_scale: torch.Tensor | None = None,  # [n], of 8-bit weights
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    config: Matmul | None = None,
) -> torch.Tensor:
    rows, width = x.shape
    outputs = weight.shape[0] // (2 if gated else 1)
    config = config or configs.large_matmul(x.element_size(), rows)
    assert x.dtype == weight.dtype and width * x.element_size() % 16 == 0, "descriptors need rows of 16 bytes"
    if out is None:
        default = x.dtype if residual is None else residual.dtype
        out = torch.empty(rows, outputs, dtype=out_dtype or default, device=x.device)
    assert residual is None or residual.stride() == out.stride()
    block_n = config.block_n // (2 if gated else 1)  # two accumulators: half the outputs
    tiles = -(-rows // config.rows) * -(-outputs // block_n)
    matmul_kernel[(min(tiles, processors(x.device)),)](
        TensorDescriptor.from_tensor(x, [config.rows, config.block_k]),
        TensorDescriptor.from_tensor(weight, [block_n, config.block_k]),
        out, x if residual is None else residual, x if bias is None else bias, x if x_scale is None else x_scale,
        x if weight_scale is None else weight_scale, rows, out.stride(0),
        N=outputs, K=width, BLOCK_M=config.rows, BLOCK_N=block_n, BLOCK_K=config.block_k, GROUP=GROUP_M,
        GATED=gated, RESIDUAL=residual is not None, BIAS=bias is not None, X_SCALE=x_scale is not None,
        W_SCALE=weight_scale is not None, PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=config.warps, num_stages=config.stages, **overlap(x.device),
    )  # fmt: skip
    return out
