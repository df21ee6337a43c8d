"""Inverse frequencies of rotary positions under the scalings models ship with.

They are fixed when a model is loaded: keys are cached rotated, so frequencies that changed with the length of a
sequence (dynamic NTK) would not fit the keys already there. Refuses to know: tokens, heads, layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from quire.model.decoder_spec import RopeSpec
from quire.types.errors import ModelFileError

Scaled = tuple[torch.Tensor, float]  # inverse frequencies [dim / 2], what cos and sin are multiplied with


def inverse_frequencies(rope: RopeSpec, max_position: int, length: int) -> Scaled:
    """For a model trained on `max_position` tokens that will serve contexts of up to `length`."""
    return KINDS[rope.kind](rope, max_position, length)


def check_rope(rope: RopeSpec, max_position: int) -> None:
    """Refuse, before anything is built, what `inverse_frequencies` could not compute."""
    if rope.kind not in KINDS:
        raise ModelFileError(f"RoPE scaling {rope.kind!r} is not supported; known: {', '.join(KINDS)}")
    if rope.dim <= 0 or rope.dim % 2:
        raise ModelFileError(f"RoPE rotates an even number of dimensions, got {rope.dim}")
    for name in _NEEDED.get(rope.kind, ()):
        value = rope.params.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise ModelFileError(f"RoPE scaling {rope.kind!r} needs a positive number {name!r}, got {value!r}")
    try:
        frequencies, scale = inverse_frequencies(rope, max_position, max_position)
        sound = bool(frequencies.isfinite().all()) and math.isfinite(scale)
    except (ArithmeticError, KeyError, TypeError, ValueError):
        sound = False
    if not sound:
        raise ModelFileError(
            f"RoPE scaling {rope.kind!r} does not work out with theta {rope.theta}, {dict(rope.params)}"
        )


def _plain(theta: float, dim: int) -> torch.Tensor:
    return 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))


def _default(rope: RopeSpec, max_position: int, length: int) -> Scaled:
    return _plain(rope.theta, rope.dim), 1.0


def _linear(rope: RopeSpec, max_position: int, length: int) -> Scaled:
    return _plain(rope.theta, rope.dim) / rope.params["factor"], 1.0


def _dynamic(rope: RopeSpec, max_position: int, length: int) -> Scaled:
    """NTK-aware: a larger base, by how far `length` goes beyond the trained context."""
    factor = rope.params["factor"]
    stretch = factor * max(length, max_position) / max_position - (factor - 1)
    return _plain(rope.theta * stretch ** (rope.dim / (rope.dim - 2)), rope.dim), 1.0


def _llama3(rope: RopeSpec, max_position: int, length: int) -> Scaled:
    """Long wavelengths are stretched by `factor`, short ones kept, those between interpolated."""
    factor, original = rope.params["factor"], rope.params["original_max_position_embeddings"]
    low, high = rope.params["low_freq_factor"], rope.params["high_freq_factor"]
    plain = _plain(rope.theta, rope.dim)
    turns = original * plain / (2 * math.pi)  # rotations within the original context
    keep = ((turns - low) / (high - low)).clamp_(0, 1)
    return plain * (keep + (1 - keep) / factor), 1.0


def _yarn(rope: RopeSpec, max_position: int, length: int) -> Scaled:
    """Dimensions that turn often within the original context are kept, those that hardly turn are stretched, a
    linear ramp between; attention is made a little sharper."""
    params = rope.params
    factor, original = params["factor"], params["original_max_position_embeddings"]

    def dimension(turns: float) -> float:
        """The dimension that makes this many turns within the original context."""
        return rope.dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(params.get("beta_fast") or 32), dimension(params.get("beta_slow") or 1)
    if params.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    if low == high:
        high += 0.001
    stretched = ((torch.arange(rope.dim // 2).float() - low) / (high - low)).clamp_(0, 1)
    plain = _plain(rope.theta, rope.dim)
    return plain * (1 - stretched) + plain / factor * stretched, _yarn_sharpness(params, factor)


def _yarn_sharpness(params: Mapping[str, Any], factor: float) -> float:
    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if params.get("attention_factor") is not None:
        return float(params["attention_factor"])
    if params.get("mscale") and params.get("mscale_all_dim"):
        return mscale(params["mscale"]) / mscale(params["mscale_all_dim"])
    return mscale(1.0)


def _proportional(rope: RopeSpec, max_position: int, length: int) -> Scaled:
    """All dimensions are pairs across the whole head; the first of them turn, as if there were no others."""
    turning = int(rope.params.get("partial_rotary_factor", 1.0) * rope.dim // 2)
    frequencies = _plain(rope.theta, rope.dim) / rope.params.get("factor", 1.0)
    return frequencies.masked_fill(torch.arange(rope.dim // 2) >= turning, 0.0), 1.0


def _none(rope: RopeSpec, max_position: int, length: int) -> Scaled:
    return torch.zeros(rope.dim // 2), 1.0


def _longrope(rope: RopeSpec, max_position: int, length: int) -> Scaled:
    """A divisor a frequency: one set for contexts as trained at first, one for longer ones."""
    params = rope.params
    original = params["original_max_position_embeddings"]
    divisors = torch.tensor(params["long_factor" if length > original else "short_factor"], dtype=torch.float32)
    if divisors.shape != (rope.dim // 2,):
        raise ValueError(f"{rope.dim // 2} factors are needed")
    factor = max_position / original
    sharpness = params.get("attention_factor")
    if sharpness is None:
        sharpness = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return _plain(rope.theta, rope.dim) / divisors, float(sharpness)


KINDS: dict[str, Callable[[RopeSpec, int, int], Scaled]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "proportional": _proportional,
    "none": _none,
    "divisors": _default,  # GGUF stores what each frequency is divided by as a tensor; the model applies it
}
_NEEDED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("original_max_position_embeddings",),
}
NO_ROTATION = RopeSpec(theta=1.0, dim=2, kind="none")  # of layers that know no positions
