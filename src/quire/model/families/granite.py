"""Granite: Llama's layers, with experts in some models, with multipliers of embeddings, of attention scores and of what
is added to the residual stream, and a divisor of logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.model.decoder_spec import DecoderSpec, LayerSpec, Norms
from quire.model.families.architecture import Target
from quire.model.families.decoder_config import DecoderConfig
from quire.model.families.tensor_names import EXPERTS, GGUF_KEYS, LLAMA_NAMES, target_of
from quire.model.loading.stored_tensor import UnpairedHeads


class GraniteFamily:
    names: tuple[str, ...] = ("GraniteForCausalLM", "granite", "GraniteMoeForCausalLM", "granitemoe")
    gguf_names: tuple[str, ...] = ("granite", "granitemoe")
    gguf_keys: Mapping[str, str] = GGUF_KEYS | {
        "embedding_multiplier": "embedding_scale",
        "attention_multiplier": "attention.scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
        "num_local_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
    }

    def spec(self, config: Mapping[str, Any]) -> DecoderSpec:
        fields, moe = DecoderConfig(config), bool(config.get("num_local_experts"))
        layer = LayerSpec(
            fields.attention(scale=fields.number("attention_multiplier", 1.0)),
            fields.experts("intermediate_size") if moe else fields.dense(),
            Norms(eps=fields.number("rms_norm_eps", 1e-6)),
        )
        return fields.decoder(
            "granitemoe" if moe else "granite",
            (layer,) * fields.layers,
            embedding_scale=fields.number("embedding_multiplier", 1.0),
            residual_scale=fields.number("residual_multiplier", 1.0),
            logit_scale=1 / fields.number("logits_scaling", 1.0),
        )

    def target(self, name: str, spec: DecoderSpec) -> Target | None:
        target = target_of(name, spec, {**LLAMA_NAMES, **EXPERTS})
        return target if target is None or not name.startswith("blk.") else unpaired(target, spec)


def unpaired(target: Target, spec: DecoderSpec) -> Target:
    """Of a GGUF file, which has queries and keys in the order of paired RoPE."""
    if not target.module.endswith(".qkv") or target.part > 1:
        return target
    mixer = spec.attention
    return replace(target, order=UnpairedHeads((mixer.heads, mixer.kv_heads)[target.part]))


FAMILY = GraniteFamily()
