"""Gemma 2 and 3: norms on both sides of attention and MLP (stored less one), embeddings scaled, a scale of scores of
its own, GeGLU, windows in most layers. Gemma 2 has soft caps on scores and logits; Gemma 3 has norms of queries and
keys instead, and another RoPE in windowed layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.model.decoder_spec import DecoderSpec, LayerSpec, Norms, RopeSpec
from quire.model.families.architecture import ACTIVATIONS, Target, named_in, rope_spec
from quire.model.families.decoder_config import DecoderConfig
from quire.model.families.tensor_names import GGUF_KEYS, POST_NORMS, PROJECTIONS, QK_NORMS, target_of
from quire.types.errors import ModelFileError

_NORMS = {
    "input_layernorm": ("mixer_norm", 0),
    "attn_norm": ("mixer_norm", 0),
    "pre_feedforward_layernorm": ("feed_norm", 0),
    "ffn_norm": ("feed_norm", 0),
}
_KINDS = {
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "gemma3_text": "gemma3",
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma2": {
        "head_dim": 256,
        "num_key_value_heads": 4,
        "max_position_embeddings": 8192,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3": {
        "head_dim": 256,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "rope_theta": 1e6,
    },
}


class GemmaFamily:
    names: tuple[str, ...] = (*_KINDS, "gemma2", "gemma3")
    gguf_names: tuple[str, ...] = ("gemma2", "gemma3")
    gguf_keys: Mapping[str, str] = GGUF_KEYS | {
        "sliding_window": "attention.sliding_window",
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
        "query_pre_attn_scalar": "attention.query_pre_attn_scalar",  # no file has it: `_query_scalar` knows
    }

    def spec(self, config: Mapping[str, Any]) -> DecoderSpec:
        kind = _KINDS.get(named_in(config), named_in(config))
        fields = DecoderConfig(config, _DEFAULTS[kind])
        if fields.flag("use_bidirectional_attention"):
            raise ModelFileError("model config: attention that sees what comes later is not supported")
        every = 2 if kind == "gemma2" else fields.integer("sliding_window_pattern", 6)
        types = fields.layer_types(
            "sliding_attention" if (i + 1) % every else "full_attention" for i in range(fields.layers)
        )
        mixers = {
            each: fields.attention(
                rope=_rope(fields, kind, each),
                window=fields.window(each),
                scale=fields.number("query_pre_attn_scalar", _query_scalar(fields)) ** -0.5,
                softcap=_cap(fields, "attn_logit_softcapping") if kind == "gemma2" else None,  # unused in Gemma 3
                qk_norm=None if kind == "gemma2" else "head",
            )
            for each in types
        }
        feed = fields.dense(activation=fields.choice("hidden_activation", "gelu_pytorch_tanh", ACTIVATIONS), bias=False)
        norms = Norms(eps=fields.number("rms_norm_eps", 1e-6), before=True, after=True)
        return fields.decoder(
            kind,
            [LayerSpec(mixers[each], feed, norms) for each in types],
            tie_embeddings=fields.flag("tie_word_embeddings", True),
            embedding_scale=fields.hidden**0.5,
            logit_softcap=_cap(fields, "final_logit_softcapping"),
        )

    def target(self, name: str, spec: DecoderSpec) -> Target | None:
        return target_of(name, spec, {**PROJECTIONS, **QK_NORMS, **POST_NORMS, **_NORMS}, norm_offset=1.0)


def _cap(fields: DecoderConfig, name: str) -> float | None:
    return None if fields.raw(name) is None else fields.number(name, 1.0)


def _query_scalar(fields: DecoderConfig) -> float:
    """Of GGUF files, which do not say: the head's dimension, but for Gemma 2 of 46 and Gemma 3 of 62 layers (27B)."""
    return fields.hidden / fields.heads if fields.layers in (46, 62) else fields.head_dim


def _rope(fields: DecoderConfig, kind: str, layer_type: str) -> RopeSpec:
    """Older configs and GGUF files of Gemma 3 give windowed layers a base of their own and no scaling."""
    config = fields.config
    nested = isinstance(fields.raw("rope_parameters"), Mapping) and layer_type in fields.raw("rope_parameters")
    if kind == "gemma3" and layer_type == "sliding_attention" and not nested:
        theta = fields.number("rope_local_base_freq", 10000.0)
        config = {**config, "rope_theta": theta, "rope_scaling": None, "rope_parameters": None}
    return rope_spec(config, fields.head_dim, fields.max_position, layer_type)


FAMILY = GemmaFamily()
