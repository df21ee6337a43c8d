# mypy: allow-untyped-defs, allow-incomplete-defs
"""Between the QKV projection and attention, in one kernel: norm and rotate queries and keys, write K and V to pages.

    qkv [tokens, (H + 2 KV) * D]:   q heads ── norm? ── rotate ──► in place, or to `q_out`
                                    k heads ── norm? ── rotate ──► k_pages[slot]
                                    v heads ────────────────────► v_pages[slot]

Plain twin: `twins.rope_and_write`. Pages may be 8-bit: floats as they are, or scaled, each head by its largest.
Refuses to know: how angles come about.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.kv_views import LARGEST, LayerKV
from quire.kernels.triton.launch import overlap, power_of_two


@triton.jit
def _stored(x, inverse, target, LARGEST: tl.constexpr):
    """LARGEST: of an 8-bit number; 0: pages have more bits."""
    if LARGEST > 0.0:
        x = tl.clamp(x * inverse, -LARGEST, LARGEST)
    if LARGEST == 127.0:
        x = tl.floor(x + 0.5)
    return x.to(target.dtype.element_ty)


@triton.jit
def tables_kernel(
    positions, frequencies, cos_ptr, sin_ptr, scale, HALF: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    angle = tl.load(positions + token).to(tl.float32) * tl.load(frequencies + i, mask=i < HALF, other=0.0)
    cos = (tl.cos(angle) * scale).to(cos_ptr.dtype.element_ty)
    sin = (tl.sin(angle) * scale).to(sin_ptr.dtype.element_ty)
    where = token * 2 * HALF + i
    tl.store(cos_ptr + where, cos, mask=i < HALF)
    tl.store(cos_ptr + where + HALF, cos, mask=i < HALF)
    tl.store(sin_ptr + where, -sin, mask=i < HALF)
    tl.store(sin_ptr + where + HALF, sin, mask=i < HALF)


def rope_tables(
    positions: torch.Tensor, inverse_frequencies: torch.Tensor, scale: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `Ops.rope_tables` says; plain twin: `reference.ops.rope_tables`."""
    tokens, half = positions.shape[0], inverse_frequencies.shape[0]
    cos, sin = (torch.empty(tokens, 1, 2 * half, dtype=dtype, device=positions.device) for _ in range(2))
    if tokens:
        tables_kernel[(tokens,)](
            positions, inverse_frequencies, cos, sin, scale,
            HALF=half, BLOCK=power_of_two(half), num_warps=1, **overlap(positions.device),
        )  # fmt: skip
    return cos, sin


