"""Gemma 2: norms on both sides of attention and MLP (stored less one), soft caps on scores and logits, every second
layer windowed, embeddings scaled, a scale of scores of its own, GeGLU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.model.decoder_spec import Attention, DecoderSpec, Dense, LayerSpec, Norms
from quire.model.families.architecture import ACTIVATIONS, Fields, Target, rope_spec
from quire.model.families.tensor_names import GGUF_KEYS, PROJECTIONS, target_of
from quire.types.errors import ModelFileError

_NORMS = {
    "input_layernorm": ("mixer_norm", 0),
    "attn_norm": ("mixer_norm", 0),
    "post_attention_layernorm": ("mixer_post_norm", 0),
    "post_attention_norm": ("mixer_post_norm", 0),
    "pre_feedforward_layernorm": ("feed_norm", 0),
    "ffn_norm": ("feed_norm", 0),
    "post_feedforward_layernorm": ("feed_post_norm", 0),
    "post_ffw_norm": ("feed_post_norm", 0),
}
_DEFAULTS = {  # what a config.json that does not say means, as its authors' library reads it
    "head_dim": 256,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}


class Gemma2Family:
    names: tuple[str, ...] = ("Gemma2ForCausalLM", "gemma2")
    gguf_names: tuple[str, ...] = ("gemma2",)
    gguf_keys: Mapping[str, str] = GGUF_KEYS | {
        "sliding_window": "attention.sliding_window",
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
        "query_pre_attn_scalar": "attention.query_pre_attn_scalar",  # no file has it: `_query_scalar` knows
    }

    def spec(self, config: Mapping[str, Any]) -> DecoderSpec:
        config = {**_DEFAULTS, **config}
        fields = Fields(config)
        if fields.flag("use_bidirectional_attention"):
            raise ModelFileError("model config: attention that sees what comes later is not supported")
        hidden, layers = fields.integer("hidden_size", most=1 << 20), fields.integer("num_hidden_layers", most=4096)
        heads = fields.integer("num_attention_heads")
        kv_heads, head_dim = fields.heads(hidden, heads, fields.integer("num_key_value_heads", heads))
        max_position = fields.integer("max_position_embeddings", most=1 << 30)
        bias = fields.flag("attention_bias")
        attention = Attention(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            scale=fields.number("query_pre_attn_scalar", _query_scalar(hidden, layers, heads, head_dim)) ** -0.5,
            softcap=_cap(fields, "attn_logit_softcapping"),
            rope=rope_spec(config, head_dim, max_position),
            qkv_bias=bias,
            o_bias=bias,
        )
        feed = Dense(
            intermediate=fields.integer("intermediate_size", most=1 << 24),
            activation=fields.choice("hidden_activation", "gelu_pytorch_tanh", ACTIVATIONS),
        )
        norms = Norms(eps=fields.number("rms_norm_eps", 1e-6), before=True, after=True)
        return DecoderSpec(
            architecture="gemma2",
            vocab_size=fields.integer("vocab_size", most=1 << 24),
            hidden=hidden,
            max_position=max_position,
            layers=tuple(
                LayerSpec(replace(attention, window=window), feed, norms) for window in _windows(fields, layers)
            ),
            tie_embeddings=fields.flag("tie_word_embeddings", True),
            embedding_scale=hidden**0.5,
            logit_softcap=_cap(fields, "final_logit_softcapping"),
        )

    def target(self, name: str, spec: DecoderSpec) -> Target | None:
        return target_of(name, spec, {**PROJECTIONS, **_NORMS}, norm_offset=1.0)


def _cap(fields: Fields, name: str) -> float | None:
    return None if fields.raw(name) is None else fields.number(name, 1.0)


def _query_scalar(hidden: int, layers: int, heads: int, head_dim: int) -> float:
    """Of GGUF files, which do not say: the head's dimension, but for the model of 46 layers (27B)."""
    return hidden / heads if layers == 46 else head_dim


def _windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """Every second layer is windowed, the first among them, unless the config names them."""
    if fields.raw("sliding_window") is None:
        return (None,) * layers
    types = fields.raw("layer_types")
    if types is None:
        types = ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)]
    return fields.windows(fields.integer("sliding_window", most=1 << 30), types, layers)


FAMILY = Gemma2Family()
