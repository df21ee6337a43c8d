"""OLMo 2: Llama's blocks with RMS norms behind attention and MLP instead of before them, and norms of queries and keys
over all heads at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.model.decoder_spec import Attention, DecoderSpec, Dense, LayerSpec, Norms
from quire.model.families.architecture import ACTIVATIONS, Fields, Target, rope_spec
from quire.model.families.tensor_names import GGUF_KEYS, PROJECTIONS, QK_NORMS, target_of

_NORMS = {
    "post_attention_layernorm": ("mixer_post_norm", 0),
    "post_attention_norm": ("mixer_post_norm", 0),
    "post_feedforward_layernorm": ("feed_post_norm", 0),
    "post_ffw_norm": ("feed_post_norm", 0),
}


class Olmo2Family:
    names: tuple[str, ...] = ("Olmo2ForCausalLM", "olmo2")
    gguf_names: tuple[str, ...] = ("olmo2",)
    gguf_keys: Mapping[str, str] = GGUF_KEYS

    def spec(self, config: Mapping[str, Any]) -> DecoderSpec:
        fields = Fields(config)
        hidden, layers = fields.integer("hidden_size", most=1 << 20), fields.integer("num_hidden_layers", most=4096)
        heads = fields.integer("num_attention_heads")
        kv_heads, head_dim = fields.heads(hidden, heads, fields.integer("num_key_value_heads", heads))
        max_position = fields.integer("max_position_embeddings", 2048, most=1 << 30)
        bias = fields.flag("attention_bias")
        layer = LayerSpec(
            Attention(
                heads=heads,
                kv_heads=kv_heads,
                head_dim=head_dim,
                scale=head_dim**-0.5,
                qk_norm="all",
                rope=rope_spec(config, head_dim, max_position),
                qkv_bias=bias,
                o_bias=bias,
            ),
            Dense(
                intermediate=fields.integer("intermediate_size", most=1 << 24),
                activation=fields.choice("hidden_act", "silu", ACTIVATIONS),
            ),
            Norms(eps=fields.number("rms_norm_eps", 1e-5), before=False, after=True),
        )
        return DecoderSpec(
            architecture="olmo2",
            vocab_size=fields.integer("vocab_size", most=1 << 24),
            hidden=hidden,
            max_position=max_position,
            layers=(layer,) * layers,
            tie_embeddings=fields.flag("tie_word_embeddings"),
        )

    def target(self, name: str, spec: DecoderSpec) -> Target | None:
        return target_of(name, spec, {**PROJECTIONS, **QK_NORMS, **_NORMS})


FAMILY = Olmo2Family()
