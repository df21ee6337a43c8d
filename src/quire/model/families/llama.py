"""The Llama family: RMS norms, rotary positions, gated MLP. Llama 2 and 3, SmolLM2, Mistral (sliding window),
Qwen2 (QKV bias, some layers windowed) and Qwen3 (normed queries and keys) differ in a few facts only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.model.decoder_spec import Attention, DecoderSpec, Dense, LayerSpec, Norms
from quire.model.families.architecture import ACTIVATIONS, Fields, Target, named_in, rope_spec
from quire.model.families.tensor_names import GGUF_KEYS, PROJECTIONS, QK_NORMS, target_of

_KINDS = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_DEFAULTS: dict[str, dict[str, Any]] = {  # what a config.json that does not say means, as its authors' library reads it
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096},
    "qwen3": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096, "head_dim": 128},
}
_NORMS = {
    "input_layernorm": ("mixer_norm", 0),
    "attn_norm": ("mixer_norm", 0),
    "post_attention_layernorm": ("feed_norm", 0),
    "ffn_norm": ("feed_norm", 0),
}


class LlamaFamily:
    names: tuple[str, ...] = (*_KINDS, *_KINDS.values())
    gguf_names: tuple[str, ...] = ("llama", "qwen2", "qwen3")
    gguf_keys: Mapping[str, str] = GGUF_KEYS

    def spec(self, config: Mapping[str, Any]) -> DecoderSpec:
        kind = _KINDS.get(named_in(config), named_in(config))
        config = {**_DEFAULTS[kind], **config}
        fields = Fields(config)
        hidden, layers = fields.integer("hidden_size", most=1 << 20), fields.integer("num_hidden_layers", most=4096)
        heads = fields.integer("num_attention_heads")
        kv_heads, head_dim = fields.heads(hidden, heads, fields.integer("num_key_value_heads", heads))
        max_position = fields.integer("max_position_embeddings", most=1 << 30)
        attention_bias = fields.flag("attention_bias")
        attention = Attention(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            qk_norm="head" if kind == "qwen3" else None,
            rope=rope_spec(config, head_dim, max_position),
            qkv_bias=attention_bias or kind == "qwen2",
            o_bias=attention_bias and kind != "qwen2",
        )
        feed = Dense(
            intermediate=fields.integer("intermediate_size", most=1 << 24),
            activation=fields.choice("hidden_act", "silu", ACTIVATIONS),
            bias=fields.flag("mlp_bias"),
        )
        norms = Norms(eps=fields.number("rms_norm_eps", 1e-6))
        return DecoderSpec(
            architecture=kind,
            vocab_size=fields.integer("vocab_size", most=1 << 24),
            hidden=hidden,
            max_position=max_position,
            layers=tuple(
                LayerSpec(replace(attention, window=window), feed, norms) for window in _windows(fields, kind, layers)
            ),
            tie_embeddings=fields.flag("tie_word_embeddings"),
        )

    def target(self, name: str, spec: DecoderSpec) -> Target | None:
        target = target_of(name, spec, {**PROJECTIONS, **QK_NORMS, **_NORMS})
        # GGUF files of architecture llama hold queries and keys in the order of llama.cpp's paired RoPE
        paired = name.startswith("blk.") and spec.architecture in ("llama", "mistral")
        if target is None or not paired or not target.module.endswith(".qkv") or target.part > 1:
            return target
        mixer = spec.layers[0].mixer
        return replace(target, paired_heads=(mixer.heads, mixer.kv_heads)[target.part])


def _windows(fields: Fields, kind: str, layers: int) -> tuple[int | None, ...]:
    """Mistral's window holds for every layer; Qwen names the layers, or windows those from max_window_layers on.
    A bare Llama has none."""
    if kind == "llama" or fields.raw("sliding_window") is None:
        return (None,) * layers
    if kind == "mistral":
        return (fields.integer("sliding_window", most=1 << 30),) * layers
    if not fields.flag("use_sliding_window"):
        return (None,) * layers
    types = fields.raw("layer_types")
    if types is None:
        full = fields.integer("max_window_layers", 28, least=0)
        types = ["full_attention" if i < full else "sliding_attention" for i in range(layers)]
    return fields.windows(fields.integer("sliding_window", most=1 << 30), types, layers)


FAMILY = LlamaFamily()
