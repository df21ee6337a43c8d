"""Counter-based noise: the random part of a draw as a pure function of (seed, branch, position, token id).

There is no generator and no state, so a draw is the same alone or in a batch, after preemption, on another
machine, and for a drafter as for its verifier. Only wrapping integer arithmetic up to `uniform`, and exactly
rounded float32 after it: the uniforms are bit-equal on every device; Gumbel noise adds two logarithms, each right
to the last bit or so.

    seed, branch ── streams ──► 64 bits, kept per slot
    stream, position ── row_keys ──► 2 x 32 bits, one pair per row
    row key, token id ── uniform ──► (0, 1) ── gumbel ──► noise

Refuses to know: logits, parameters, slots.
"""

from __future__ import annotations

import torch


def _signed(value: int, bits: int) -> int:
    """The two's complement reading of an unsigned constant; torch has signed integers only."""
    return value - (1 << bits) if value >> (bits - 1) else value


# splitmix64's finaliser and increment (Steele, Lea and Flood), and the two-round 32-bit mixer "lowbias32".
_MIX64_A = _signed(0xBF58476D1CE4E5B9, 64)
_MIX64_B = _signed(0x94D049BB133111EB, 64)
_GOLDEN64 = _signed(0x9E3779B97F4A7C15, 64)
_MIX32_A = _signed(0x7FEB352D, 32)
_MIX32_B = _signed(0x846CA68B, 32)
_GOLDEN32 = _signed(0x9E3779B9, 32)

# Scales 31 bits to (0, 1). The factor 1 - 2^-23 keeps the largest, which rounds up to 2^31, below one.
_SCALE = 2.0**-31 * (1.0 - 2.0**-23)


def _fold(x: torch.Tensor, shift: int) -> torch.Tensor:
    """x ^ (x >>> shift); torch's shift drags the sign along, the mask takes it off again."""
    bits = torch.iinfo(x.dtype).bits
    return (x >> shift).bitwise_and_((1 << (bits - shift)) - 1).bitwise_xor_(x)


def _mix64(x: torch.Tensor) -> torch.Tensor:
    x = _fold(x, 30).mul_(_MIX64_A)
    x = _fold(x, 27).mul_(_MIX64_B)
    return _fold(x, 31)


def _mix32(x: torch.Tensor) -> torch.Tensor:
    x = _fold(x, 16).mul_(_MIX32_A)
    x = _fold(x, 15).mul_(_MIX32_B)
    return _fold(x, 16)


def streams(seeds: torch.Tensor, branches: torch.Tensor) -> torch.Tensor:
    """One 64-bit stream per (seed, branch). int64 [n], [n] → int64 [n]"""
    return _mix64(_mix64(seeds + _GOLDEN64) + branches * _GOLDEN64)


def row_keys(stream: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The key of each drawn position. int64 [n], [n] → int32 [n, 2]"""
    return _mix64(stream + (positions + 1) * _GOLDEN64).unsqueeze(-1).view(torch.int32)


def uniform(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Uniforms in (0, 1), finest near zero. keys int32 [n, 2]; token ids int64 [k] or [n, k] → float32 [n, k]"""
    words = _mix32(token_ids.to(torch.int32) * _GOLDEN32)
    x = words ^ keys[:, :1]  # [n, k]
    x = _fold(x.mul_(_MIX32_A), 15).bitwise_xor_(keys[:, 1:])
    x.mul_(_MIX32_B)
    # Here the dragged sign is welcome: it clears the top bit, which leaves 31 uniform bits.
    x = (x >> 16).bitwise_xor_(x)
    return x.to(torch.float32).add_(0.5).mul_(_SCALE)


def gumbel(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise: argmax(log p + gumbel) is a draw from p. Shapes as in `uniform`."""
    exponential = uniform(keys, token_ids).neg_().log1p_().neg_()  # small where the noise is large: keep its digits
    return exponential.log_().neg_()
