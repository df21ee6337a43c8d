# mypy: allow-untyped-defs, allow-incomplete-defs
"""Tiled products: of 8-bit rows where the library is slow, of gate and up with what follows them, and of any rows where
a row's bits may not depend on how many others there are (one tiling, one order of summing, whatever the batch).

    out [rows, n] = x [rows, k] · weight [n, k]ᵀ          tiles come through tensor descriptors; programs stay and
                                                         take tile after tile, neighbours sharing operands in cache
    out [rows, n] = silu(x · gateᵀ) * (x · upᵀ)           a tile holds n of gate and the same n of up, side by side

Plain twin: `twins.matmul`. Refuses to know: which layer this is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from quire.kernels.triton.activation import silu
from quire.kernels.triton.configs import Matmul
from quire.kernels.triton.launch import overlap, processors

GROUP_M = 8  # tiles of rows that walk the outputs together


@triton.jit
def _place(tile, tiles_m, TILES_N: tl.constexpr, GROUP: tl.constexpr):
    """Which tile of rows, and which of outputs."""
    first = tile // (GROUP * TILES_N) * GROUP
    size = tl.minimum(tiles_m - first, GROUP)
    within = tile % (GROUP * TILES_N)
    return first + within % size, within // size


@triton.jit(do_not_specialize=["M"])
def matmul_kernel(
    x_desc, weight_desc, out_ptr, x_scale_ptr, scale_ptr, M, stride_out,
    N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr, SCALES: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    tiles_m = tl.cdiv(M, BLOCK_M)
    TILES_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    for tile in tl.range(tl.program_id(0), tiles_m * TILES_N, tl.num_programs(0), flatten=True):
        tile_m, tile_n = _place(tile, tiles_m, TILES_N, GROUP)
        m0, n0 = tile_m * BLOCK_M, tile_n * BLOCK_N
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in range(0, K, BLOCK_K):
            acc = tl.dot(x_desc.load([m0, k]), weight_desc.load([n0, k]).T, acc, input_precision=PRECISION)
        m = m0 + tl.arange(0, BLOCK_M)
        n = n0 + tl.arange(0, BLOCK_N)
        if SCALES:
            acc *= tl.load(x_scale_ptr + m, mask=m < M, other=0.0)[:, None]
            acc *= tl.load(scale_ptr + n, mask=n < N, other=0.0)[None, :]
        mask = (m < M)[:, None] & (n < N)[None, :]
        where = m.to(tl.int64)[:, None] * stride_out + n[None, :]
        tl.store(out_ptr + where, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M"])
def gated_matmul_kernel(
    x_desc, weight_desc, out_desc, x_scale_ptr, scale_ptr, M,
    N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr, SCALES: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """weight_desc [2, N, K]: gate, up."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    tiles_m = tl.cdiv(M, BLOCK_M)
    TILES_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    for tile in tl.range(tl.program_id(0), tiles_m * TILES_N, tl.num_programs(0), flatten=True):
        tile_m, tile_n = _place(tile, tiles_m, TILES_N, GROUP)
        m0, n0 = tile_m * BLOCK_M, tile_n * BLOCK_N
        acc = tl.zeros([BLOCK_M, 2 * BLOCK_N], tl.float32)
        for k in range(0, K, BLOCK_K):
            weight = weight_desc.load([0, n0, k]).reshape(2 * BLOCK_N, BLOCK_K)
            acc = tl.dot(x_desc.load([m0, k]), weight.T, acc, input_precision=PRECISION)
        gate, up = acc.reshape(BLOCK_M, 2, BLOCK_N).permute(0, 2, 1).split()
        if SCALES:
            m = m0 + tl.arange(0, BLOCK_M)
            n = n0 + tl.arange(0, BLOCK_N)
            x_scale = tl.load(x_scale_ptr + m, mask=m < M, other=0.0)[:, None]
            gate *= x_scale * tl.load(scale_ptr + n, mask=n < N, other=0.0)[None, :]
            up *= x_scale * tl.load(scale_ptr + N + n, mask=n < N, other=0.0)[None, :]
        out_desc.store([m0, n0], (silu(gate) * up).to(out_desc.dtype))


def matmul(
    x: torch.Tensor,  # [rows, k], contiguous
    weight: torch.Tensor,  # [n, k], of x's dtype
    config: Matmul,
    *,
    x_scale: torch.Tensor | None = None,  # [rows], of 8-bit x
    weight_scale: torch.Tensor | None = None,  # [n], of 8-bit weights
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    rows, width = x.shape
    outputs = weight.shape[0]
    assert x.dtype == weight.dtype and width * x.element_size() % 16 == 0, "descriptors need rows of 16 bytes"
    assert (x_scale is None) == (weight_scale is None)
    out = torch.empty(rows, outputs, dtype=out_dtype or x.dtype, device=x.device)
    if not rows:
        return out
    tiles = -(-rows // config.rows) * -(-outputs // config.block_n)
    matmul_kernel[(min(tiles, processors(x.device)),)](
        TensorDescriptor.from_tensor(x, [config.rows, config.block_k]),
        TensorDescriptor.from_tensor(weight, [config.block_n, config.block_k]),
        out, out if x_scale is None else x_scale, out if weight_scale is None else weight_scale, rows, out.stride(0),
        N=outputs, K=width, BLOCK_M=config.rows, BLOCK_N=config.block_n, BLOCK_K=config.block_k, GROUP=GROUP_M,
        SCALES=x_scale is not None, PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=config.warps, num_stages=config.stages, **overlap(x.device),
    )  # fmt: skip
    return out


def gated_matmul(
    x: torch.Tensor,  # [rows, k], contiguous
    weight: torch.Tensor,  # [2 n, k], of x's dtype, contiguous: gate, then up
    config: Matmul,  # its block_n counts both
    *,
    x_scale: torch.Tensor | None = None,  # [rows], of 8-bit x
    weight_scale: torch.Tensor | None = None,  # [2 n], of 8-bit weights
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """silu(gate) * up, [rows, n]."""
    rows, width = x.shape
    outputs = weight.shape[0] // 2
    out = torch.empty(rows, outputs, dtype=out_dtype or x.dtype, device=x.device)
    if not rows:
        return out
    assert x.dtype == weight.dtype and width * x.element_size() % 16 == outputs * out.element_size() % 16 == 0
    assert (x_scale is None) == (weight_scale is None)
    block_n = config.block_n // 2
    tiles = -(-rows // config.rows) * -(-outputs // block_n)
    gated_matmul_kernel[(min(tiles, processors(x.device)),)](
        TensorDescriptor.from_tensor(x, [config.rows, config.block_k]),
        TensorDescriptor.from_tensor(weight.view(2, outputs, width), [2, block_n, config.block_k]),
        TensorDescriptor.from_tensor(out, [config.rows, block_n]),
        out if x_scale is None else x_scale, out if weight_scale is None else weight_scale, rows,
        N=outputs, K=width, BLOCK_M=config.rows, BLOCK_N=block_n, BLOCK_K=config.block_k, GROUP=GROUP_M,
        SCALES=x_scale is not None, PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=config.warps, num_stages=config.stages, **overlap(x.device),
    )  # fmt: skip
    return out
