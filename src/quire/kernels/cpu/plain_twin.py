"""What the compiled decoder computes, in plain torch: the same packed weights, activations rounded to int8 by blocks
of 32 at the same places, everything else in float32. The oracle of its tests; slow.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.kernels.attention_backend import AttentionBackend, AttentionSpec, Batch
from quire.kernels.attention_mass import AttentionMassRows
from quire.kernels.cpu.program import DecoderWeights, LayerWeights, PackedAdapter, PackedMatrix
from quire.kernels.hidden_state_tap import HiddenStateTap
from quire.kernels.kivi_attention import KiviRows, write_kivi
from quire.kernels.kv_views import KVViews
from quire.kernels.reference import plain_ops as ops
from quire.kernels.reference.plain_attention import ReferenceAttention
from quire.kernels.sparse_attention import SparseRows

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

    def __init__(self, weights: DecoderWeights, adapters: Sequence[PackedAdapter | None] = ()):
        """`adapters`: by slot."""
        self._weights = weights
        self._adapters = adapters

    def forward(
        self, input_ids: torch.Tensor, batch: Batch, kv: KVViews, tap: HiddenStateTap | None = None
    ) -> torch.Tensor:
        w, shown = self._weights, []
        x = w.embed.dense()[input_ids]
        rope = ops.rope_tables(batch.positions, w.inverse_frequencies, w.rope_scale, torch.float32)
        for index, layer in enumerate(w.layers):
            normed = ops.rms_norm(x, layer.input_norm, w.eps)
            mixed = self._attend(index, layer, normed, rope, batch, kv).flatten(1)
            x = x + self._product(index, "o", mixed, batch)
            normed = ops.rms_norm(x, layer.post_norm, w.eps)
            gate, up = (self._product(index, name, normed, batch) for name in ("gate", "up"))
            x = x + self._product(index, "down", ops.act(gate, "silu") * up, batch)
            shown.append(x[batch.ends])
        if tap is not None:
            tap.states = [shown[layer] for layer in tap.layers]
        return ops.rms_norm(x, w.final_norm, w.eps)

    def _product(self, index: int, name: str, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """By a layer's matrix of that name, and what each token's adapter adds."""
        layer = self._weights.layers[index]
        out = linear(getattr(layer, name), x, getattr(layer, f"{name}_bias", None))
        for slot, adapter in enumerate(self._adapters):
            if adapter is None or batch.adapters is None or (update := adapter.updates.get((index, name))) is None:
                continue
            mine = batch.adapters == slot
            a, b, scale = update
            low = scale * linear(a, x[mine])
            out[mine] += linear(b, torch.nn.functional.pad(low, (0, b.columns - low.shape[1])))
        return out

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
        q, k, v = (self._product(index, name, x, batch).unflatten(-1, (-1, w.head_dim)) for name in ("q", "k", "v"))
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = ops.rms_norm(q, layer.q_norm, w.eps), ops.rms_norm(k, layer.k_norm, w.eps)
        q, k = ops.rope(q, *rope), ops.rope(k, *rope)
        mine = kv.layers[index]
        where = batch.groups[mine.group]
        if mine.residual is None:
            ops.write_kv(k, v, mine, where.kv_slots)
        else:
            write_kivi(mine, k, v, batch)
        spec = AttentionSpec(w.heads, w.kv_heads, w.head_dim, layer.scale, layer.window)
        backend: AttentionBackend = AttentionMassRows(ReferenceAttention()) if batch.asks else ReferenceAttention()
        if mine.residual is not None:
            backend = KiviRows(backend)
        if batch.sparse is not None and layer.sparse:
            backend = SparseRows(backend, kv.layout.groups[mine.group].layers.index(index))
        return backend.forward(spec, q, mine, batch, where, backend.plan(batch, where, spec))
