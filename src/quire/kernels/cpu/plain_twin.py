"""What the compiled decoder computes, in plain torch: the same packed weights, activations rounded to int8 by blocks
of 32 at the same places, everything else in float32. The oracle of its tests; slow.
"""

from __future__ import annotations

import torch

from quire.kernels.attention_backend import AttentionBackend, AttentionSpec, Batch
from quire.kernels.attention_mass import AttentionMassRows
from quire.kernels.cpu.program import DecoderWeights, LayerWeights, PackedMatrix
from quire.kernels.hidden_state_tap import HiddenStateTap
from quire.kernels.kv_views import KVViews
from quire.kernels.reference import plain_ops as ops
from quire.kernels.reference.plain_attention import ReferenceAttention

BLOCK = 32


def rounded(x: torch.Tensor) -> torch.Tensor:
    """x after its trip through int8: each block of 32 in steps of its largest magnitude / 127."""
    blocks = x.unflatten(-1, (-1, BLOCK))
    top = blocks.abs().amax(dim=-1, keepdim=True)
    inverse = torch.where(top > 0, 127 / top, 0.0)
    return ((blocks * inverse).round() * (top / 127)).flatten(-2)


def linear(matrix: PackedMatrix, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return torch.nn.functional.linear(rounded(x), matrix.dense(), bias)


class TwinProgram:
    """`NativeProgram`'s methods over the same weights."""

    def __init__(self, weights: DecoderWeights):
        self._weights = weights

    def forward(
        self, input_ids: torch.Tensor, batch: Batch, kv: KVViews, tap: HiddenStateTap | None = None
    ) -> torch.Tensor:
        w, shown = self._weights, []
        x = w.embed.dense()[input_ids]
        rope = ops.rope_tables(batch.positions, w.inverse_frequencies, w.rope_scale, torch.float32)
        for index, layer in enumerate(w.layers):
            normed = ops.rms_norm(x, layer.input_norm, w.eps)
            x = x + linear(layer.o, self._attend(index, layer, normed, rope, batch, kv).flatten(1), layer.o_bias)
            normed = ops.rms_norm(x, layer.post_norm, w.eps)
            gated = ops.act(linear(layer.gate, normed), "silu") * linear(layer.up, normed)
            x = x + linear(layer.down, gated)
            shown.append(x[batch.ends])
        if tap is not None:
            tap.states = [shown[layer] for layer in tap.layers]
        return ops.rms_norm(x, w.final_norm, w.eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return linear(self._weights.head, hidden)

    def _attend(
        self,
        index: int,
        layer: LayerWeights,
        x: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        batch: Batch,
        kv: KVViews,
    ) -> torch.Tensor:  # [tokens, heads, head_dim]
        w = self._weights
        q, k, v = (
            linear(matrix, x, bias).unflatten(-1, (-1, w.head_dim))
            for matrix, bias in ((layer.q, layer.q_bias), (layer.k, layer.k_bias), (layer.v, layer.v_bias))
        )
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = ops.rms_norm(q, layer.q_norm, w.eps), ops.rms_norm(k, layer.k_norm, w.eps)
        q, k = ops.rope(q, *rope), ops.rope(k, *rope)
        mine = kv.layers[index]
        where = batch.groups[mine.group]
        ops.write_kv(k, v, mine, where.kv_slots)
        spec = AttentionSpec(w.heads, w.kv_heads, w.head_dim, layer.scale, layer.window)
        backend: AttentionBackend = AttentionMassRows(ReferenceAttention()) if batch.asks else ReferenceAttention()
        return backend.forward(spec, q, mine, batch, where, backend.plan(batch, where, spec))
