"""Attention as a mixer: its weights, and what the kernels must know of it.

norm ─► qkv ─► q_norm, k_norm ─► rotate, write K and V ─► attention ─► o ─► post_norm       what a spec has none of
                                                                                            is None here
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from quire.kernels.attention_backend import AttentionSpec
from quire.model.blocks.linear import Linear, Module, Plain
from quire.model.blocks.norms import Norm
from quire.model.decoder_spec import Attention, DecoderSpec, Norms, QueryScaling
from quire.types.errors import ConfigError

LinearMaker = Callable[[int, tuple[int, ...], bool], Linear]  # columns, parts, bias
PlainMaker = Callable[..., Plain]  # sizes
NormMaker = Callable[[int, Norms], Norm]


@dataclass
class AttentionBlock:
    index: int  # of the layer
    kept_by: int  # the layer whose keys and values it attends
    kind: int  # of DecoderSpec.mixer_kinds
    rope: int  # of DecoderSpec.rope_kinds
    rotates: bool
    query_scaling: QueryScaling | None
    attention: AttentionSpec
    norm: Norm | None
    qkv: Linear  # queries (then gates of what is attended), keys, values
    gated: bool
    bidirectional: bool
    kv_parts: int  # keys and values, keys that are both, or none: another layer's
    sparse: bool  # whether queries may read only some pages
    q_norm: Norm | None
    k_norm: Norm | None
    v_norm: Norm | None
    norms_all_heads: bool  # q_norm and k_norm go over all heads at once, not over each
    sinks: Plain | None
    o: Linear
    post_norm: Norm | None

    @classmethod
    def build(
        cls, spec: DecoderSpec, index: int, itemsize: int, linear: LinearMaker, norm: NormMaker, plain: PlainMaker
    ) -> AttentionBlock:
        layer = spec.layers[index]
        mixer, norms = layer.mixer, layer.norms
        assert isinstance(mixer, Attention)
        queries, keys = mixer.heads * mixer.head_dim, mixer.kv_heads * mixer.head_dim
        q_size, k_size = (queries, keys) if mixer.qk_norm == "all" else (mixer.head_dim, mixer.head_dim)
        sinks = plain(mixer.heads) if mixer.sinks else None
        rms = replace(norms, kind="rms", bias=False, weight=mixer.qk_norm != "unit")
        plain_v = replace(norms, kind="rms", bias=False, weight=False)
        outputs = (queries, *((queries,) if mixer.gate else ()), *(keys,) * mixer.kv_parts)
        return cls(
            index=index,
            kept_by=index if mixer.kv_from is None else mixer.kv_from,
            kind=spec.mixer_kinds[index],
            rope=spec.rope_kinds[index],
            rotates=mixer.rope is not None,
            query_scaling=mixer.query_scaling,
            attention=attention_spec(spec, index, itemsize, None if sinks is None else sinks.weight),
            norm=norm(spec.hidden, norms) if norms.before else None,
            qkv=linear(spec.hidden, outputs, mixer.qkv_bias),
            gated=mixer.gate,
            bidirectional=mixer.bidirectional,
            kv_parts=mixer.kv_parts,
            sparse=mixer.sparse is not None,
            q_norm=norm(q_size, rms) if mixer.qk_norm else None,
            k_norm=norm(k_size, rms) if mixer.qk_norm and mixer.kv_parts else None,
            v_norm=norm(mixer.head_dim, plain_v) if mixer.v_norm and mixer.kv_parts else None,
            norms_all_heads=mixer.qk_norm == "all",
            sinks=sinks,
            o=linear(queries, (spec.hidden,), mixer.o_bias),
            post_norm=norm(spec.hidden, norms) if norms.after else None,
        )

    def modules(self) -> dict[str, Module | None]:
        """By the names that `Target` uses within a layer."""
        return {
            "mixer_norm": self.norm,
            "qkv": self.qkv,
            "q_norm": self.q_norm,
            "k_norm": self.k_norm,
            "v_norm": self.v_norm,
            "sinks": self.sinks,
            "o": self.o,
            "mixer_post_norm": self.post_norm,
        }

    def rescale_keys(self, factor: torch.Tensor) -> None:
        """Queries times powers of two [kv_heads, head_dim], keys times the largest of them over these; the scale of the
        scores makes up for it."""
        if self.gated:
            raise ConfigError("keys scaled by channel are for attention without an output gate")
        most = factor.max()
        self.attention = replace(self.attention, scale=self.attention.scale / most.item())
        queries, keys = factor.repeat_interleave(self.attention.heads // len(factor), dim=0), most / factor
        if self.q_norm is not None and self.k_norm is not None:
            for norm, each in ((self.q_norm, queries), (self.k_norm, keys)):
                norm.weight *= each.flatten() if self.norms_all_heads else each[0]
        else:
            self.qkv.scale(torch.cat((queries, keys, torch.ones_like(keys))).flatten())


def attention_spec(
    spec: DecoderSpec, index: int, itemsize: int = 2, sinks: torch.Tensor | None = None
) -> AttentionSpec:
    """What a backend must know of a layer's attention."""
    mixer = spec.attending[index]
    if mixer.sinks and sinks is None:
        sinks = torch.empty(mixer.heads, device="meta")
    return AttentionSpec(
        mixer.heads, mixer.kv_heads, mixer.head_dim, mixer.scale, mixer.window, itemsize,
        chunked=mixer.chunked, softcap=mixer.softcap, sinks=sinks, values_from=mixer.values_from,
    )  # fmt: skip
