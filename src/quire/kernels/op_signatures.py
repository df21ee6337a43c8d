"""The signatures of the element-wise and data-moving operations a decoder needs.

An implementation is a module with these functions: `reference/ops.py` is the oracle, `eager/ops.py` what plain
torch does fast on any device; later twins (Triton, C++) carry the same names. Refuses to know: layers, models.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

import torch

from quire.kernels.kv_views import LayerKV

Activation = Literal["silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2"]
GatedActivation = Activation | Literal["swiglu_oai"]
SWIGLU_LIMIT = 7.0  # gate and up of swiglu_oai are clamped to it


class Ops(Protocol):
    def take(self, table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Rows of a table [n, width] by index [m]: embeddings, or the tokens whose logits are wanted."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x / rms(x) * weight over the last dimension."""
        ...

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """residual += x in place; returns rms_norm(residual)."""
        ...

    def layer_norm(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
    ) -> torch.Tensor: ...

    def rope_tables(
        self, positions: torch.Tensor, inverse_frequencies: torch.Tensor, scale: float, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, each [tokens, 1, rotary]: both halves of the last dimension hold the same angles, and the
        first half of sin is negated, so that rope is x * cos + swapped_halves(x) * sin."""
        ...

    def rope(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotate the first `rotary` dimensions of x [tokens, heads, dim] (half-rotation style)."""
        ...

    def act(self, x: torch.Tensor, kind: Activation) -> torch.Tensor: ...

    def act_and_mul(self, x: torch.Tensor, kind: GatedActivation) -> torch.Tensor:
        """x [tokens, 2 n] holds gate then up: act(gate) * up, [tokens, n]; with "swiglu_oai" (gpt-oss), both clamped,
        gate * sigmoid(1.702 gate) * (up + 1)."""
        ...

    def write_kv(
        self,
        k: torch.Tensor,  # [tokens, kv_heads, dim]
        v: torch.Tensor,
        kv: LayerKV,
        kv_slots: torch.Tensor,  # [tokens] int64: page * tokens_per_page + offset
    ) -> None: ...


class LoraOps(Protocol):
    """`eager/grouped_lora.py`, or its twin in `triton/`."""

    def segments(self, adapters: torch.Tensor, slots: int) -> Any:
        """Of a step's tokens, by the adapter slot of each; once for all layers."""
        ...

    def add_lora(
        self, out: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, parts: tuple[int, ...], found: Any
    ) -> None:
        """out += B A x of each token's adapter, part by part; `found`: what `segments` gave."""
        ...
