"""The Llama family: RMS norms, rotary positions, gated MLP. Llama 2 and 3, SmolLM2, Mistral (sliding window),
Qwen2 (QKV bias, some layers windowed) and Qwen3 (normed queries and keys) differ in a few facts only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from quire.model.decoder_spec import DecoderSpec
from quire.model.families.architecture import ACTIVATIONS, IGNORED, Fields, Target, named_in, rope_spec
from quire.types.errors import ModelFileError

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
_IN_LAYER = {  # name within a layer, safetensors and GGUF → (module, part)
    "input_layernorm": ("input_norm", 0),
    "attn_norm": ("input_norm", 0),
    "self_attn.q_proj": ("qkv", 0),
    "attn_q": ("qkv", 0),
    "self_attn.k_proj": ("qkv", 1),
    "attn_k": ("qkv", 1),
    "self_attn.v_proj": ("qkv", 2),
    "attn_v": ("qkv", 2),
    "self_attn.q_norm": ("q_norm", 0),
    "attn_q_norm": ("q_norm", 0),
    "self_attn.k_norm": ("k_norm", 0),
    "attn_k_norm": ("k_norm", 0),
    "self_attn.o_proj": ("o", 0),
    "attn_output": ("o", 0),
    "post_attention_layernorm": ("post_norm", 0),
    "ffn_norm": ("post_norm", 0),
    "mlp.gate_proj": ("up", 0),
    "ffn_gate": ("up", 0),
    "mlp.up_proj": ("up", 1),
    "ffn_up": ("up", 1),
    "mlp.down_proj": ("down", 0),
    "ffn_down": ("down", 0),
}
_OUTSIDE = {
    "embed_tokens": "embed",
    "token_embd": "embed",
    "norm": "final_norm",
    "output_norm": "final_norm",
    "lm_head": "head",
    "output": "head",
    "rope_freqs": "rope_divisors",
}
_LAYER = re.compile(r"(?:(?:model\.)?layers|(blk))\.(\d{1,5})\.([a-z_.]+)\.(weight|bias)")
_OTHER = re.compile(r"(?:model\.)?([a-z_]+)\.weight")


class LlamaFamily:
    names: tuple[str, ...] = (*_KINDS, *_KINDS.values())
    gguf_names: tuple[str, ...] = ("llama", "qwen2", "qwen3")

    def spec(self, config: Mapping[str, Any]) -> DecoderSpec:
        kind = _KINDS.get(named_in(config), named_in(config))
        config = {**_DEFAULTS[kind], **config}
        fields = Fields(config)
        hidden, layers = fields.integer("hidden_size", most=1 << 20), fields.integer("num_hidden_layers", most=4096)
        heads = fields.integer("num_attention_heads")
        kv_heads, head_dim = fields.heads(hidden, heads, fields.integer("num_key_value_heads", heads))
        max_position = fields.integer("max_position_embeddings", most=1 << 30)
        attention_bias = fields.flag("attention_bias")
        return DecoderSpec(
            architecture=kind,
            vocab_size=fields.integer("vocab_size", most=1 << 24),
            hidden=hidden,
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate=fields.integer("intermediate_size", most=1 << 24),
            max_position=max_position,
            windows=_windows(fields, kind, layers),
            scales=(head_dim**-0.5,) * layers,
            norm_eps=fields.number("rms_norm_eps", 1e-6),
            rope=rope_spec(config, head_dim, max_position),
            activation=fields.choice("hidden_act", "silu", ACTIVATIONS),
            qkv_bias=attention_bias or kind == "qwen2",
            o_bias=attention_bias and kind != "qwen2",
            mlp_bias=fields.flag("mlp_bias"),
            qk_norm=kind == "qwen3",
            tie_embeddings=fields.flag("tie_word_embeddings"),
        )

    def target(self, name: str, spec: DecoderSpec) -> Target | None:
        if name.endswith("rotary_emb.inv_freq"):  # old files store what we compute
            return Target(IGNORED)
        if match := _LAYER.fullmatch(name):
            gguf, layer, inner, kind = match.groups()
            if inner not in _IN_LAYER:
                return None
            module, part = _IN_LAYER[inner]
            # GGUF files of architecture llama hold queries and keys in the order of llama.cpp's paired RoPE
            paired = bool(gguf) and spec.architecture in ("llama", "mistral") and module == "qkv" and part < 2
            heads = (spec.heads, spec.kv_heads)[part] if paired else 0
            return Target(f"layers.{int(layer)}.{module}", kind, part, paired_heads=heads)
        match = _OTHER.fullmatch(name)
        if match is None or match[1] not in _OUTSIDE:
            return None
        module = _OUTSIDE[match[1]]
        return Target(IGNORED if module == "head" and spec.tie_embeddings else module)


def _windows(fields: Fields, kind: str, layers: int) -> tuple[int | None, ...]:
    """Mistral's window holds for every layer; Qwen names the layers, or windows those from max_window_layers on.
    A bare Llama has none."""
    if kind == "llama" or fields.raw("sliding_window") is None:
        return (None,) * layers
    if kind == "mistral":
        return (fields.integer("sliding_window", most=1 << 30),) * layers
    if not fields.flag("use_sliding_window"):
        return (None,) * layers
    window = fields.integer("sliding_window", most=1 << 30)
    types = fields.raw("layer_types")
    if types is None:
        full = fields.integer("max_window_layers", 28, least=0)
        types = ["full_attention" if i < full else "sliding_attention" for i in range(layers)]
    known = {"full_attention": None, "sliding_attention": window}
    if not isinstance(types, list) or len(types) != layers or any(str(t) not in known for t in types):
        raise ModelFileError(f"model config: layer_types should be {layers} of {', '.join(known)}, got {types!r}")
    return tuple(known[t] for t in types)
