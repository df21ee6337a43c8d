"""DeepSeek V2, V3 and R1, and Kimi K2 on their layout: latent attention, and behind the first layers experts beside one
that every token takes. V2 chooses experts by a softmax, V3 by sigmoids with a correction. Layers beyond the last, which
draft several tokens, are left out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.model.decoder_spec import DecoderSpec, Experts, Latent, LayerSpec, Norms, Router
from quire.model.families.architecture import IGNORED, Fields, Target, named_in, rope_spec
from quire.model.families.decoder_config import DecoderConfig
from quire.model.families.glm4_moe import grouped_experts
from quire.model.families.tensor_names import EXPERTS, GGUF_EXPERT_KEYS, GGUF_KEYS, LLAMA_NAMES, layer_of, target_of
from quire.model.loading.stored_tensor import RotaryFirst, UnpairedHeads

_NAMES = {
    **LLAMA_NAMES,
    **EXPERTS,
    "attn_q": ("q_up", 0),
    "attn_q_a": ("q_down", 0),
    "attn_q_a_norm": ("q_norm", 0),
    "attn_q_b": ("q_up", 0),
    "attn_kv_a_mqa": ("kv_down", 0),
    "attn_kv_a_norm": ("kv_norm", 0),
    "attn_kv_b": ("kv_up", 0),
    "self_attn.q_proj": ("q_up", 0),
    "self_attn.q_a_proj": ("q_down", 0),
    "self_attn.q_a_layernorm": ("q_norm", 0),
    "self_attn.q_b_proj": ("q_up", 0),
    "self_attn.kv_a_proj_with_mqa": ("kv_down", 0),
    "self_attn.kv_a_layernorm": ("kv_norm", 0),
    "self_attn.kv_b_proj": ("kv_up", 0),
}
_SECOND = ("DeepseekV2ForCausalLM", "deepseek_v2")
_DEFAULTS = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}


class DeepseekFamily:
    names: tuple[str, ...] = (
        *_SECOND,
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        "KimiK2ForCausalLM",
        "kimi_k2",
    )
    gguf_names: tuple[str, ...] = ("deepseek2",)
    gguf_keys: Mapping[str, str] = {
        **GGUF_KEYS,
        **GGUF_EXPERT_KEYS,
        "n_routed_experts": "expert_count",
        "scoring": "expert_gating_func",
        "q_lora_rank": "attention.q_lora_rank",
        "kv_lora_rank": "attention.kv_lora_rank",
        "qk_rope_head_dim": "rope.dimension_count",
        "key_length": "attention.key_length",
        "value_length": "attention.value_length",
        "key_length_mla": "attention.key_length_mla",
        "value_length_mla": "attention.value_length_mla",
    }

    def spec(self, config: Mapping[str, Any]) -> DecoderSpec:
        if named_in(config) == "deepseek2":
            config = _from_gguf(config)
        second = named_in(config) in _SECOND
        fields = DecoderConfig({**config, "num_key_value_heads": None, "head_dim": None}, _DEFAULTS)
        rope_dim, nope_dim = fields.integer("qk_rope_head_dim"), fields.integer("qk_nope_head_dim")
        mixer = Latent(
            heads=fields.heads,
            q_rank=None if fields.raw("q_lora_rank") is None else fields.integer("q_lora_rank"),
            kv_rank=fields.integer("kv_lora_rank"),
            nope_dim=nope_dim,
            rope_dim=rope_dim,
            value_dim=fields.integer("v_head_dim"),
            scale=_scale(config, nope_dim + rope_dim),
            rope=rope_spec(fields.config, rope_dim, fields.max_position),
            bias=fields.flag("attention_bias"),
        )
        experts = _second_experts(fields) if second else grouped_experts(fields)
        dense = fields.integer("first_k_dense_replace", 0, least=0)
        norms = Norms(eps=fields.number("rms_norm_eps", 1e-6))
        layers = [LayerSpec(mixer, fields.dense() if i < dense else experts, norms) for i in range(fields.layers)]
        return fields.decoder("deepseek_v2" if second else "deepseek_v3", layers)

    def target(self, name: str, spec: DecoderSpec) -> Target | None:
        if layer_of(name) >= len(spec.layers):
            return Target(IGNORED)
        target, mixer = target_of(name, spec, _NAMES), spec.layers[0].mixer
        assert isinstance(mixer, Latent)
        if target is not None and target.module.endswith(".q_up"):
            return replace(target, order=RotaryFirst(mixer.heads, mixer.rope_dim, paired=True))
        if target is not None and target.module.endswith(".kv_down"):
            return replace(target, order=UnpairedHeads(1, mixer.rope_dim, skip=mixer.kv_rank))
        return target


def _from_gguf(config: Mapping[str, Any]) -> dict[str, Any]:
    """A file says how experts are chosen (1: by a softmax), of heads the length of keys, and of YaRN a tenth of
    `mscale_all_dim`; older ones have no lengths of their own for heads that are not compressed."""
    older = config.get("key_length_mla") is None
    keys, values = (config[name if older else f"{name}_mla"] for name in ("key_length", "value_length"))
    rope, rotated = config.get("rope_scaling"), Fields(config).integer("qk_rope_head_dim")
    if rope and (weight := rope.get("yarn_log_multiplier")):
        rope = {**rope, "mscale": 10 * weight, "mscale_all_dim": 10 * weight}
    return {
        **config,
        "model_type": "deepseek_v3" if config.get("scoring") == 2 else "deepseek_v2",
        "qk_nope_head_dim": keys - rotated if isinstance(keys, int) else None,
        "v_head_dim": values,
        "partial_rotary_factor": None,
        "rope_scaling": rope,
        "topk_method": "group_limited_greedy" if (config.get("n_group") or 1) > 1 else None,
        "norm_topk_prob": config.get("norm_topk_prob") or False,
    }


def _scale(config: Mapping[str, Any], head_dim: int) -> float:
    """YaRN of these models sharpens scores by `mscale_all_dim` where others scale cos and sin."""
    rope = Fields(Fields(config).mapping("rope_parameters", "rope_scaling"))
    weight = rope.number("mscale_all_dim", 1.0) if rope.raw("mscale_all_dim") else 0.0
    sharper = 0.1 * weight * math.log(max(1.0, rope.number("factor", 1.0))) + 1.0
    return head_dim**-0.5 * sharper * sharper


def _second_experts(fields: DecoderConfig) -> Experts:
    grouped = fields.raw("topk_method") == "group_limited_greedy"
    router = Router(
        normalised=False,
        scale=fields.number("routed_scaling_factor", 1.0),
        groups=fields.integer("n_group") if grouped else 1,
        top_groups=fields.integer("topk_group") if grouped else 1,
    )
    shared = fields.integer("n_shared_experts", 2, least=0) * fields.integer("moe_intermediate_size", most=1 << 24)
    return fields.experts("moe_intermediate_size", router=router, shared=shared)


FAMILY = DeepseekFamily()
