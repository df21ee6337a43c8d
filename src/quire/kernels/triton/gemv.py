# mypy: allow-untyped-defs, allow-incomplete-defs
"""Products of few rows with a large matrix: the time is that of reading the weights, so nothing else may take any.

    out [rows, n] = x [rows, k] · weight [n, k]ᵀ          weights are the tall side of the tensor cores' tile

Before: RMS norm of x (scaled by the norm's weight on the way in, by 1 / rms on the way out). After: scales of 8-bit
operands, bias, SiLU-and-multiply of gate and up halves, residual. Several programs may share a tile's reduction; the
last one adds up in a fixed order. Where launches overlap, the first weights are fetched into the cache before x is
waited for.

Plain twin: `twins.matmul`. Refuses to know: which layer this is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.triton import configs
from quire.kernels.triton.activation import silu
from quire.kernels.triton.configs import Matmul
from quire.kernels.triton.launch import counters, overlap, power_of_two

PREFETCH_BYTES = 2048  # of each weight row, ahead of x


@triton.jit
def finish(acc, up, bias, scale, n, n_mask, N, GATED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SCALE: tl.constexpr):
    """Weight scales, bias and gate of a tile [rows, outputs]; the up half belongs to rows N + n of the weight."""
    if HAS_SCALE:
        acc *= tl.load(scale + n, mask=n_mask, other=0.0)[None, :]
        if GATED:
            up *= tl.load(scale + N + n, mask=n_mask, other=0.0)[None, :]
    if HAS_BIAS:
        acc += tl.load(bias + n, mask=n_mask, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up += tl.load(bias + N + n, mask=n_mask, other=0.0).to(tl.float32)[None, :]
    if GATED:
        acc = silu(acc) * up
    return acc


@triton.jit
def _tile(weight, n, n_mask, k, K, EVEN: tl.constexpr):
    where = weight + n.to(tl.int64)[:, None] * K + k[None, :]
    if EVEN:
        return tl.load(where, eviction_policy="evict_first")
    return tl.load(where, mask=n_mask[:, None] & (k < K)[None, :], other=0.0, eviction_policy="evict_first")


@triton.jit
def _prefetch(address, SIZE: tl.constexpr):
    """SIZE bytes from each address on their way to the cache."""
    size = tl.full(address.shape, SIZE, tl.int32)
    fetch: tl.constexpr = "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;"
    tl.inline_asm_elementwise(fetch, "=r,l,r", [address, size], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit(do_not_specialize=["M"])
def small_matmul_kernel(
    x_ptr, weight_ptr, out_ptr, norm_ptr, residual_ptr, bias_ptr, x_scale_ptr, scale_ptr, partial, partial_square,
    counters_ptr, M, stride_x, stride_out, eps,
    N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr, RESIDUAL: tl.constexpr, BIAS: tl.constexpr,
    X_SCALE: tl.constexpr, W_SCALE: tl.constexpr, PRECISION: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    EVEN: tl.constexpr = (N % BLOCK_N == 0) and (K % (BLOCK_K * SPLITS) == 0)
    STEPS: tl.constexpr = (K + BLOCK_K * SPLITS - 1) // (BLOCK_K * SPLITS)
    tile, split = tl.program_id(0), tl.program_id(1)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    n_mask = n < N
    m = tl.arange(0, BLOCK_M)
    k0 = split * STEPS * BLOCK_K
    if PDL:
        if PREFETCH > 0 and EVEN:
            first = (weight_ptr + n.to(tl.int64) * K + k0).to(tl.int64)
            _prefetch(first, PREFETCH)
            if GATED:
                first = (weight_ptr + (n + N).to(tl.int64) * K + k0).to(tl.int64)
                _prefetch(first, PREFETCH)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    square = tl.zeros([BLOCK_M], tl.float32)
    for step in range(STEPS):
        k = k0 + step * BLOCK_K + tl.arange(0, BLOCK_K)
        x_mask = (m < M)[:, None] & (k < K)[None, :]
        x = tl.load(x_ptr + m.to(tl.int64)[:, None] * stride_x + k[None, :], mask=x_mask, other=0.0)
        if NORM:
            wide = x.to(tl.float32)
            square += tl.sum(wide * wide, 1)
            x = (wide * tl.load(norm_ptr + k, mask=k < K, other=0.0).to(tl.float32)[None, :]).to(x.dtype)
        xt = tl.trans(x)
        acc = tl.dot(_tile(weight_ptr, n, n_mask, k, K, EVEN).to(x.dtype), xt, acc, input_precision=PRECISION)
        if GATED:
            lower = _tile(weight_ptr + N * K, n, n_mask, k, K, EVEN)
            up = tl.dot(lower.to(x.dtype), xt, up, input_precision=PRECISION)

    if SPLITS > 1:
        PARTS: tl.constexpr = 2 if GATED else 1
        within = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + m[None, :]
        base = partial + tile.to(tl.int64) * (SPLITS * PARTS * BLOCK_N * BLOCK_M)
        own = base + split * (PARTS * BLOCK_N * BLOCK_M)
        tl.store(own + within, acc)
        if GATED:
            tl.store(own + BLOCK_N * BLOCK_M + within, up)
        if NORM:
            tl.store(partial_square + (tile * SPLITS + split) * BLOCK_M + m, square)
        tl.debug_barrier()
        if tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel") < SPLITS - 1:
            return
        tl.store(counters_ptr + tile, 0)
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        square = tl.zeros([BLOCK_M], tl.float32)
        for s in range(SPLITS):
            own = base + s * (PARTS * BLOCK_N * BLOCK_M)
            acc += tl.load(own + within, cache_modifier=".cg")
            if GATED:
                up += tl.load(own + BLOCK_N * BLOCK_M + within, cache_modifier=".cg")
            if NORM:
                square += tl.load(partial_square + (tile * SPLITS + s) * BLOCK_M + m, cache_modifier=".cg")

    if NORM:
        rms = tl.rsqrt(square / K + eps)
        acc *= rms[None, :]
        up *= rms[None, :]
    if X_SCALE:
        x_scale = tl.load(x_scale_ptr + m, mask=m < M, other=0.0)
        acc *= x_scale[None, :]
        up *= x_scale[None, :]
    y = finish(tl.trans(acc), tl.trans(up), bias_ptr, scale_ptr, n, n_mask, N, GATED, BIAS, W_SCALE)
    where = m.to(tl.int64)[:, None] * stride_out + n[None, :]
    mask = (m < M)[:, None] & n_mask[None, :]
    if RESIDUAL:
        y += tl.load(residual_ptr + where, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + where, y.to(out_ptr.dtype.element_ty), mask=mask)


def small_matmul(
    x: torch.Tensor,  # [rows, k]; rows at most 64
    weight: torch.Tensor,  # [n, k], contiguous; 8-bit with x of 8 bits or more
    *,
    norm: torch.Tensor | None = None,  # [k]: x is RMS-normed with this weight first
    eps: float = 0.0,
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
    config = config or configs.small_matmul(weight.element_size(), rows, weight.shape[0])
    assert config is not None and rows <= 64 and weight.is_contiguous() and x.stride(1) == 1
    if out is None:
        default = x.dtype if residual is None else residual.dtype
        out = torch.empty(rows, outputs, dtype=out_dtype or default, device=x.device)
    assert residual is None or residual.stride() == out.stride()
    block_m = max(16, power_of_two(rows))
    block_n = max(16, config.block_n // (2 if gated else 1))  # two accumulators: half the outputs
    tiles = -(-outputs // block_n)
    partial = square = count = x  # placeholders: not read unless split
    if config.splits > 1:
        size = tiles * config.splits * block_m
        partial = torch.empty(size * block_n * (2 if gated else 1), dtype=torch.float32, device=x.device)
        square = torch.empty(size, dtype=torch.float32, device=x.device)
        count = counters(x.device, tiles)
    reach = -(-width // config.splits) * weight.element_size()
    small_matmul_kernel[(tiles, config.splits)](
        x, weight, out, x if norm is None else norm, x if residual is None else residual, x if bias is None else bias,
        x if x_scale is None else x_scale, x if weight_scale is None else weight_scale, partial, square, count,
        rows, x.stride(0), out.stride(0), eps,
        N=outputs, K=width, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=config.block_k, SPLITS=config.splits,
        NORM=norm is not None, GATED=gated, RESIDUAL=residual is not None, BIAS=bias is not None,
        X_SCALE=x_scale is not None, W_SCALE=weight_scale is not None,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", PREFETCH=min(PREFETCH_BYTES, reach // 16 * 16),
        num_warps=config.warps, num_stages=config.stages, **overlap(x.device),
    )  # fmt: skip
    return out
