"""Qwen3-Next and Qwen3.5: three layers of Gated DeltaNet to one of attention with an output gate; dense or with
experts. Norms are stored less one. The two differ in how files stack the matrices of a DeltaNet layer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.model.decoder_spec import Attention, DecoderSpec, Dense, Experts, LayerSpec, Norms, Router
from quire.model.families.architecture import IGNORED, Fields, Target, named_in
from quire.model.families.decoder_config import DecoderConfig
from quire.model.families.tensor_names import EXPERTS, GGUF_KEYS, LLAMA_NAMES, MAMBA, Names, layer_of, target_of
from quire.model.loading.stored_tensor import Ungrouped
from quire.model.recurrent_spec import GatedDelta
from quire.types.errors import ModelFileError

_KINDS = {
    "Qwen3NextForCausalLM": "qwen3_next",
    "qwen3next": "qwen3_next",
    "Qwen3_5ForCausalLM": "qwen3_5_text",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe_text",
    "qwen35": "qwen3_5_text",
    "qwen35moe": "qwen3_5_moe_text",
}
_TILED = ("qwen35", "qwen35moe")  # files in which value heads are ordered so
_COMMON = {
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen3_next": _COMMON | {"num_key_value_heads": 2, "num_experts": 512, "num_experts_per_tok": 10},
    "qwen3_5_text": _COMMON | {"num_key_value_heads": 4},
    "qwen3_5_moe_text": _COMMON | {"num_key_value_heads": 2, "num_experts": 256, "num_experts_per_tok": 8},
}
_NAMES: Names = {
    **LLAMA_NAMES,
    **EXPERTS,
    "self_attn.k_proj": ("qkv", 2),
    "self_attn.v_proj": ("qkv", 3),
    "attn_k": ("qkv", 2),
    "attn_v": ("qkv", 3),
    "post_attention_norm": ("feed_norm", 0),
    "attn_qkv": ("qkvz", 0),
    "attn_gate": ("qkvz", 3),
    **{name: place for name, place in MAMBA.items() if name != "ssm_d"},
    "ssm_in": ("qkvz", 0),
    "ssm_ba": ("ba", 0),
    "ssm_beta": ("ba", 0),
    "ssm_alpha": ("ba", 1),
    "ssm_norm": ("head_norm", 0),
    "linear_attn.in_proj_qkvz": ("qkvz", 0),
    "linear_attn.in_proj_qkv": ("qkvz", 0),
    "linear_attn.in_proj_z": ("qkvz", 3),
    "linear_attn.in_proj_ba": ("ba", 0),
    "linear_attn.in_proj_b": ("ba", 0),
    "linear_attn.in_proj_a": ("ba", 1),
    "linear_attn.conv1d": ("conv", 0),
    "linear_attn.a_log": ("a_log", 0),
    "linear_attn.dt_bias": ("dt_bias", 0),
    "linear_attn.norm": ("head_norm", 0),
    "linear_attn.out_proj": ("o", 0),
}


class Qwen3NextFamily:
    names: tuple[str, ...] = (*_KINDS, *_DEFAULTS)
    gguf_names: tuple[str, ...] = ("qwen3next", *_TILED)
    gguf_keys: Mapping[str, str] = GGUF_KEYS | {
        "num_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
        "moe_intermediate_size": "expert_feed_forward_length",
        "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
        "full_attention_interval": "full_attention_interval",
        "linear_conv_kernel_dim": "ssm.conv_kernel",
        "linear_key_head_dim": "ssm.state_size",
        "linear_num_key_heads": "ssm.group_count",
        "linear_num_value_heads": "ssm.time_step_rank",
        "linear_inner": "ssm.inner_size",
        "nextn": "nextn_predict_layers",
    }

    def spec(self, config: Mapping[str, Any]) -> DecoderSpec:
        kind = _KINDS.get(named_in(config), named_in(config))
        if isinstance(inner := config.get("linear_inner"), int):  # GGUF
            heads = Fields(config).integer("linear_num_value_heads")
            main = Fields(config).integer("num_hidden_layers", most=4096) - (config["nextn"] or 0)  # others draft
            config = {**config, "linear_value_head_dim": inner // heads, "num_hidden_layers": main}
        fields = DecoderConfig(config, _DEFAULTS[kind])
        attention = fields.attention(qk_norm="head", gate=True)
        delta = replace(_delta(fields), tiled=named_in(config) in _TILED)
        every = fields.integer("full_attention_interval", 4)
        types = fields.layer_types(
            ("full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(fields.layers)),
            "full_attention",
            "linear_attention",
        )
        norms = Norms(eps=fields.number("rms_norm_eps", 1e-6))
        layers = [
            LayerSpec(attention if each == "full_attention" else delta, _feed(fields, kind, i), norms)
            for i, each in enumerate(types)
        ]
        return fields.decoder(kind, layers)

    def target(self, name: str, spec: DecoderSpec) -> Target | None:
        ahead = name.startswith("blk.") and layer_of(name) >= len(spec.layers)
        if ahead or re.match(r"(?:model\.)?mtp\.", name):  # predicts tokens ahead: a drafter, not the model
            return Target(IGNORED)
        target = target_of(name, spec, _NAMES, norm_offset=0.0 if ".linear_attn." in name else 1.0)
        if target is None or not target.module.startswith("layers."):
            return target
        mixer = spec.layers[int(target.module.split(".")[1])].mixer
        if isinstance(mixer, Attention) and target.module.endswith(".qkv") and target.part == 0:
            return replace(target, order=Ungrouped(mixer.heads, (mixer.head_dim, mixer.head_dim)))
        if isinstance(mixer, GatedDelta):
            share = mixer.value_heads // mixer.key_heads
            if ".in_proj_qkvz" in name or ".ssm_in." in name:
                values = share * mixer.value_dim
                return replace(target, order=Ungrouped(mixer.key_heads, (mixer.key_dim, mixer.key_dim, values, values)))
            if ".in_proj_ba" in name or ".ssm_ba." in name:
                return replace(target, order=Ungrouped(mixer.key_heads, (share, share)))
        return target


def _delta(fields: DecoderConfig) -> GatedDelta:
    delta = GatedDelta(
        key_heads=fields.integer("linear_num_key_heads"),
        value_heads=fields.integer("linear_num_value_heads"),
        key_dim=fields.integer("linear_key_head_dim"),
        value_dim=fields.integer("linear_value_head_dim"),
        taps=fields.integer("linear_conv_kernel_dim", least=2, most=64),
    )
    if delta.value_heads % delta.key_heads:
        raise ModelFileError(
            f"model config: {delta.value_heads} linear value heads cannot share {delta.key_heads} key heads evenly"
        )
    return delta


def _feed(fields: DecoderConfig, kind: str, layer: int) -> Dense | Experts:
    every, dense = fields.integer("decoder_sparse_step", 1), fields.integers("mlp_only_layers")
    if kind == "qwen3_5_text" or layer in dense or (layer + 1) % every or not fields.raw("num_experts"):
        return fields.dense()
    return fields.experts(
        "moe_intermediate_size",
        router=Router(normalised=fields.flag("norm_topk_prob", True)),
        shared=fields.integer("shared_expert_intermediate_size", 512, most=1 << 24),
        shared_gate=True,
    )


FAMILY = Qwen3NextFamily()
