# mypy: allow-untyped-defs, allow-incomplete-defs
"""Tokens' rows out of their pages into one tensor, padding as zeros, K and V in one launch. Plain twin:
`kv_views.take_slots`, which decodes numbers with scales too."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from quire.kernels.kv_views import Side, take_slots
from quire.kernels.triton.launch import power_of_two

TOKENS = 8  # of a program


@triton.jit(do_not_specialize=["count"])
def gather_tokens_kernel(
    first_ptr, second_ptr, slots, out, count, stride_page, stride_token,
    PAGE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    slot = tl.load(slots + at, mask=at < count, other=-1)
    column = tl.arange(0, BLOCK)
    source = (slot // PAGE * stride_page + slot % PAGE * stride_token)[:, None] + column[None, :]
    wanted = (slot >= 0)[:, None] & (column < WIDTH)[None, :]
    if tl.program_id(1) == 0:
        rows = tl.load(first_ptr + source, mask=wanted, other=0.0)
    else:
        rows = tl.load(second_ptr + source, mask=wanted, other=0.0)
    target = (tl.program_id(1).to(tl.int64) * count + at)[:, None] * WIDTH + column[None, :]
    tl.store(out + target, rows, mask=(at < count)[:, None] & (column < WIDTH)[None, :])


def gather_tokens(sides: Sequence[Side], slots: torch.Tensor, size: int, dtype: torch.dtype) -> Sequence[torch.Tensor]:
    """`slots` [tokens] int64: page * size + offset, or -1."""
    first, last = sides[0][0], sides[-1][0]
    heads, dim = first.shape[2:]
    alike = first.shape == last.shape and first.stride() == last.stride() and first.stride()[2:] == (dim, 1)
    if not alike or len(sides) > 2 or any(side.dtype != dtype or scales is not None for side, scales in sides):
        return take_slots(sides, slots, size, dtype)
    out = torch.empty(len(sides), len(slots), heads, dim, dtype=dtype, device=slots.device)
    gather_tokens_kernel[(triton.cdiv(len(slots), TOKENS), len(sides))](
        first, last, slots, out, len(slots), first.stride(0), first.stride(1),
        PAGE=size, WIDTH=heads * dim, BLOCK=power_of_two(heads * dim), TOKENS=TOKENS, num_warps=4,
    )  # fmt: skip
    return out.unbind()
