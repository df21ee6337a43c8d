"""Names that most decoders share: of tensors in safetensors and GGUF files, and of a GGUF's key-values.

Refuses to know: what norms a family has and where they go; it says so itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from quire.model.decoder_spec import DecoderSpec
from quire.model.families.architecture import IGNORED, Target

Names = Mapping[str, tuple[str, int]]  # name within a layer, of either kind of file → (module, part)

PROJECTIONS: Names = {
    "self_attn.q_proj": ("qkv", 0),
    "attn_q": ("qkv", 0),
    "self_attn.k_proj": ("qkv", 1),
    "attn_k": ("qkv", 1),
    "self_attn.v_proj": ("qkv", 2),
    "attn_v": ("qkv", 2),
    "self_attn.o_proj": ("o", 0),
    "attn_output": ("o", 0),
    "mlp.gate_proj": ("up", 0),
    "ffn_gate": ("up", 0),
    "mlp.up_proj": ("up", 1),
    "ffn_up": ("up", 1),
    "mlp.down_proj": ("down", 0),
    "ffn_down": ("down", 0),
}
QK_NORMS: Names = {
    "self_attn.q_norm": ("q_norm", 0),
    "attn_q_norm": ("q_norm", 0),
    "self_attn.k_norm": ("k_norm", 0),
    "attn_k_norm": ("k_norm", 0),
}
POST_NORMS: Names = {
    "post_attention_layernorm": ("mixer_post_norm", 0),
    "post_attention_norm": ("mixer_post_norm", 0),
    "post_feedforward_layernorm": ("feed_post_norm", 0),
    "post_ffw_norm": ("feed_post_norm", 0),
}
LLAMA_NAMES: Names = {
    **PROJECTIONS,
    **QK_NORMS,
    "input_layernorm": ("mixer_norm", 0),
    "attn_norm": ("mixer_norm", 0),
    "post_attention_layernorm": ("feed_norm", 0),
    "ffn_norm": ("feed_norm", 0),
}
EXPERTS: Names = {  # of experts one by one, as `ExpertTensors` shows them
    "mlp.gate": ("router", 0),
    "mlp.router": ("router", 0),
    "block_sparse_moe.gate": ("router", 0),
    "block_sparse_moe.router.layer": ("router", 0),
    "ffn_gate_inp": ("router", 0),
    "mlp.gate.e_score_correction": ("router_correction", 0),
    "exp_probs_b": ("router_correction", 0),
    "mlp.experts.gate_up_proj": ("experts_up", 0),
    "mlp.experts.gate_proj": ("experts_up", 0),
    "mlp.experts.up_proj": ("experts_up", 1),
    "mlp.experts.down_proj": ("experts_down", 0),
    "block_sparse_moe.experts.w1": ("experts_up", 0),
    "block_sparse_moe.experts.w3": ("experts_up", 1),
    "block_sparse_moe.experts.w2": ("experts_down", 0),
    "block_sparse_moe.input_linear": ("experts_up", 0),
    "block_sparse_moe.output_linear": ("experts_down", 0),
    "ffn_gate_exps": ("experts_up", 0),
    "ffn_gate_up_exps": ("experts_up", 0),
    "ffn_up_exps": ("experts_up", 1),
    "ffn_down_exps": ("experts_down", 0),
    "mlp.shared_expert_gate": ("shared_gate", 0),
    "ffn_gate_inp_shexp": ("shared_gate", 0),
    "ffn_gate_shexp": ("shared_up", 0),
    "ffn_up_shexp": ("shared_up", 1),
    "ffn_down_shexp": ("shared_down", 0),
    **{
        f"mlp.{shared}.{name}": place
        for shared in ("shared_expert", "shared_experts")
        for name, place in {
            "gate_proj": ("shared_up", 0),
            "up_proj": ("shared_up", 1),
            "down_proj": ("shared_down", 0),
        }.items()
    },
}
SINKS: Names = {"self_attn.sinks": ("sinks", 0), "attn_sinks": ("sinks", 0)}
_SUFFIXES = {
    ".self_attn.sinks": ".self_attn.sinks.weight",
    ".e_score_correction_bias": ".e_score_correction.weight",
    ".exp_probs_b.bias": ".exp_probs_b.weight",
    ".layer_scalar": ".layer_scalar.weight",
    ".router.scale": ".router.scale.weight",
    ".router.per_expert_scale": ".router.per_expert_scale.weight",
    ".A_log": ".a_log.weight",
    ".dt_bias": ".dt_bias.weight",
    ".ssm_dt.bias": ".ssm_dt_bias.weight",
    ".D": ".d.weight",
}
_EXPERT = re.compile(r"\.(\d+)(?=\.|$)")
_OUTSIDE = {
    "embed_tokens": "embed",
    "token_embd": "embed",
    "norm": "final_norm",
    "output_norm": "final_norm",
    "lm_head": "head",
    "output": "head",
    "rope_freqs": "rope_divisors",
    "embed_tokens_per_layer": "layer_inputs",
    "per_layer_model_projection": "layer_inputs_product",
    "per_layer_projection_norm": "layer_inputs_norm",
}
_LAYER = re.compile(r"(?:(?:model\.)?layers|(blk))\.(\d{1,5})\.([a-z0-9_.]+)\.(weight|bias)")
_OTHER = re.compile(r"(?:model\.)?([a-z_]+)\.(weight|bias)")

MAMBA: Names = {  # of GGUF files
    "ssm_in": ("in_proj", 0),
    "ssm_conv1d": ("conv", 0),
    "ssm_a": ("a_log", 0),
    "ssm_dt_bias": ("dt_bias", 0),
    "ssm_d": ("d", 0),
    "ssm_norm": ("gate_norm", 0),
    "ssm_out": ("o", 0),
}
GGUF_EXPERT_KEYS = {
    "num_experts_per_tok": "expert_used_count",
    "n_shared_experts": "expert_shared_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "first_k_dense_replace": "leading_dense_block_count",
    "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
}
GGUF_KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}


def layer_of(name: str) -> int:
    """The layer that a tensor is of; -1: none."""
    match = re.match(r"(?:(?:model\.)?layers|blk)\.(\d{1,5})\.", name)
    return int(match[1]) if match else -1


def target_of(name: str, spec: DecoderSpec, in_layer: Names, *, norm_offset: float = 0.0) -> Target | None:
    """Where a tensor goes, by the names within a layer; None: no such name. `norm_offset` is added to norms of
    safetensors: conversion to GGUF has done so."""
    if name.endswith("rotary_emb.inv_freq"):  # old files store what we compute
        return Target(IGNORED)
    for ours, theirs in _SUFFIXES.items():
        name = name.removesuffix(ours) + theirs if name.endswith(ours) else name
    if match := _LAYER.fullmatch(name):
        gguf, layer, inner, kind = match.groups()
        expert = _EXPERT.search(inner)
        inner = _EXPERT.sub("", inner)
        if inner not in in_layer:
            return None
        module, part = in_layer[inner]
        if expert is not None:
            part += int(expert[1]) * (2 if module == "experts_up" else 1)
        offset = norm_offset if module.endswith("norm") and not gguf else 0.0
        negated = bool(gguf) and module == "a_log"
        return Target(f"layers.{int(layer)}.{module}", kind, part, offset=offset, negated_exp=negated)
    match = _OTHER.fullmatch(name)
    if match is None or match[1] not in _OUTSIDE:
        return None
    module = _OUTSIDE[match[1]]
    if module == "head" and spec.tie_embeddings:
        return Target(IGNORED)
    return Target(module, match[2], offset=norm_offset if match[1] == "norm" else 0.0)