@triton.jit
def rope_kernel(
    qkv, q_out, k_pages, v_pages, kv_slots, cos_ptr, sin_ptr, q_weight, k_weight, eps, k_scales, v_scales,
    stride_x, stride_q, stride_page, stride_slot, stride_head, stride_scale_page, stride_scale_slot,
    H: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, ROTARY: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
    PAGE: tl.constexpr, HEADS: tl.constexpr, NORM: tl.constexpr, LARGEST: tl.constexpr, SCALED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program: a token's HEADS heads of one kind. HALF and REST: powers of two that hold ROTARY // 2 and the
    dimensions that are not rotated (0: none)."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    Q_PARTS: tl.constexpr = (H + HEADS - 1) // HEADS
    K_PARTS: tl.constexpr = (KV + HEADS - 1) // HEADS
    MIDDLE: tl.constexpr = ROTARY // 2
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    is_q = part < Q_PARTS
    is_v = part >= Q_PARTS + K_PARTS
    within = tl.where(is_q, part, tl.where(is_v, part - Q_PARTS - K_PARTS, part - Q_PARTS))
    head = within * HEADS + tl.arange(0, HEADS)
    valid = (head < tl.where(is_q, H, KV))[:, None]
    source = qkv + token * stride_x + (head + tl.where(is_q, 0, tl.where(is_v, H + KV, H)))[:, None] * D

    i = tl.arange(0, HALF)
    half = valid & (i < MIDDLE)[None, :]
    x1 = tl.load(source + i[None, :], mask=half, other=0.0).to(tl.float32)
    x2 = tl.load(source + MIDDLE + i[None, :], mask=half, other=0.0).to(tl.float32)
    if REST > 0:
        j = ROTARY + tl.arange(0, REST)
        rest = valid & (j < D)[None, :]
        x3 = tl.load(source + j[None, :], mask=rest, other=0.0).to(tl.float32)

    if not is_v:
        if NORM:
            weight = tl.where(is_q, q_weight, k_weight)
            square = tl.sum(x1 * x1, 1) + tl.sum(x2 * x2, 1)
            if REST > 0:
                square += tl.sum(x3 * x3, 1)
            rms = tl.rsqrt(square / D + eps)[:, None]
            kind = qkv.dtype.element_ty  # a norm of its own would have rounded here
            x1 = (x1 * rms * tl.load(weight + i, mask=i < MIDDLE, other=0.0).to(tl.float32)[None, :]).to(kind)
            x2 = (x2 * rms * tl.load(weight + MIDDLE + i, mask=i < MIDDLE, other=0.0).to(tl.float32)[None, :]).to(kind)
            x1, x2 = x1.to(tl.float32), x2.to(tl.float32)
            if REST > 0:
                x3 = x3 * rms * tl.load(weight + j, mask=j < D, other=0.0).to(tl.float32)[None, :]
        # tables hold the angles twice, the first half of sin negated
        cos = tl.load(cos_ptr + token * ROTARY + i, mask=i < MIDDLE, other=0.0).to(tl.float32)[None, :]
        sin = tl.load(sin_ptr + token * ROTARY + MIDDLE + i, mask=i < MIDDLE, other=0.0).to(tl.float32)[None, :]
        x1, x2 = x1 * cos - x2 * sin, x2 * cos + x1 * sin

    if is_q:
        mine = q_out + token * stride_q + head[:, None] * D
        tl.store(mine + i[None, :], x1.to(q_out.dtype.element_ty), mask=half)
        tl.store(mine + MIDDLE + i[None, :], x2.to(q_out.dtype.element_ty), mask=half)
        if REST > 0:
            tl.store(mine + j[None, :], x3.to(q_out.dtype.element_ty), mask=rest)
    else:
        slot = tl.load(kv_slots + token)
        place = (slot // PAGE) * stride_page + (slot % PAGE) * stride_slot + head[:, None] * stride_head
        target = tl.where(is_v, v_pages, k_pages) + place
        inverse = 1.0
        if SCALED:
            most = tl.maximum(tl.max(tl.abs(x1), 1), tl.max(tl.abs(x2), 1))
            if REST > 0:
                most = tl.maximum(most, tl.max(tl.abs(x3), 1))
            scale = tl.minimum(most / LARGEST, 65504.0).to(tl.float16)
            beside = (slot // PAGE) * stride_scale_page + (slot % PAGE) * stride_scale_slot + head
            tl.store(tl.where(is_v, v_scales, k_scales) + beside, scale, mask=head < KV)
            scale = scale.to(tl.float32)  # as it will be read
            inverse = tl.where(scale > 0.0, 1.0 / scale, 0.0)[:, None]
        tl.store(target + i[None, :], _stored(x1, inverse, k_pages, LARGEST), mask=half)
        tl.store(target + MIDDLE + i[None, :], _stored(x2, inverse, k_pages, LARGEST), mask=half)
        if REST > 0:
            tl.store(target + j[None, :], _stored(x3, inverse, k_pages, LARGEST), mask=rest)


def rope_and_write(
    qkv: torch.Tensor,  # [tokens, (heads + 2 kv_heads) * dim]
    heads: int,
    cos: torch.Tensor,  # [tokens, 1, rotary], as `ops.rope_tables` makes them
    sin: torch.Tensor,
    kv: LayerKV,
    kv_slots: torch.Tensor,  # [tokens] int64
    q_norm: torch.Tensor | None = None,  # [dim]
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    q_out: torch.Tensor | None = None,  # [tokens, heads, dim]; None: in place
) -> torch.Tensor:  # the queries, [tokens, heads, dim]
    k_pages, v_pages = kv.k_pages, kv.v_pages
    tokens, (_, page, kv_heads, dim), rotary = qkv.shape[0], k_pages.shape, cos.shape[-1]
    if q_out is None:
        q_out = qkv[:, : heads * dim].unflatten(1, (heads, dim))
    assert k_pages.stride() == v_pages.stride() and k_pages.stride(3) == qkv.stride(1) == 1
    assert q_out.stride(1) == dim and (q_norm is None) == (k_norm is None) and cos.is_contiguous()
    if tokens == 0:
        return q_out
    if scaled := kv.k_scales is not None:
        scales, beside = (kv.k_scales, kv.v_scales), kv.k_scales.stride()[:2]
    else:
        scales, beside = (k_pages, v_pages), (0, 0)  # placeholders
    together = min(power_of_two(kv_heads), 8)
    rope_kernel[(tokens, -(-heads // together) + 2 * -(-kv_heads // together))](
        qkv, q_out, k_pages, v_pages, kv_slots, cos, sin, qkv if q_norm is None else q_norm,
        qkv if k_norm is None else k_norm, eps, *scales, qkv.stride(0), q_out.stride(0), *k_pages.stride()[:3],
        *beside,
        H=heads, KV=kv_heads, D=dim, ROTARY=rotary, HALF=power_of_two(rotary // 2),
        REST=power_of_two(dim - rotary) if rotary < dim else 0, PAGE=page, HEADS=together,
        NORM=q_norm is not None, LARGEST=LARGEST.get(k_pages.dtype, 0.0), SCALED=scaled,
        num_warps=4 if together >= 4 else 1, **overlap(qkv.device),
    )  # fmt: skip
    return q_out
