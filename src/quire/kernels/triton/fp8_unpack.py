# mypy: allow-untyped-defs, allow-incomplete-defs
"""8-bit pages read two numbers at a time: a 16-bit word becomes the float16 numbers of even and of odd index.

A tensor core wants values laid out across a tile, and hardware can turn a tile of words that way but none of bytes:
widening single bytes took more instructions than all the rest of attention. Products do not mind the order of what
they sum, so the two halves stay apart until the end.

Refuses to know: attention, scales.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

KINDS = {torch.float8_e4m3fn: "fp8", torch.int8: "int8"}  # what bytes may be

# Two words a register. fp8: even bytes side by side, odd ones behind them, two at a time to halves. int8: 1024 + 128 +
# the byte is a half whose last bits are the byte, its sign bit turned over.
FP8 = tl.constexpr(
    "{.reg .b32 w; .reg .b16 even, odd; prmt.b32 w, $1, 0, 0x3120; mov.b32 {even, odd}, w; cvt.rn.f16x2.e4m3x2 $0, "
)
INT8 = tl.constexpr(
    "lop3.b32 w, w, 0x00ff00ff, 0x64806480, 0x6a; mov.b32 offset, 0xe480e480; add.rn.f16x2 $0, w, offset;}"
)


@triton.jit
def even(words, KIND: tl.constexpr, NATIVE: tl.constexpr):
    if not NATIVE:
        return _widen(words & 0xFF, KIND)
    if KIND == "fp8":
        return _assembled(words, FP8 + "even;}")
    return _assembled(words, "{.reg .b32 w, offset; mov.b32 w, $1; " + INT8)


@triton.jit
def odd(words, KIND: tl.constexpr, NATIVE: tl.constexpr):
    if not NATIVE:
        return _widen((words >> 8) & 0xFF, KIND)
    if KIND == "fp8":
        return _assembled(words, FP8 + "odd;}")
    return _assembled(words, "{.reg .b32 w, offset; shr.u32 w, $1, 8; " + INT8)


@triton.jit
def _assembled(words, CODE: tl.constexpr):
    return tl.inline_asm_elementwise(CODE, "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2)


@triton.jit
def _widen(byte, KIND: tl.constexpr):
    """What the instructions above compute, for an interpreter."""
    if KIND == "fp8":
        return byte.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    return byte.to(tl.int8).to(tl.float16)
