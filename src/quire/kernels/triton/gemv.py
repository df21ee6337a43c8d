# mypy: allow-untyped-defs, allow-incomplete-defs
"""Products of few rows with a large matrix: the time is that of reading the weights, so nothing else may take any.

    out [rows, n] = x [rows, k] · weight [n, k]ᵀ

`row_matmul`, for a single row: a program reads a few whole rows of the weight, the first of them before it waits for
x, norms x on the way in, and gates or adds the residual on the way out: three launches saved and more bytes a second
than the library reaches. Weights of 8 bits come twice as fast and have a kernel of their own, which spends fewer
instructions on each. `small_matmul`, up to 128 rows: weights are the tall side of the tensor cores' tile, or the narrow
one beside x padded to 64 rows where that gives every processor a tile; several programs may share a tile's reduction,
and the last one adds up in a fixed order.

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


@triton.jit
def row_matmul_kernel(
    x_ptr, weight_ptr, out_ptr, norm_ptr, residual_ptr, stride_x, stride_out, eps,
    N: tl.constexpr, K: tl.constexpr, M: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK_K: tl.constexpr,
    NORM: tl.constexpr, GATED: tl.constexpr, RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    k = tl.arange(0, BLOCK_K)
    at = weight_ptr + n.to(tl.int64)[:, None] * K + k[None, :]
    first = tl.load(at, eviction_policy="evict_first")
    first_up = first
    if GATED:
        first_up = tl.load(at + N * K, eviction_policy="evict_first")
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for m in tl.static_range(M):
        acc = tl.zeros([OUTPUTS, BLOCK_K], tl.float32)
        up = tl.zeros([OUTPUTS, BLOCK_K], tl.float32)
        square = tl.zeros([BLOCK_K], tl.float32)
        for step in tl.static_range(K // BLOCK_K):
            x = tl.load(x_ptr + m * stride_x + step * BLOCK_K + k).to(tl.float32)
            if NORM:
                square += x * x
                x *= tl.load(norm_ptr + step * BLOCK_K + k).to(tl.float32)
            w = first
            if step > 0:
                w = tl.load(at + step * BLOCK_K, eviction_policy="evict_first")
            acc += w.to(tl.float32) * x[None, :]
            if GATED:
                w = first_up
                if step > 0:
                    w = tl.load(at + N * K + step * BLOCK_K, eviction_policy="evict_first")
                up += w.to(tl.float32) * x[None, :]
        y, gate = tl.sum(acc, 1), tl.sum(up, 1)
        if NORM:
            rms = tl.rsqrt(tl.sum(square, 0) / K + eps)
            y *= rms
            gate *= rms
        if GATED:
            y = silu(y) * gate
        if RESIDUAL:
            y += tl.load(residual_ptr + m * stride_out + n).to(tl.float32)
        tl.store(out_ptr + m * stride_out + n, y.to(out_ptr.dtype.element_ty))


@triton.jit
def row_fp8_kernel(
    x_ptr, weight_ptr, out_ptr, norm_ptr, residual_ptr, scale_ptr, stride_x, stride_out, eps,
    N: tl.constexpr, K: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK_K: tl.constexpr,
    NORM: tl.constexpr, GATED: tl.constexpr, RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    STEPS: tl.constexpr = K // BLOCK_K
    PARTS: tl.constexpr = 2 if GATED else 1  # rows of the weight an output, side by side in the tile
    row, k = tl.arange(0, OUTPUTS * PARTS), tl.arange(0, BLOCK_K)
    of_weight = tl.program_id(0) * OUTPUTS + row // PARTS + row % PARTS * N
    at = weight_ptr + of_weight.to(tl.int64)[:, None] * K + k[None, :]
    x_ptr += tl.program_id(1) * stride_x
    next_w = tl.load(at, eviction_policy="evict_first")
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    rms = 1.0
    if NORM:  # x is summed up first, while the weights are on their way
        square = tl.zeros([BLOCK_K], tl.float32)
        for step in tl.static_range(STEPS):
            x = tl.load(x_ptr + step * BLOCK_K + k).to(tl.float32)
            square += x * x
        rms = tl.rsqrt(tl.sum(square, 0) / K + eps)
    acc = tl.zeros([OUTPUTS * PARTS, BLOCK_K // 4], tl.float32)
    next_x = tl.load(x_ptr + k)
    for step in tl.static_range(STEPS):
        w, x = next_w, next_x.to(tl.float32)
        if step + 1 < STEPS:  # asked for here, because no load passes the barriers that give x the weights' layout
            next_w = tl.load(at + (step + 1) * BLOCK_K, eviction_policy="evict_first")
            next_x = tl.load(x_ptr + (step + 1) * BLOCK_K + k)
        if NORM:
            x *= tl.load(norm_ptr + step * BLOCK_K + k).to(tl.float32) * rms
        acc = _add_products(acc, w, x)
    y = tl.sum(acc, 1) * tl.load(scale_ptr + of_weight)
    if GATED:
        gate, up = tl.split(tl.reshape(y, [OUTPUTS, 2]))
        y = silu(gate) * up
    where = tl.program_id(1) * stride_out + tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    if RESIDUAL:
        y += tl.load(residual_ptr + where).to(tl.float32)
    tl.store(out_ptr + where, y.to(out_ptr.dtype.element_ty))


@triton.jit
def _add_products(acc, w, x):
    """acc [rows, k / 4] plus w [rows, k] times x [k], four neighbours to a number: numbers for every column would take
    four times the registers and, at the end, an addition a weight."""
    w_even, w_odd = _halves(w.to(tl.float32))
    x_even, x_odd = _halves(x[None, :])
    w0, w2 = _halves(w_even)
    w1, w3 = _halves(w_odd)
    x0, x2 = _halves(x_even)
    x1, x3 = _halves(x_odd)
    acc += w0 * x0
    acc += w1 * x1
    acc += w2 * x2
    acc += w3 * x3
    return acc


@triton.jit
def _halves(t):
    """The columns of even and of odd index."""
    return tl.split(tl.reshape(t, [t.shape[0], t.shape[1] // 2, 2]))


def row_matmul(
    x: torch.Tensor,  # [rows, k]; few rows
    weight: torch.Tensor,  # [n, k], contiguous; x's dtype or e4m3
    *,
    norm: torch.Tensor | None = None,  # [k]: x is RMS-normed with this weight first
    eps: float = 0.0,
    gated: bool = False,  # weight holds gate then up: out is silu(gate) * up, [rows, n / 2]
    residual: torch.Tensor | None = None,  # added to the result; may be `out`
    weight_scale: torch.Tensor | None = None,  # [n], of 8-bit weights, and only of these
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    rows, width = x.shape
    outputs = weight.shape[0] // (2 if gated else 1)
    launch = configs.row_matmul(outputs, width, weight.element_size(), normed=norm is not None, gated=gated)
    assert launch is not None and weight.is_contiguous() and x.stride(1) == 1, "ask configs.row_matmul first"
    if out is None:
        out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    assert residual is None or residual.stride() == out.stride()
    assert (weight_scale is not None) == (weight.element_size() == 1)
    tensors = (x, weight, out, x if norm is None else norm, x if residual is None else residual)
    numbers = (x.stride(0), out.stride(0), eps)
    tiles = outputs // launch.block_n
    options = {
        "N": outputs, "K": width, "OUTPUTS": launch.block_n, "BLOCK_K": launch.block_k,
        "NORM": norm is not None, "GATED": gated, "RESIDUAL": residual is not None,
        "num_warps": launch.warps, **overlap(x.device),
    }  # fmt: skip
    if weight_scale is None:
        row_matmul_kernel[(tiles,)](*tensors, *numbers, M=rows, **options)
    else:
        row_fp8_kernel[(tiles, rows)](*tensors, weight_scale, *numbers, **options)
    return out


@triton.jit(do_not_specialize=["M"])
def small_matmul_kernel(
    x_ptr, weight_ptr, out_ptr, residual_ptr, x_scale_ptr, scale_ptr, partial, counters_ptr, M, stride_x, stride_out,
    N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr, X_TALL: tl.constexpr, RESIDUAL: tl.constexpr, SCALES: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    EVEN: tl.constexpr = (N % BLOCK_N == 0) and (K % (BLOCK_K * SPLITS) == 0)
    STEPS: tl.constexpr = (K + BLOCK_K * SPLITS - 1) // (BLOCK_K * SPLITS)
    TALL: tl.constexpr = BLOCK_M if X_TALL else BLOCK_N
    NARROW: tl.constexpr = BLOCK_N if X_TALL else BLOCK_M
    tile, split = tl.program_id(0), tl.program_id(1)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    acc = tl.zeros([TALL, NARROW], tl.float32)
    for step in range(STEPS):
        k = (split * STEPS + step) * BLOCK_K + tl.arange(0, BLOCK_K)
        x_mask = (m < M)[:, None] & (k < K)[None, :]
        x = tl.load(x_ptr + m.to(tl.int64)[:, None] * stride_x + k[None, :], mask=x_mask, other=0.0)
        where = weight_ptr + n.to(tl.int64)[:, None] * K + k[None, :]
        if EVEN:
            w = tl.load(where, eviction_policy="evict_first")
        else:
            inside = (n < N)[:, None] & (k < K)[None, :]
            w = tl.load(where, mask=inside, other=0.0, eviction_policy="evict_first")
        if X_TALL:
            acc = tl.dot(x, w.T, acc, input_precision=PRECISION)
        else:
            acc = tl.dot(w, x.T, acc, input_precision=PRECISION)

    if SPLITS > 1:
        within = tl.arange(0, TALL)[:, None] * NARROW + tl.arange(0, NARROW)[None, :]
        base = partial + tile.to(tl.int64) * (SPLITS * TALL * NARROW)
        tl.store(base + split * (TALL * NARROW) + within, acc)
        tl.debug_barrier()
        if tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel") < SPLITS - 1:
            return
        tl.store(counters_ptr + tile, 0)
        acc = tl.zeros([TALL, NARROW], tl.float32)
        for s in range(SPLITS):
            acc += tl.load(base + s * (TALL * NARROW) + within, cache_modifier=".cg")

    y = acc if X_TALL else acc.T
    if SCALES:
        y *= tl.load(x_scale_ptr + m, mask=m < M, other=0.0)[:, None]
        y *= tl.load(scale_ptr + n, mask=n < N, other=0.0)[None, :]
    where = m.to(tl.int64)[:, None] * stride_out + n[None, :]
    mask = (m < M)[:, None] & (n < N)[None, :]
    if RESIDUAL:
        y += tl.load(residual_ptr + where, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + where, y.to(out_ptr.dtype.element_ty), mask=mask)


def small_matmul(
    x: torch.Tensor,  # [rows, k]; rows at most 128
    weight: torch.Tensor,  # [n, k], contiguous; of x's dtype
    *,
    residual: torch.Tensor | None = None,  # added to the result; may be `out`
    x_scale: torch.Tensor | None = None,  # [rows], of 8-bit x
    weight_scale: torch.Tensor | None = None,  # [n], of 8-bit weights
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    config: Matmul | None = None,
) -> torch.Tensor:
    rows, width = x.shape
    outputs = weight.shape[0]
    config = config or configs.small_matmul(weight.element_size(), rows, outputs, width)
    assert config is not None and rows <= (config.rows or 128), "ask configs.small_matmul first"
    assert x.dtype == weight.dtype and weight.is_contiguous() and x.stride(1) == 1
    assert (x_scale is None) == (weight_scale is None)
    if out is None:
        default = x.dtype if residual is None else residual.dtype
        out = torch.empty(rows, outputs, dtype=out_dtype or default, device=x.device)
    if not rows:
        return out
    assert residual is None or residual.stride() == out.stride()
    block_m = config.rows or max(16, power_of_two(rows))
    tiles = -(-outputs // config.block_n)
    partial = count = x  # placeholders: not read unless split
    if config.splits > 1:
        size = tiles * config.splits * block_m * config.block_n
        partial = torch.empty(size, dtype=torch.float32, device=x.device)
        count = counters(x.device, tiles)
    small_matmul_kernel[(tiles, config.splits)](
        x, weight, out, x if residual is None else residual, x if x_scale is None else x_scale,
        x if weight_scale is None else weight_scale, partial, count, rows, x.stride(0), out.stride(0),
        N=outputs, K=width, BLOCK_M=block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, SPLITS=config.splits,
        X_TALL=config.rows > 0, RESIDUAL=residual is not None, SCALES=x_scale is not None,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=config.warps, num_stages=config.stages, **overlap(x.device),
    )  # fmt: skip
    return out
