"""The dense feed-forward part of a layer: one MLP for every token.

norm ─► up (gate and up stacked, if gated) ─► activation ─► down ─► post_norm          what a spec has none of is None
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.kernels.op_signatures import Activation
from quire.model.blocks.attention import LinearMaker, NormMaker
from quire.model.blocks.linear import Linear, Module
from quire.model.blocks.norms import Norm
from quire.model.decoder_spec import DecoderSpec, Dense


@dataclass
class DenseBlock:
    activation: Activation
    gated: bool
    swiglu: bool  # gated by SiLU
    norm: Norm | None
    up: Linear
    down: Linear
    post_norm: Norm | None
    adds_up = False  # over ranks, by itself

    @classmethod
    def build(cls, spec: DecoderSpec, index: int, linear: LinearMaker, norm: NormMaker) -> DenseBlock:
        layer = spec.layers[index]
        feed, norms = layer.feed, layer.norms
        assert isinstance(feed, Dense)
        return cls(
            activation=feed.activation,
            gated=feed.gated,
            swiglu=feed.swiglu,
            norm=norm(spec.hidden, norms) if norms.before and layer.parallel != "one_norm" else None,
            up=linear(spec.hidden, (feed.intermediate,) * (2 if feed.gated else 1), feed.bias),
            down=linear(feed.intermediate, (spec.hidden,), feed.bias),
            post_norm=norm(spec.hidden, norms) if norms.after else None,
        )

    def modules(self) -> dict[str, Module | None]:
        """By the names that `Target` uses within a layer."""
        return {"feed_norm": self.norm, "up": self.up, "down": self.down, "feed_post_norm": self.post_norm}
