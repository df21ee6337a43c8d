"""What the compiled program computes of a decoder of Llama's kind, in plain torch: the same packed weights, activations
rounded to int8 by blocks of 32 at the same places, everything else in float32. The oracle of its tests; slow.

Other mixers and feeds have the blocks of `model/` as theirs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.kernels.attention_backend import AttentionBackend, AttentionSpec, Batch
from quire.kernels.attention_mass import AttentionMassRows
from quire.kernels.cpu.matrix_packing import PackedMatrix
from quire.kernels.cpu.packed_adapter import PackedAdapter
from quire.kernels.cpu.weights import Attention, Decoder, Linear, Norm
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
    inverse = torch.where(top > 1e-36, 127 / top, 0.0)  # what is smaller is flushed to zero
    return ((blocks * inverse).round() * (top / 127)).flatten(-2)


def linear(matrix: PackedMatrix, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return torch.nn.functional.linear(rounded(x), matrix.dense(), bias)


class TwinProgram:
    """`NativeProgram`'s methods over the same weights."""

    def __init__(self, decoder: Decoder, adapters: Sequence[PackedAdapter | None] = ()):
        """`adapters`: by slot."""
        self._decoder = decoder
        self._adapters = adapters

    def forward(
        self, input_ids: torch.Tensor, batch: Batch, kv: KVViews, tap: HiddenStateTap | None = None
    ) -> torch.Tensor:
        d, shown = self._decoder, []
        x = d.embed.dense()[input_ids]
        frequencies, scale = d.rotation[0].inverse_frequencies, d.rotation[0].scale
        rope = ops.rope_tables(batch.positions, frequencies, scale, torch.float32)
        for index, layer in enumerate(d.layer):
            attention, mlp = layer.attention, layer.mlp
            assert attention is not None and mlp is not None and mlp.gate is not None
            mixed = self._attend(index, attention, _norm(x, layer.mixer_norm), rope, batch, kv).flatten(1)
            x = x + self._product(index, "o", attention.o, mixed, batch)
            normed = _norm(x, layer.feed_norm)
            gate = self._product(index, "gate", mlp.gate, normed, batch)
            up = self._product(index, "up", mlp.up, normed, batch)
            x = x + self._product(index, "down", mlp.down, ops.act(gate, "silu") * up, batch)
            shown.append(x[batch.ends])
        if tap is not None:
            tap.states = [shown[layer] for layer in tap.layers]
        return _norm(x, d.final_norm)

    def _product(self, index: int, name: str, by: Linear, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """By a layer's matrix of that name, and what each token's adapter adds to it."""
        out = linear(by.w, x, None if by.bias is None else by.bias[: by.w.rows])
        for slot, adapter in enumerate(self._adapters):
            if adapter is None or batch.adapters is None or (update := adapter.updates.get((index, name))) is None:
                continue
            mine = batch.adapters == slot
            a, b, scale = update
            low = scale * linear(a, x[mine])
            out[mine] += linear(b, torch.nn.functional.pad(low, (0, b.columns - low.shape[1])))
        return out

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return linear(self._decoder.head, hidden)

    def _attend(
        self,
        index: int,
        a: Attention,
        x: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        batch: Batch,
        kv: KVViews,
    ) -> torch.Tensor:  # [tokens, heads, head_dim]
        assert a.k is not None and a.v is not None
        q, k, v = (
            self._product(index, name, by, x, batch).unflatten(-1, (-1, a.head_dim))
            for name, by in (("q", a.q), ("k", a.k), ("v", a.v))
        )
        q, k = ops.rope(_norm(q, a.q_norm), *rope), ops.rope(_norm(k, a.k_norm), *rope)
        mine = kv.layers[index]
        where = batch.groups[mine.group]
        if mine.residual is None:
            ops.write_kv(k, v, mine, where.kv_slots)
        else:
            write_kivi(mine, k, v, batch)
        spec = AttentionSpec(a.heads, a.kv_heads, a.head_dim, a.scale, a.window or None)
        backend: AttentionBackend = AttentionMassRows(ReferenceAttention()) if batch.asks else ReferenceAttention()
        if mine.residual is not None:
            backend = KiviRows(backend)
        if batch.sparse is not None and a.sparse:
            backend = SparseRows(backend, kv.layout.groups[mine.group].layers.index(index))
        return backend.forward(spec, q, mine, batch, where, backend.plan(batch, where, spec))


def _norm(x: torch.Tensor, norm: Norm | None) -> torch.Tensor:
    return x if norm is None else ops.rms_norm(x, norm.weight, norm.eps)
