"""Mixers that keep a state of fixed size of a sequence, as data."""

from __future__ import annotations

from dataclasses import dataclass

from quire.types.kv import StateShape


@dataclass(frozen=True)
class GatedDelta:
    """Gated DeltaNet: queries, keys and values behind a short convolution; of each value head a matrix that decays and
    takes in, by the delta rule, what a token's key does not find in it yet."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int  # inputs that the convolution sees, its own included
    tiled: bool = False  # key heads serve value heads in turn (0 1 0 1), not neighbours (0 0 1 1)

    rope = None

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def qkv_width(self) -> int:
        return 2 * (self.keys + self.values)

    @property
    def kept(self) -> StateShape:
        """What it keeps of a sequence."""
        channels = 2 * self.keys + self.values
        return StateShape((self.taps - 1, channels), (self.value_heads, self.key_dim, self.value_dim))


@dataclass(frozen=True)
class Mamba2:
    """A selective state space: inputs behind a short convolution; of each head a matrix that decays and takes in
    products of inputs and input-dependent vectors, which groups of heads share."""

    heads: int
    head_dim: int
    groups: int
    state_size: int
    taps: int
    conv_bias: bool = True
    bias: bool = False  # of the first and the last product
    norm_groups: int = 1  # parts that the gated norm is taken over
    norm_over_ranks: bool = False  # ... of the heads of all tensor-parallel ranks together
    time_step_limit: tuple[float, float] = (0.0, float("inf"))

    rope = None

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        return self.inner + 2 * self.groups * self.state_size

    @property
    def qkv_width(self) -> int:
        return self.inner + self.channels + self.heads

    @property
    def kept(self) -> StateShape:
        return StateShape((self.taps - 1, self.channels), (self.heads, self.head_dim, self.state_size))


@dataclass(frozen=True)
class ShortConv:
    """A short convolution between two gates (LFM2)."""

    width: int
    taps: int
    bias: bool = False

    rope = None

    @property
    def qkv_width(self) -> int:
        return 3 * self.width

    @property
    def kept(self) -> StateShape:
        return StateShape((self.taps - 1, self.width))
