"""What a decoder is, as plain facts. Everything else in this room is derived from these.

Refuses to know: torch, where the facts came from, how they are computed with.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from quire.types.kv import KVLayout, layout_for


@dataclass(frozen=True)
class RopeSpec:
    """Rotary positions: `dim` leading dimensions of each head are rotated."""

    theta: float
    dim: int
    kind: str = "default"  # a key of model.rope.KINDS
    params: Mapping[str, Any] = field(default_factory=dict)  # the scaling's own parameters, as config.json names them


@dataclass(frozen=True)
class DecoderSpec:
    """A pre-norm decoder: embed, [norm, attention, norm, MLP] x layers, norm, head."""

    architecture: str
    vocab_size: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    max_position: int  # what it was trained for
    windows: tuple[int | None, ...]  # per layer: tokens a query sees, itself included; None: all
    scales: tuple[float, ...]  # per layer: what attention scores are multiplied with
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-6
    rope: RopeSpec | None = None  # None: learned positions, a table of max_position rows
    activation: Literal["silu", "gelu", "gelu_tanh", "quick_gelu", "relu"] = "silu"
    gated_mlp: bool = True
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = False

    def kv_refusal(self, dtype: str, kinds: Collection[str]) -> str | None:
        """Why there are no KV pages of this kind where `kinds` can be run; None: there are."""
        if dtype not in kinds:
            return f"what runs {self.architecture} here takes pages of {', '.join(kinds)}"
        if dtype == "int4" and (self.head_dim % 2 or self.head_dim > 256):
            return f"4-bit pages take heads of an even number of up to 256 dimensions, not {self.head_dim}"
        return None

    def kv_layout(self, *, page_size: int, dtype: str) -> KVLayout:
        return layout_for(
            list(self.windows),
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            page_size=page_size,
            dtype=dtype,
        )
