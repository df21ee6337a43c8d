# mypy: allow-untyped-defs, allow-incomplete-defs
"""Products with weights of 4 bits: few bytes are read, and they become numbers on their way to the tensor cores.

    weight[n, k] = (q[n, k] - zero[n, k // group]) * scale[n, k // group]

Integers lie in words as `int4_words` packs them: a tile of rows is one run of bytes, and each quarter of a chunk comes
out of its words by a shift and a mask. Scales and zeros are [groups, rows].

Plain twin: `reference.int4_words.unpacked`. Refuses to know: layers, file formats.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.kernels.reference.int4_words import CHUNK
from quire.kernels.triton.launch import counters, overlap

# Two words at a time: an integer below the exponent of 128 is 128 + itself, and from that -128 - zero is exact
_SPLIT: tl.constexpr = tl.constexpr(
    """
    {
    .reg .b32 t, one;
    mov.b32 one, 0x3f803f80;
    lop3.b32 t, $4, 0x000f000f, 0x43004300, 0xea;
    fma.rn.bf16x2 $0, t, one, $5;
    shr.u32 t, $4, 4;
    lop3.b32 t, t, 0x000f000f, 0x43004300, 0xea;
    fma.rn.bf16x2 $1, t, one, $5;
    shr.u32 t, $4, 8;
    lop3.b32 t, t, 0x000f000f, 0x43004300, 0xea;
    fma.rn.bf16x2 $2, t, one, $5;
    shr.u32 t, $4, 12;
    lop3.b32 t, t, 0x000f000f, 0x43004300, 0xea;
    fma.rn.bf16x2 $3, t, one, $5;
    }
    """
)


@triton.jit
def _quarters(words, zero, WHOLE: tl.constexpr, dtype: tl.constexpr):
    """Each quarter's integers less their zero, in `dtype`. WHOLE: zeros are whole numbers, `dtype` is bf16, and the
    chip does two at a time."""
    if WHOLE:
        a, b, c, d = tl.inline_asm_elementwise(
            _SPLIT, "=r,=r,=r,=r,r,r", [words, (-128.0 - zero).to(tl.bfloat16)],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        a = ((words & 15).to(tl.float32) - zero).to(dtype)
        b = (((words >> 4) & 15).to(tl.float32) - zero).to(dtype)
        c = (((words >> 8) & 15).to(tl.float32) - zero).to(dtype)
        d = (((words >> 12) & 15).to(tl.float32) - zero).to(dtype)
    return a, b, c, d


@triton.jit
def _scale_and_zero(scale_ptr, zero_ptr, chunk, n, N: tl.constexpr, CHUNKS: tl.constexpr, GROUP: tl.constexpr):
    """Of a chunk's first group, for outputs n."""
    at, inside = (chunk * 128 // GROUP) * N + n, n < tl.where(chunk < CHUNKS, N, 0)
    scale = tl.load(scale_ptr + at, mask=inside, other=0.0)
    return scale.to(tl.float32), tl.load(zero_ptr + at, mask=inside, other=0).to(tl.float32)


@triton.jit
def _quarter(
    words, quarter: tl.constexpr, scale_ptr, zero_ptr, chunk, n, N: tl.constexpr, CHUNKS: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Weights of one quarter of a chunk, float32, where it has a scale of its own."""
    at, inside = ((chunk * 128 + quarter * 32) // GROUP) * N + n, n < tl.where(chunk < CHUNKS, N, 0)
    scale = tl.load(scale_ptr + at, mask=inside, other=0.0).to(tl.float32)
    zero = tl.load(zero_ptr + at, mask=inside, other=0).to(tl.float32)
    return (((words >> (4 * quarter)) & 15).to(tl.float32) - zero[:, None]) * scale[:, None]


@triton.jit(do_not_specialize=["M"])
def int4_matmul_kernel(
    x_ptr, weight_ptr, scale_ptr, zero_ptr, out_ptr, residual_ptr, partial, counters_ptr, M, stride_x, stride_out,
    N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr, LATE: tl.constexpr, WHOLE: tl.constexpr, RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """LATE: scales multiply each group's sums, else the weights."""
    CHUNKS: tl.constexpr = K // 128
    STEPS: tl.constexpr = (CHUNKS + SPLITS - 1) // SPLITS
    TILES_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    tile, split = tl.program_id(0), tl.program_id(1)
    n = tile % TILES_N * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tile // TILES_N * BLOCK_M + tl.arange(0, BLOCK_M)
    word = tl.arange(0, 32)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    x_at = x_ptr + m.to(tl.int64)[None, :] * stride_x + word[:, None]
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    first = split * STEPS
    scale, zero = _scale_and_zero(scale_ptr, zero_ptr, first, n, N, CHUNKS, GROUP)
    for step in range(STEPS):
        chunk = first + step
        rows, columns = tl.where(chunk < CHUNKS, N, 0), tl.where(chunk < CHUNKS, M, 0)
        n_mask, m_mask = (n < rows)[:, None], (m < columns)[None, :]
        next_scale, next_zero = _scale_and_zero(scale_ptr, zero_ptr, chunk + 1, n, N, CHUNKS, GROUP)
        at = weight_ptr + (chunk.to(tl.int64) * N + n)[:, None] * 32 + word[None, :]
        words = tl.load(at, mask=n_mask, other=0, eviction_policy="evict_first")
        x0 = tl.load(x_at + chunk * 128, mask=m_mask, other=0.0)
        x1 = tl.load(x_at + chunk * 128 + 32, mask=m_mask, other=0.0)
        x2 = tl.load(x_at + chunk * 128 + 64, mask=m_mask, other=0.0)
        x3 = tl.load(x_at + chunk * 128 + 96, mask=m_mask, other=0.0)
        if GROUP < 128:
            acc = tl.dot(_quarter(words, 0, scale_ptr, zero_ptr, chunk, n, N, CHUNKS, GROUP).to(dtype), x0, acc)
            acc = tl.dot(_quarter(words, 1, scale_ptr, zero_ptr, chunk, n, N, CHUNKS, GROUP).to(dtype), x1, acc)
            acc = tl.dot(_quarter(words, 2, scale_ptr, zero_ptr, chunk, n, N, CHUNKS, GROUP).to(dtype), x2, acc)
            acc = tl.dot(_quarter(words, 3, scale_ptr, zero_ptr, chunk, n, N, CHUNKS, GROUP).to(dtype), x3, acc)
        else:
            a, b, c, d = _quarters(words, zero[:, None], WHOLE, dtype)
            if LATE:
                part = tl.dot(a, x0)
                part = tl.dot(b, x1, part)
                part = tl.dot(c, x2, part)
                part = tl.dot(d, x3, part)
                acc += part * scale[:, None]
            else:
                acc = tl.dot((a * scale[:, None]).to(dtype), x0, acc)
                acc = tl.dot((b * scale[:, None]).to(dtype), x1, acc)
                acc = tl.dot((c * scale[:, None]).to(dtype), x2, acc)
                acc = tl.dot((d * scale[:, None]).to(dtype), x3, acc)
            scale, zero = next_scale, next_zero

    if SPLITS > 1:
        within = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        base = partial + tile.to(tl.int64) * (SPLITS * BLOCK_N * BLOCK_M)
        tl.store(base + split * (BLOCK_N * BLOCK_M) + within, acc)
        tl.debug_barrier()
        if tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel") < SPLITS - 1:
            return
        tl.store(counters_ptr + tile, 0)
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for s in range(SPLITS):
            acc += tl.load(base + s * (BLOCK_N * BLOCK_M) + within, cache_modifier=".cg")

    y = acc.T
    where = m.to(tl.int64)[:, None] * stride_out + n[None, :]
    mask = (m < M)[:, None] & (n < N)[None, :]
    if RESIDUAL:
        y += tl.load(residual_ptr + where, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + where, y.to(out_ptr.dtype.element_ty), mask=mask)


@dataclass(frozen=True)
class Int4Tile:
    """One launch: rows of x by outputs, the reduction cut into `splits`."""

    rows: int
    outputs: int
    warps: int
    stages: int
    splits: int = 1
    late: bool = True


def choose_tile(rows: int, outputs: int, chunks: int) -> Int4Tile | None:
    """Measured on an H200 at the shapes of an 8B model: so many programs that all processors have some. None: unpacking
    the matrix and leaving the product to the library is faster."""
    wide = outputs >= 16384
    if rows > 128:
        return Int4Tile(256, 128, 8, 3, late=False) if wide and rows <= 256 else None
    if rows > 64:
        if outputs >= 6144:
            return Int4Tile(128, 128, 4, 3, splits=1 if wide else min(2, chunks), late=False)
        return Int4Tile(128, 64, 4, 4, splits=min(2, chunks))
    if rows <= 16:
        width, warps, programs = (128, 4, 1024) if wide else (64, 2, 512)
        return Int4Tile(16, width, warps, 3, splits=_splits(programs, outputs, width, chunks))
    return Int4Tile(32 if rows <= 32 else 64, 128, 4, 3, splits=_splits(192, outputs, 128, chunks))


def _splits(programs: int, outputs: int, width: int, chunks: int) -> int:
    """Into how many parts a reduction is cut so that there are about so many programs: a power of two."""
    wanted = max(programs // -(-outputs // width), 1)
    return min(1 << wanted.bit_length() - 1, 8, chunks)


def int4_matmul(
    x: torch.Tensor,  # [rows, k]
    words: torch.Tensor,  # int16 [k / 128, n, 32]
    scale: torch.Tensor,  # [groups, n]
    zero: torch.Tensor,  # [groups, n]; whole numbers if uint8
    *,
    tile: Int4Tile,
    residual: torch.Tensor | None = None,  # added to the result; may be `out`
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    rows, width = x.shape
    chunks, outputs, _ = words.shape
    assert chunks * CHUNK == width and x.stride(1) == 1 and words.is_contiguous()
    if out is None:
        out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    assert residual is None or residual.stride() == out.stride()
    tiles = -(-outputs // tile.outputs) * -(-rows // tile.rows)
    partial = count = x  # placeholders: not read unless split
    if tile.splits > 1:
        partial = torch.empty(tiles * tile.splits * tile.rows * tile.outputs, dtype=torch.float32, device=x.device)
        count = counters(x.device, tiles)
    fast = zero.dtype == torch.uint8 and x.dtype == torch.bfloat16 and x.device.type == "cuda"
    int4_matmul_kernel[(tiles, tile.splits)](
        x, words, scale, zero, out, x if residual is None else residual, partial, count, rows, x.stride(0),
        out.stride(0), N=outputs, K=width, GROUP=width // scale.shape[0], BLOCK_M=tile.rows, BLOCK_N=tile.outputs,
        SPLITS=tile.splits, LATE=tile.late, WHOLE=fast, RESIDUAL=residual is not None,
        num_warps=tile.warps, num_stages=tile.stages, **overlap(x.device),
    )  # fmt: skip
    return out


@triton.jit
def unpack_kernel(
    weight_ptr, scale_ptr, zero_ptr, out_ptr, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    c = tl.arange(0, 32)
    inside = (n < N)[:, None]
    words = tl.load(weight_ptr + (chunk.to(tl.int64) * N + n)[:, None] * 32 + c[None, :], mask=inside, other=0)
    at = out_ptr + n.to(tl.int64)[:, None] * K + chunk * 128 + c[None, :]
    for quarter in tl.static_range(4):
        weight = _quarter(words, quarter, scale_ptr, zero_ptr, chunk, n, N, K // 128, GROUP)
        tl.store(at + quarter * 32, weight.to(out_ptr.dtype.element_ty), mask=inside)


def unpack(words: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[rows, columns] in `dtype`, for a product of many rows by the library."""
    chunks, outputs, _ = words.shape
    out = torch.empty(outputs, chunks * CHUNK, dtype=dtype, device=words.device)
    unpack_kernel[(triton.cdiv(outputs, 64), chunks)](
        words, scale, zero, out, N=outputs, K=chunks * CHUNK, GROUP=chunks * CHUNK // scale.shape[0], BLOCK_N=64,
        num_warps=4,
    )  # fmt: skip
    return out
