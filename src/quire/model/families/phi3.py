"""Phi-3 and Phi-4: Llama's blocks with queries, keys and values stored as one matrix, gate and up as another, RoPE of
a part of each head, and LongRoPE (a divisor a frequency)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.model.decoder_spec import DecoderSpec, LayerSpec, Norms
from quire.model.families.architecture import Target
from quire.model.families.decoder_config import DecoderConfig
from quire.model.families.tensor_names import GGUF_KEYS, LLAMA_NAMES, target_of

_STACKED = {
    "self_attn.qkv_proj": ("qkv", 0),
    "attn_qkv": ("qkv", 0),
    "mlp.gate_up_proj": ("up", 0),
    "ffn_up": ("up", 0),
}


class Phi3Family:
    names: tuple[str, ...] = ("Phi3ForCausalLM", "phi3")
    gguf_names: tuple[str, ...] = ("phi3",)
    gguf_keys: Mapping[str, str] = GGUF_KEYS | {
        "sliding_window": "attention.sliding_window",
        "original_max_position_embeddings": "rope.scaling.original_context_length",
    }

    def spec(self, config: Mapping[str, Any]) -> DecoderSpec:
        fields = DecoderConfig(config, {"max_position_embeddings": 4096})
        layer = LayerSpec(
            fields.attention(window=fields.window("sliding_attention")),
            fields.dense(),
            Norms(eps=fields.number("rms_norm_eps", 1e-5)),
        )
        return fields.decoder("phi3", (layer,) * fields.layers)

    def target(self, name: str, spec: DecoderSpec) -> Target | None:
        return target_of(name, spec, {**LLAMA_NAMES, **_STACKED})


FAMILY = Phi3Family()
