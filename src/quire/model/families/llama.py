"""The Llama family: RMS norms, rotary positions, gated MLP. Llama 2 and 3, SmolLM2, Mistral and Ministral (windows,
queries that grow with their position), Qwen2 (QKV bias, some layers windowed), Qwen3 (normed queries and keys) and
SmolLM3 (every fourth layer knows no positions) differ in a few facts only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.model.decoder_spec import Attention, DecoderSpec, LayerSpec, Norms, QueryScaling
from quire.model.families.architecture import Target, named_in
from quire.model.families.decoder_config import DecoderConfig
from quire.model.families.tensor_names import GGUF_KEYS, LLAMA_NAMES, target_of
from quire.model.loading.stored_tensor import UnpairedHeads
from quire.types.errors import ModelFileError

_KINDS = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MinistralForCausalLM": "ministral",
    "Ministral3ForCausalLM": "ministral3",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "SmolLM3ForCausalLM": "smollm3",
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    "ministral": {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    "ministral3": {"max_position_embeddings": 262144, "num_key_value_heads": 8, "head_dim": 128},
    "qwen2": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096},
    "qwen3": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096, "head_dim": 128},
    "smollm3": {"max_position_embeddings": 32768, "num_key_value_heads": 4, "rope_theta": 2e6},
}
_PAIRED = ("llama", "mistral", "smollm3")  # whose GGUF files have queries and keys in the order of paired RoPE


class LlamaFamily:
    names: tuple[str, ...] = (*_KINDS, *_KINDS.values())
    gguf_names: tuple[str, ...] = ("llama", "qwen2", "qwen3", "smollm3")
    gguf_keys: Mapping[str, str] = GGUF_KEYS

    def spec(self, config: Mapping[str, Any]) -> DecoderSpec:
        kind = _KINDS.get(named_in(config), named_in(config))
        fields = DecoderConfig(config, _DEFAULTS[kind])
        attention = fields.attention(
            qk_norm="head" if kind == "qwen3" else None,
            qkv_bias=fields.flag("attention_bias") or kind == "qwen2",
            o_bias=fields.flag("attention_bias") and kind != "qwen2",
            query_scaling=_query_scaling(fields) if kind == "ministral3" else None,
        )
        feed, norms = fields.dense(), Norms(eps=fields.number("rms_norm_eps", 1e-6))
        layers = [LayerSpec(mixer, feed, norms) for mixer in _mixers(fields, kind, attention)]
        return fields.decoder(kind, layers, tie_embeddings=fields.flag("tie_word_embeddings", kind == "smollm3"))

    def target(self, name: str, spec: DecoderSpec) -> Target | None:
        target = target_of(name, spec, LLAMA_NAMES)
        paired = name.startswith("blk.") and spec.architecture in _PAIRED
        if target is None or not paired or not target.module.endswith(".qkv") or target.part > 1:
            return target
        mixer = spec.attention
        return replace(target, order=UnpairedHeads((mixer.heads, mixer.kv_heads)[target.part]))


def _mixers(fields: DecoderConfig, kind: str, attention: Attention) -> list[Attention]:
    """By layer. Mistral's window holds for every layer, Qwen names the layers or windows those from max_window_layers
    on, a bare Llama has none; SmolLM3 names or counts those that are not rotated."""
    if kind == "smollm3":
        rotated = fields.raw("no_rope_layers")
        if rotated is None:
            every = fields.integer("no_rope_layer_interval", 4)
            rotated = [(i + 1) % every for i in range(fields.layers)]
        if not isinstance(rotated, list) or len(rotated) < fields.layers:
            raise ModelFileError(f"model config: no_rope_layers should be {fields.layers} numbers, got {rotated!r}")
        return [attention if rotated[i] else replace(attention, rope=None) for i in range(fields.layers)]
    if kind == "llama" or fields.raw("sliding_window") is None:
        types = ["full_attention"] * fields.layers
    elif kind in ("mistral", "ministral3"):
        types = ["sliding_attention"] * fields.layers
    elif kind != "ministral" and not fields.flag("use_sliding_window"):
        types = ["full_attention"] * fields.layers
    else:
        full = fields.integer("max_window_layers", 28, least=0) if kind != "ministral" else 0
        types = fields.layer_types("full_attention" if i < full else "sliding_attention" for i in range(fields.layers))
    return [replace(attention, window=fields.window(each)) for each in types]


def _query_scaling(fields: DecoderConfig) -> QueryScaling | None:
    params = fields.mapping("rope_parameters")
    weight, period = params.get("llama_4_scaling_beta"), params.get("original_max_position_embeddings")
    return QueryScaling(float(weight), int(period)) if weight and period else None


FAMILY = LlamaFamily()
