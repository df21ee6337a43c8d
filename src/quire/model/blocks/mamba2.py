"""Mamba-2 as a mixer (Granite 4, Nemotron-H).

norm ─► gate, x B C, dt ─► convolution, SiLU ─► state space ─► times SiLU(gate), norm ─► o

Of each head a matrix S [head_dim, state_size] goes from token to token:

    S ─► exp(dt A) S + dt x B^T;   output S C + D x

Chunks of tokens are computed in parallel (the state space dual), and S goes from chunk to chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from quire.kernels.state_views import ChunkedTokens, LayerState, Round, Segments
from quire.model.blocks.attention import LinearMaker, NormMaker
from quire.model.blocks.linear import Linear, Module, Plain
from quire.model.blocks.norms import Norm
from quire.model.blocks.recurrent import CausalConv, ConvMaker, StateMixer, VectorMaker, gated_norm, run_rounds
from quire.model.decoder_spec import DecoderSpec
from quire.model.ranks import Ranks
from quire.model.recurrent_spec import Mamba2

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # dt x, dt A, B, C


@dataclass
class Mamba2Block(StateMixer):
    index: int  # of the layer
    spec: Mamba2
    norm: Norm | None
    in_proj: Linear  # gate; x, B and C; dt
    conv: CausalConv
    a_log: Plain
    dt_bias: Plain
    d: Plain
    gate_norm: Norm
    o: Linear
    post_norm: Norm | None
    ranks: Ranks | None  # over which the gated norm is taken

    @classmethod
    def build(
        cls,
        spec: DecoderSpec,
        index: int,
        linear: LinearMaker,
        norm: NormMaker,
        conv: ConvMaker,
        vector: VectorMaker,
        ranks: Ranks | None,
    ) -> Mamba2Block:
        layer = spec.layers[index]
        mixer, norms = layer.mixer, layer.norms
        assert isinstance(mixer, Mamba2)
        return cls(
            index=index,
            spec=mixer,
            norm=norm(spec.hidden, norms) if norms.before else None,
            in_proj=linear(spec.hidden, (mixer.inner, mixer.channels, mixer.heads), mixer.bias),
            conv=conv(mixer.channels, mixer.taps, mixer.conv_bias),
            a_log=vector(mixer.heads),
            dt_bias=vector(mixer.heads),
            d=vector(mixer.heads),
            gate_norm=norm(mixer.inner, norms),
            o=linear(mixer.inner, (spec.hidden,), mixer.bias),
            post_norm=norm(spec.hidden, norms) if norms.after else None,
            ranks=ranks if mixer.norm_over_ranks else None,
        )

    def modules(self) -> dict[str, Module | None]:
        """By the names that `Target` uses within a layer."""
        return {
            "mixer_norm": self.norm,
            "in_proj": self.in_proj,
            "conv": self.conv,
            "a_log": self.a_log,
            "dt_bias": self.dt_bias,
            "d": self.d,
            "gate_norm": self.gate_norm,
            "o": self.o,
            "mixer_post_norm": self.post_norm,
        }

    def mix(self, x: torch.Tensor, state: LayerState, rounds: list[Round]) -> torch.Tensor:
        """[tokens, hidden] → [tokens, inner]"""
        spec = self.spec
        gate, inputs, dt = self.in_proj(x).split((spec.inner, spec.channels, spec.heads), dim=1)
        dt = F.softplus(dt.float() + self.dt_bias.weight).clamp(*spec.time_step_limit)
        mixed = run_rounds(spec.inner, inputs, state, rounds, partial(self._segments, inputs, dt))
        normed = gated_norm(
            mixed.float(), gate, self.gate_norm.weight, self.gate_norm.eps,
            groups=spec.norm_groups, gate_first=True, ranks=self.ranks,
        )  # fmt: skip
        return normed.to(x.dtype)

    def _segments(
        self, inputs: torch.Tensor, dt: torch.Tensor, segments: Segments, window: torch.Tensor, matrix: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        spec, dt = self.spec, segments.take(dt)
        seen, window = self.conv(segments, segments.take(inputs), window)
        shared = spec.groups * spec.state_size
        x, b, c = F.silu(seen).float().split((spec.inner, shared, shared), dim=1)
        x, share = x.unflatten(1, (spec.heads, -1)), spec.heads // spec.groups
        b, c = (side.unflatten(1, (spec.groups, -1)).repeat_interleave(share, dim=1) for side in (b, c))
        given = x * dt[..., None], -dt * self.a_log.weight.exp(), b, c
        out, matrix = _step(given, matrix) if segments.single else _chunked(given, matrix, segments.chunks())
        return (out + x * self.d.weight[:, None]).flatten(1), window, matrix


def _step(given: Inputs, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of each segment. [segments, heads, ...], state [segments, heads, head_dim, state_size]"""
    x, decay, b, c = given
    state = torch.addcmul(state * decay.exp()[..., None, None], x[..., None], b[..., None, :])
    return torch.einsum("shdn,shn->shd", state, c), state


def _chunked(given: Inputs, state: torch.Tensor, chunks: ChunkedTokens) -> tuple[torch.Tensor, torch.Tensor]:
    """Several tokens of each segment. [tokens, heads, ...], state [segments, heads, head_dim, state_size]"""
    x, decay, b, c = (chunks.packed(part) for part in given)  # [chunks, heads, CHUNK, ...]
    total = decay.cumsum(-1)
    between = (total[..., :, None] - total[..., None, :]).tril_().exp_().tril_()  # decay from one token to a later one
    out = ((c @ b.transpose(-1, -2)) * between) @ x
    added = x.transpose(-1, -2) @ (b * (total[..., -1:] - total).exp()[..., None])
    c = c * total.exp()[..., None]
    kept = total[..., -1].exp()[..., None, None]
    state, at = state[chunks.order], 0
    for active in chunks.going_on:
        here, at = slice(at, at + active), at + active
        before = state[:active]
        out[here] += c[here] @ before.transpose(-1, -2)
        state[:active] = before * kept[here] + added[here]
    back = torch.empty_like(state)
    back[chunks.order] = state
    return chunks.unpacked(out), back
