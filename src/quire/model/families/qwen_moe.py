"""Qwen2-MoE and Qwen3-MoE: Qwen's attention, and experts in most layers; Qwen2-MoE has a gated one that every token
takes beside them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.model.decoder_spec import DecoderSpec, LayerSpec, Norms, Router
from quire.model.families.architecture import Target, named_in
from quire.model.families.decoder_config import DecoderConfig
from quire.model.families.tensor_names import EXPERTS, GGUF_KEYS, LLAMA_NAMES, target_of

_DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"num_key_value_heads": 16, "max_position_embeddings": 32768, "num_experts_per_tok": 4},
    "qwen3_moe": {"num_key_value_heads": 4, "max_position_embeddings": 32768, "num_experts_per_tok": 8},
}
_KINDS = {"Qwen2MoeForCausalLM": "qwen2_moe", "qwen2moe": "qwen2_moe"} | {
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "qwen3moe": "qwen3_moe",
}


class QwenMoeFamily:
    names: tuple[str, ...] = (*_KINDS, *_DEFAULTS)
    gguf_names: tuple[str, ...] = ("qwen2moe", "qwen3moe")
    gguf_keys: Mapping[str, str] = GGUF_KEYS | {
        "num_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
        "moe_intermediate_size": "expert_feed_forward_length",
        "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    }

    def spec(self, config: Mapping[str, Any]) -> DecoderSpec:
        kind = _KINDS.get(named_in(config), named_in(config))
        fields = DecoderConfig(config, _DEFAULTS[kind])
        second = kind == "qwen2_moe"
        attention = fields.attention(
            qk_norm=None if second else "head",
            qkv_bias=fields.flag("qkv_bias", second) or fields.flag("attention_bias"),
            o_bias=not second and fields.flag("attention_bias"),
        )
        gguf = named_in(config) in ("qwen2moe", "qwen3moe")  # which do not say, and mean what the models had
        router = Router(normalised=fields.flag("norm_topk_prob", gguf and not second))
        experts = fields.experts(
            "moe_intermediate_size",
            router=router,
            shared=fields.integer("shared_expert_intermediate_size", most=1 << 24) if second else 0,
            shared_gate=second,
        )
        every, dense = fields.integer("decoder_sparse_step", 1), fields.integers("mlp_only_layers")
        norms = Norms(eps=fields.number("rms_norm_eps", 1e-6))
        layers = [
            LayerSpec(attention, fields.dense() if i in dense or (i + 1) % every else experts, norms)
            for i in range(fields.layers)
        ]
        return fields.decoder(kind, layers)

    def target(self, name: str, spec: DecoderSpec) -> Target | None:
        return target_of(name, spec, {**LLAMA_NAMES, **EXPERTS})


FAMILY = QwenMoeFamily()
