"""A short convolution between two gates as a mixer (LFM2).

norm ─► b, c, x ─► convolution of b x ─► times c ─► o
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.kernels.state_views import LayerState, Round, Segments
from quire.model.blocks.attention import LinearMaker, NormMaker
from quire.model.blocks.linear import Linear, Module
from quire.model.blocks.norms import Norm
from quire.model.blocks.recurrent import CausalConv, ConvMaker, StateMixer, run_rounds
from quire.model.decoder_spec import DecoderSpec
from quire.model.recurrent_spec import ShortConv


@dataclass
class ShortConvBlock(StateMixer):
    index: int  # of the layer
    spec: ShortConv
    norm: Norm | None
    in_proj: Linear
    conv: CausalConv
    o: Linear
    post_norm: Norm | None

    @classmethod
    def build(
        cls, spec: DecoderSpec, index: int, linear: LinearMaker, norm: NormMaker, conv: ConvMaker
    ) -> ShortConvBlock:
        layer = spec.layers[index]
        mixer, norms = layer.mixer, layer.norms
        assert isinstance(mixer, ShortConv)
        return cls(
            index=index,
            spec=mixer,
            norm=norm(spec.hidden, norms) if norms.before else None,
            in_proj=linear(spec.hidden, (mixer.width,) * 3, mixer.bias),
            conv=conv(mixer.width, mixer.taps, mixer.bias),
            o=linear(mixer.width, (spec.hidden,), mixer.bias),
            post_norm=norm(spec.hidden, norms) if norms.after else None,
        )

    def modules(self) -> dict[str, Module | None]:
        """By the names that `Target` uses within a layer."""
        return {
            "mixer_norm": self.norm,
            "in_proj": self.in_proj,
            "conv": self.conv,
            "o": self.o,
            "mixer_post_norm": self.post_norm,
        }

    def mix(self, x: torch.Tensor, state: LayerState, rounds: list[Round]) -> torch.Tensor:
        """[tokens, hidden] → [tokens, width]"""
        b, c, x = self.in_proj(x).chunk(3, dim=1)
        inputs = b * x

        def one(
            segments: Segments, window: torch.Tensor, matrix: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            return *self.conv(segments, segments.take(inputs), window), matrix

        return run_rounds(self.spec.width, inputs, state, rounds, one) * c
