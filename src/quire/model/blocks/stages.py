"""The stages a forward pass is made of, and how plain operations make them.

    [ qkv ─► attend ─► mlp ] x layers ─► norm ─► head        each begins with its norm, which first adds what came
                                                             before it to `residual`, in place

A stage hands on `x`, which is still to be added to the residual, or None if it has added it itself. A faster
implementation claims stages by subclassing: whatever it does not override stays composed of QuantScheme,
AttentionBackend and Ops. Refuses to know: how many layers there are, what tokens mean.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from quire.kernels.attention_backend import AttentionBackend, AttentionSpec, Batch
from quire.kernels.attention_mass import AttentionMassRows
from quire.kernels.kv_views import KVViews
from quire.kernels.op_signatures import Activation, Ops
from quire.kernels.registry import choose_backend, choose_ops
from quire.model.decoder_spec import DecoderSpec
from quire.model.quantization.scheme import Linear, Plain


@dataclass
class Layer:
    """Weights of one layer and what its attention is."""

    index: int
    attention: AttentionSpec
    input_norm: Plain
    qkv: Linear
    o: Linear
    post_norm: Plain
    up: Linear  # gate and up stacked if the MLP is gated
    down: Linear
    q_norm: Plain | None = None
    k_norm: Plain | None = None


@dataclass
class Step:
    """What all layers share in one forward pass."""

    batch: Batch
    kv: KVViews
    rope: tuple[torch.Tensor, torch.Tensor] | None  # cos, sin
    plans: dict[int, Any] = field(default_factory=dict)  # by KV group


class Stages:
    invariant = False  # whether a row's bits are the same in any batch
    kv_kinds: tuple[str, ...] = ("int8", "fp8", "int4")  # of pages, beside the model's own type

    def __init__(self, spec: DecoderSpec, device: torch.device, *, plain: bool = False):
        """`plain`: torch's own operations wherever it runs; what faster ones are checked against."""
        self.ops: Ops = choose_ops(device, plain=plain)
        self.backends: dict[int | None, AttentionBackend] = {}  # by window
        self.reasons: list[str] = []  # what was chosen and why, for people
        for window, scale in dict(zip(spec.windows, spec.scales, strict=True)).items():
            attention = AttentionSpec(spec.heads, spec.kv_heads, spec.head_dim, scale, window)
            self.backends[window], reasons = choose_backend(attention, device, plain=plain, invariant=self.invariant)
            self.reasons += reasons
        self._layer_norm = spec.norm == "layer"
        self._eps = spec.norm_eps
        self._activation: Activation = spec.activation
        self._gated = spec.gated_mlp

    def norm(self, norm: Plain, x: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor:
        """residual += x (if there is an x yet), then its norm."""
        if self._layer_norm:
            assert norm.bias is not None
            return self.ops.layer_norm(residual if x is None else residual.add_(x), norm.weight, norm.bias, self._eps)
        if x is None:
            return self.ops.rms_norm(residual, norm.weight, self._eps)
        return self.ops.add_rms_norm(x, residual, norm.weight, self._eps)

    def qkv(self, layer: Layer, x: torch.Tensor | None, residual: torch.Tensor, step: Step) -> torch.Tensor:
        """Rotated queries [tokens, heads, dim]; keys and values go to their pages."""
        heads, kv_heads, dim = layer.attention.heads, layer.attention.kv_heads, layer.attention.head_dim
        qkv = layer.qkv(self.norm(layer.input_norm, x, residual)).unflatten(1, (heads + 2 * kv_heads, dim))
        qk, v = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
        if layer.q_norm is not None and layer.k_norm is not None:
            q = self.ops.rms_norm(qk[:, :heads], layer.q_norm.weight, self._eps)
            k = self.ops.rms_norm(qk[:, heads:], layer.k_norm.weight, self._eps)
            qk = torch.cat((q, k), dim=1)
        if step.rope is not None:
            qk = self.ops.rope(qk, *step.rope)
        kv = step.kv.layers[layer.index]
        self.ops.write_kv(qk[:, heads:], v, kv, step.batch.groups[kv.group].kv_slots)
        return qk[:, :heads]

    def attend(self, layer: Layer, q: torch.Tensor, residual: torch.Tensor, step: Step) -> torch.Tensor | None:
        """Attention over pages and the output projection, [tokens, hidden]."""
        return layer.o(self.attention(layer, q, step).flatten(1))

    def attention(self, layer: Layer, q: torch.Tensor, step: Step) -> torch.Tensor:
        """[tokens, heads, dim]; the backend plans once a step for all layers of a KV group."""
        kv = step.kv.layers[layer.index]
        group = step.batch.groups[kv.group]
        backend = self.backends[layer.attention.window]
        if step.batch.asks:
            backend = AttentionMassRows(backend)
        if kv.group not in step.plans:
            stored = replace(layer.attention, kv_itemsize=kv.k_pages.element_size())
            step.plans[kv.group] = backend.plan(step.batch, group, stored)
        return backend.forward(layer.attention, q, kv, step.batch, group, step.plans[kv.group])

    def mlp(self, layer: Layer, x: torch.Tensor | None, residual: torch.Tensor) -> torch.Tensor | None:
        up = layer.up(self.norm(layer.post_norm, x, residual))
        act = self.ops.act_and_mul if self._gated else self.ops.act
        return layer.down(act(up, self._activation))

    def head(self, head: Linear, hidden: torch.Tensor) -> torch.Tensor:
        """Logits, [rows, vocabulary]."""
        return head(hidden)
