"""Multi-head latent attention as a mixer, in its absorbed form: pages are never expanded to heads.

    norm ─► compress ─┬─ [rotated key | norm of the latent] ─► pages, one "head" of rope + rank numbers
                      │
    norm ─► (compress, norm) ─► queries ─┬─ rotated part ───────────────┐
                                         └─ other part x W_uk, by head ─┴─► attention ─► x W_uv, by head ─► o

A key is what all heads share; its values are the latent, a part of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from quire.kernels.attention_backend import AttentionSpec
from quire.kernels.op_signatures import Ops
from quire.model.blocks.attention import LinearMaker, NormMaker, attention_spec
from quire.model.blocks.linear import Linear, Module
from quire.model.blocks.norms import Norm
from quire.model.decoder_spec import DecoderSpec, Latent
from quire.types.errors import ConfigError


@dataclass
class LatentBlock:
    index: int  # of the layer
    kind: int  # of DecoderSpec.mixer_kinds
    rope: int  # of DecoderSpec.rope_kinds
    spec: Latent
    attention: AttentionSpec
    norm: Norm | None
    q_down: Linear | None
    q_norm: Norm | None
    q_up: Linear  # of each head: the rotated part, then the other
    kv_down: Linear  # the latent, then the key that is rotated
    kv_norm: Norm
    kv_up: Linear  # of each head: W_uk, then W_uv
    o: Linear
    post_norm: Norm | None
    rotates = True

    @property
    def kept_by(self) -> int:
        return self.index

    @classmethod
    def build(
        cls, spec: DecoderSpec, index: int, itemsize: int, linear: LinearMaker, dense: LinearMaker, norm: NormMaker
    ) -> LatentBlock:
        """`dense` makes the matrix that is used by head, as it is."""
        layer = spec.layers[index]
        mixer, rms = layer.mixer, replace(layer.norms, kind="rms", bias=False)
        assert isinstance(mixer, Latent)
        queries = mixer.heads * (mixer.rope_dim + mixer.nope_dim)
        return cls(
            index=index,
            kind=spec.mixer_kinds[index],
            rope=spec.rope_kinds[index],
            spec=mixer,
            attention=attention_spec(spec, index, itemsize),
            norm=norm(spec.hidden, layer.norms) if layer.norms.before else None,
            q_down=linear(spec.hidden, (mixer.q_rank,), mixer.bias) if mixer.q_rank else None,
            q_norm=norm(mixer.q_rank, rms) if mixer.q_rank else None,
            q_up=linear(mixer.q_rank or spec.hidden, (queries,), False),
            kv_down=linear(spec.hidden, (mixer.kv_rank, mixer.rope_dim), mixer.bias),
            kv_norm=norm(mixer.kv_rank, rms),
            kv_up=dense(mixer.kv_rank, (mixer.heads * (mixer.nope_dim + mixer.value_dim),), False),
            o=linear(mixer.heads * mixer.value_dim, (spec.hidden,), mixer.bias),
            post_norm=norm(spec.hidden, layer.norms) if layer.norms.after else None,
        )

    def modules(self) -> dict[str, Module | None]:
        """By the names that `Target` uses within a layer."""
        return {
            "mixer_norm": self.norm,
            "q_down": self.q_down,
            "q_norm": self.q_norm,
            "q_up": self.q_up,
            "kv_down": self.kv_down,
            "kv_norm": self.kv_norm,
            "kv_up": self.kv_up,
            "o": self.o,
            "mixer_post_norm": self.post_norm,
        }

    def queries_and_keys(
        self, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], ops: Ops
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries in the space of the keys, [tokens, heads, rope + rank], and keys, [tokens, 1, rope + rank]."""
        rope_dim = self.spec.rope_dim
        rotated, latent = self._keys(x, ops)
        k = torch.cat((ops.rope(rotated[:, None], *rope), latent[:, None]), dim=-1)
        q, absorbed = self._queries(x, ops)
        return torch.cat((ops.rope(q[..., :rope_dim], *rope), absorbed), dim=-1), k

    def unrotated(self, x: torch.Tensor, ops: Ops) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries [tokens, heads * (rope + rank)] and keys [tokens, rope + rank] before anything of them is rotated."""
        q, absorbed = self._queries(x, ops)
        queries = torch.cat((q[..., : self.spec.rope_dim], absorbed), dim=-1)
        return queries.flatten(1), torch.cat(self._keys(x, ops), dim=-1)

    def _keys(self, x: torch.Tensor, ops: Ops) -> tuple[torch.Tensor, torch.Tensor]:
        """The part that is to be rotated, and the latent."""
        latent, rotated = self.kv_down(x).split((self.spec.kv_rank, self.spec.rope_dim), dim=1)
        return rotated, ops.rms_norm(latent.contiguous(), self.kv_norm.weight, self.kv_norm.eps)

    def _queries(self, x: torch.Tensor, ops: Ops) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each head, the part that is to be rotated before all else; and the other in the latents' space."""
        if self.q_down is not None and self.q_norm is not None:
            x = ops.rms_norm(self.q_down(x), self.q_norm.weight, self.q_norm.eps)
        q = self.q_up(x).unflatten(1, (self.spec.heads, -1))
        absorbed = torch.bmm(q[..., self.spec.rope_dim :].transpose(0, 1), self._by_head[:, : self.spec.nope_dim])
        return q, absorbed.transpose(0, 1)

    def values(self, mixed: torch.Tensor) -> torch.Tensor:
        """Attended latents [tokens, heads, rank] → heads' values, [tokens, heads * value_dim]."""
        out = torch.bmm(mixed.transpose(0, 1), self._by_head[:, self.spec.nope_dim :].transpose(1, 2))
        return out.transpose(0, 1).flatten(1)

    @property
    def _by_head(self) -> torch.Tensor:
        """[heads, nope + value, rank]"""
        return self.kv_up.state["weight"].unflatten(0, (self.spec.heads, -1))

    def rescale_keys(self, factor: torch.Tensor) -> None:
        raise ConfigError("keys scaled by channel are for attention over keys of heads, not for latent attention")
