"""Per-layer embeddings, and what a layer does with its own behind mixer and feed (Gemma 4).

token ids ─► table ──────────┐                        residual ─► gate ─► activation ─► * ─► up ─► norm ─► + residual
embeddings ─► product ─► norm ┴► one vector a layer ─────────────────────────────────────┘         (all times a scalar)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.kernels.op_signatures import Activation, Ops
from quire.model.blocks.attention import LinearMaker, NormMaker, PlainMaker
from quire.model.blocks.linear import Linear, Module, Plain
from quire.model.blocks.norms import Norm
from quire.model.decoder_spec import DecoderSpec


@dataclass
class LayerInputs:
    """One vector a layer, of each token of a step."""

    layers: int
    width: int
    table: Plain
    product: Linear
    norm: Norm

    @classmethod
    def build(cls, spec: DecoderSpec, linear: LinearMaker, norm: NormMaker, plain: PlainMaker) -> LayerInputs:
        layers, width = len(spec.layers), spec.layer_input
        product = linear(spec.hidden, (layers * width,), False)
        table = plain(spec.vocab_size, layers * width)
        return cls(layers, width, table, product, norm(width, spec.layers[0].norms))

    def modules(self) -> dict[str, Module]:
        return {"layer_inputs": self.table, "layer_inputs_product": self.product, "layer_inputs_norm": self.norm}

    def __call__(self, input_ids: torch.Tensor, embeddings: torch.Tensor, ops: Ops) -> torch.Tensor:
        """[tokens, layers, width]"""
        table = self.table.weight
        scale = torch.tensor(self.width**0.5, dtype=table.dtype).item()  # rounded as a tensor's would be
        own = (ops.take(table, input_ids) * scale).unflatten(1, (self.layers, self.width))
        projected = (self.product(embeddings) * self.product.columns**-0.5).unflatten(1, (self.layers, self.width))
        return (ops.rms_norm(projected, self.norm.weight, self.norm.eps) + own) * 2.0**-0.5


@dataclass
class LayerTail:
    index: int  # of the layer
    activation: Activation
    gate: Linear | None
    up: Linear | None
    norm: Norm | None
    scalar: Plain | None

    @classmethod
    def build(
        cls, spec: DecoderSpec, index: int, linear: LinearMaker, norm: NormMaker, plain: PlainMaker
    ) -> LayerTail | None:
        layer, width = spec.layers[index], spec.layer_input
        if not width and not layer.scaled:
            return None
        return cls(
            index=index,
            activation=layer.input_activation,
            gate=linear(spec.hidden, (width,), False) if width else None,
            up=linear(width, (spec.hidden,), False) if width else None,
            norm=norm(spec.hidden, layer.norms) if width else None,
            scalar=plain(1) if layer.scaled else None,
        )

    def modules(self) -> dict[str, Module | None]:
        """By the names that `Target` uses within a layer."""
        return {"input_gate": self.gate, "input_up": self.up, "input_norm": self.norm, "layer_scalar": self.scalar}

    def __call__(self, residual: torch.Tensor, inputs: torch.Tensor | None, ops: Ops) -> None:
        """Into the residual stream, in place."""
        if self.gate is not None and self.up is not None and self.norm is not None and inputs is not None:
            gated = ops.act(self.gate(residual), self.activation) * inputs[:, self.index]
            residual += ops.rms_norm(self.up(gated), self.norm.weight, self.norm.eps)
        if self.scalar is not None:
            residual *= self.scalar.weight
