# mypy: allow-untyped-defs, allow-incomplete-defs
"""The gated delta rule for one token of each row: states are read once and written once.

    S ─► S' = exp(g) S;   S = S' + k (beta (v - k S'));   output q S          S [key_dim, value_dim] of a value head

SiLU behind the convolution, and the lengths of queries and keys, are taken care of on the way in. A program has some
columns of one head's matrix, which do not depend on the others. Plain twin: `model.blocks.gated_delta`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.triton.activation import silu
from quire.kernels.triton.launch import overlap


@triton.jit
def gated_delta_step_kernel(
    qkv, decay, beta, states, sources, targets, out, stride_qkv, stride_cell, scale,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, BLOCK: tl.constexpr,
    TILED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row, head = tl.program_id(0), tl.program_id(1)
    key_head = head % KEY_HEADS if TILED else head // (HEADS // KEY_HEADS)
    c = tl.arange(0, KEY)
    d = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    at = qkv + row.to(tl.int64) * stride_qkv
    q = silu(tl.load(at + key_head * KEY + c).to(tl.float32))
    k = silu(tl.load(at + (KEY_HEADS + key_head) * KEY + c).to(tl.float32))
    v = silu(tl.load(at + 2 * KEY_HEADS * KEY + head * VALUE + d).to(tl.float32))
    q *= tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * scale
    k *= tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
    within = head * KEY * VALUE + c[:, None] * VALUE + d[None, :]
    state = tl.load(states + tl.load(sources + row) * stride_cell + within)
    state *= tl.exp(tl.load(decay + row * HEADS + head))
    change = (v - tl.sum(state * k[:, None], 0)) * tl.load(beta + row * HEADS + head)
    state += k[:, None] * change[None, :]
    tl.store(states + tl.load(targets + row) * stride_cell + within, state)
    mixed = tl.sum(state * q[:, None], 0)
    tl.store(out + (row.to(tl.int64) * HEADS + head) * VALUE + d, mixed.to(out.dtype.element_ty))


def gated_delta_step(
    qkv: torch.Tensor,  # [rows, 2 * key_heads * key_dim + heads * value_dim], behind the convolution
    decay: torch.Tensor,  # [rows, heads] float32
    beta: torch.Tensor,  # [rows, heads] float32
    states: torch.Tensor,  # [cells, heads, key_dim, value_dim] float32; cells may be apart
    sources: torch.Tensor,  # [rows] int64: cells that rows go on from
    targets: torch.Tensor,  # [rows] int64: ... and leave their states in; none is another row's source
    key_heads: int,
    *,
    tiled: bool = False,  # key heads serve value heads in turn, not neighbours
) -> torch.Tensor:
    """[rows, heads * value_dim], in qkv's dtype."""
    rows, (_, heads, key, value) = qkv.shape[0], states.shape
    assert states[0].is_contiguous()
    qkv, decay, beta = qkv.contiguous(), decay.contiguous(), beta.contiguous()
    out = torch.empty(rows, heads * value, dtype=qkv.dtype, device=qkv.device)
    block = min(value, 32)
    gated_delta_step_kernel[(rows, heads, value // block)](
        qkv, decay, beta, states, sources, targets, out, qkv.stride(0), states.stride(0), key**-0.5,
        KEY_HEADS=key_heads, HEADS=heads, KEY=key, VALUE=value, BLOCK=block, TILED=tiled, num_warps=4,
        **overlap(qkv.device),
    )  # fmt: skip
    return out
