"""Gated DeltaNet as a mixer (Qwen3-Next, Qwen3.5).

norm ─► qkvz, ba ─► convolution, SiLU ─► queries and keys of length one ─► gated delta rule ─► norm, times SiLU(z) ─► o

Of each value head a matrix S [key_dim, value_dim] goes from token to token:

    S ─► S' = exp(g) S;   S = S' + k (beta (v - k S'));   output q S

Chunks of tokens are computed in parallel (the UT transform of DeltaNet), and S goes from chunk to chunk.
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
from quire.model.blocks.recurrent import (
    CausalConv,
    ConvMaker,
    StateMixer,
    VectorMaker,
    gated_norm,
    run_rounds,
    single_round,
)
from quire.model.decoder_spec import DecoderSpec
from quire.model.recurrent_spec import GatedDelta

Rule = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # q, k, v, g, beta


@dataclass
class GatedDeltaBlock(StateMixer):
    index: int  # of the layer
    spec: GatedDelta
    norm: Norm | None
    qkvz: Linear
    ba: Linear  # beta and the decay, before what makes them so
    conv: CausalConv
    a_log: Plain
    dt_bias: Plain
    head_norm: Norm
    o: Linear
    post_norm: Norm | None

    @classmethod
    def build(
        cls,
        spec: DecoderSpec,
        index: int,
        linear: LinearMaker,
        dense: LinearMaker,
        norm: NormMaker,
        conv: ConvMaker,
        vector: VectorMaker,
    ) -> GatedDeltaBlock:
        """`dense` makes the small matrix that decides how much is remembered, as it is."""
        layer = spec.layers[index]
        mixer, norms = layer.mixer, layer.norms
        assert isinstance(mixer, GatedDelta)
        return cls(
            index=index,
            spec=mixer,
            norm=norm(spec.hidden, norms) if norms.before else None,
            qkvz=linear(spec.hidden, (mixer.keys, mixer.keys, mixer.values, mixer.values), False),
            ba=dense(spec.hidden, (mixer.value_heads, mixer.value_heads), False),
            conv=conv(2 * mixer.keys + mixer.values, mixer.taps, False),
            a_log=vector(mixer.value_heads),
            dt_bias=vector(mixer.value_heads),
            head_norm=norm(mixer.value_dim, norms),
            o=linear(mixer.values, (spec.hidden,), False),
            post_norm=norm(spec.hidden, norms) if norms.after else None,
        )

    def modules(self) -> dict[str, Module | None]:
        """By the names that `Target` uses within a layer."""
        return {
            "mixer_norm": self.norm,
            "qkvz": self.qkvz,
            "ba": self.ba,
            "conv": self.conv,
            "a_log": self.a_log,
            "dt_bias": self.dt_bias,
            "head_norm": self.head_norm,
            "o": self.o,
            "mixer_post_norm": self.post_norm,
        }

    def mix(self, x: torch.Tensor, state: LayerState, rounds: list[Round]) -> torch.Tensor:
        """[tokens, hidden] → [tokens, values]"""
        spec = self.spec
        qkv, z = self.qkvz(x).split((2 * spec.keys + spec.values, spec.values), dim=1)
        b, a = self.ba(x).float().chunk(2, dim=1)
        decay = -self.a_log.weight.exp() * F.softplus(a + self.dt_bias.weight)
        if x.is_cuda and (one := single_round(rounds)) is not None:
            mixed = self._step_by_kernel(qkv, decay, b.sigmoid(), state, one)
        else:
            mixed = run_rounds(spec.values, qkv, state, rounds, partial(self._segments, qkv, decay, b.sigmoid()))
        heads, gates = (side.unflatten(1, (spec.value_heads, -1)) for side in (mixed.float(), z))
        normed = gated_norm(heads, gates, self.head_norm.weight, self.head_norm.eps, gate_first=False)
        return normed.flatten(1).to(x.dtype)

    def _step_by_kernel(
        self, qkv: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, state: LayerState, one: Segments
    ) -> torch.Tensor:
        """A token of each row, states from cell to cell in one launch."""
        from quire.kernels.triton.gated_delta_kernel import gated_delta_step

        seen, window = self.conv(one, qkv, state.window[one.sources])
        state.window[one.targets] = window.float()
        return gated_delta_step(
            seen, decay, beta, state.matrix, one.sources, one.targets, self.spec.key_heads, tiled=self.spec.tiled
        )

    def _segments(
        self,
        qkv: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor,
        segments: Segments,
        window: torch.Tensor,
        matrix: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        spec = self.spec
        seen, window = self.conv(segments, segments.take(qkv), window)
        q, k, v = F.silu(seen).float().split((spec.keys, spec.keys, spec.values), dim=1)
        q, k = (self._shared(_unit(side.unflatten(1, (spec.key_heads, -1)))) for side in (q, k))
        v = v.unflatten(1, (spec.value_heads, -1))
        rule = q * spec.key_dim**-0.5, k, v, segments.take(decay), segments.take(beta)
        out, matrix = _step(rule, matrix) if segments.single else _chunked(rule, matrix, segments.chunks())
        return out.flatten(1), window, matrix

    def _shared(self, keys: torch.Tensor) -> torch.Tensor:
        """[tokens, key heads, dim] for each value head."""
        share = self.spec.value_heads // self.spec.key_heads
        return keys.repeat(1, share, 1) if self.spec.tiled else keys.repeat_interleave(share, dim=1)


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)


def _step(rule: Rule, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of each segment. [segments, heads, ...], state [segments, heads, key_dim, value_dim]"""
    q, k, v, g, beta = rule
    state = state * g.exp()[..., None, None]
    change = (v - torch.einsum("shkv,shk->shv", state, k)) * beta[..., None]
    state = torch.addcmul(state, k[..., None], change[..., None, :])
    return torch.einsum("shkv,shk->shv", state, q), state


def _chunked(rule: Rule, state: torch.Tensor, chunks: ChunkedTokens) -> tuple[torch.Tensor, torch.Tensor]:
    """Several tokens of each segment. [tokens, heads, ...], state [segments, heads, key_dim, value_dim]"""
    q, k, v, g, beta = (chunks.packed(part) for part in rule)  # [chunks, heads, CHUNK, ...]
    total = g.cumsum(-1)
    between = (total[..., :, None] - total[..., None, :]).tril_().exp_().tril_()  # decay from one token to a later one
    keys = k * beta[..., None]
    system = (keys @ k.transpose(-1, -2)) * between  # the unit diagonal is taken for granted
    values = torch.linalg.solve_triangular(system, v * beta[..., None], upper=False, unitriangular=True)
    erased = torch.linalg.solve_triangular(system, keys * total.exp()[..., None], upper=False, unitriangular=True)
    inner = (q @ k.transpose(-1, -2)) * between
    q, k = q * total.exp()[..., None], k * (total[..., -1:] - total).exp()[..., None]
    kept = total[..., -1].exp()[..., None, None]
    out, state, at = torch.empty_like(values), state[chunks.order], 0
    for active in chunks.going_on:
        here, at = slice(at, at + active), at + active
        before = state[:active]
        new = values[here] - erased[here] @ before
        out[here] = q[here] @ before + inner[here] @ new
        state[:active] = before * kept[here] + k[here].transpose(-1, -2) @ new
    back = torch.empty_like(state)
    back[chunks.order] = state
    return chunks.unpacked(out), back
