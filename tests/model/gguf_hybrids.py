"""GGUF files of models whose tensors llama.cpp's conversion changes: experts taken apart, latent projections split,
states of recurrent layers. Names are the `gguf` package's own wherever it maps them."""

from __future__ import annotations

import re
from collections.abc import Iterator

import gguf
import numpy as np
import torch
from transformers import PreTrainedModel

ARCHITECTURES = {
    "gpt_oss": gguf.MODEL_ARCH.GPT_OSS,
    "granitemoe": gguf.MODEL_ARCH.GRANITE_MOE,
    "glm4_moe": gguf.MODEL_ARCH.GLM4_MOE,
    "llama4_text": gguf.MODEL_ARCH.LLAMA4,
    "lfm2": gguf.MODEL_ARCH.LFM2,
    "lfm2_moe": gguf.MODEL_ARCH.LFM2MOE,
    "deepseek_v2": gguf.MODEL_ARCH.DEEPSEEK2,
    "deepseek_v3": gguf.MODEL_ARCH.DEEPSEEK2,
    "qwen3_next": gguf.MODEL_ARCH.QWEN3NEXT,
    "qwen3_5_text": gguf.MODEL_ARCH.QWEN35,
    "qwen3_5_moe_text": gguf.MODEL_ARCH.QWEN35MOE,
    "granitemoehybrid": gguf.MODEL_ARCH.GRANITE_HYBRID,
    "nemotron_h": gguf.MODEL_ARCH.NEMOTRON_H,
}
QWEN = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
RENAMED = {  # to what these are called in published files, which the package knows
    ".block_sparse_moe.router.weight": ".block_sparse_moe.router.layer.weight",
    ".e_score_correction_bias": ".e_score_correction.bias",
    ".feed_forward.expert_bias": ".feed_forward.expert_bias.bias",
    ".dt_bias": ".dt_proj.bias",
    ".sinks": ".sinks.weight",
}


def pair_heads(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows as llama.cpp's conversion orders them for its paired RoPE."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def convert_hybrid(model: PreTrainedModel, path: str) -> None:
    config, kind = model.config, model.config.model_type
    moe = kind == "nemotron_h" and "moe" in config.layers_block_type
    arch = gguf.MODEL_ARCH.NEMOTRON_H_MOE if moe else ARCHITECTURES[kind]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    blocks = len(config.layers_block_type) if kind == "nemotron_h" else config.num_hidden_layers
    writer.add_block_count(blocks)
    _describe(writer, config, kind)
    names = gguf.get_tensor_name_map(arch, blocks)
    for name, tensor in model.state_dict().items():
        if config.tie_word_embeddings and name == "lm_head.weight":
            continue
        for stored, data in _stored(name, tensor.float().numpy(), config, kind, names):
            writer.add_tensor(stored, np.ascontiguousarray(data, dtype=np.float32))
    if kind == "llama4_text":
        plain = 1 / config.rope_parameters["rope_theta"] ** (torch.arange(0, config.head_dim, 2) / config.head_dim)
        writer.add_tensor("rope_freqs.weight", (plain / model.model.rotary_emb.inv_freq).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _describe(writer: gguf.GGUFWriter, config, kind: str) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_rms_eps(
        next(getattr(config, n) for n in ("norm_eps", "layer_norm_epsilon", "rms_norm_eps") if hasattr(config, n))
    )
    _attention(writer, config, kind)
    _feeds(writer, config, kind)
    if kind in ("granitemoe", "granitemoehybrid"):
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if kind == "granitemoehybrid":
        writer.add_rope_scaling_finetuned(config.position_embedding_type == "rope")
        _mamba(writer, config.mamba_d_conv, config.mamba_d_state, config.mamba_n_groups, config.mamba_n_heads)
        writer.add_ssm_inner_size(config.mamba_expand * config.hidden_size)
    if kind == "nemotron_h":
        _mamba(writer, config.conv_kernel, config.ssm_state_size, config.n_groups, config.mamba_num_heads)
        writer.add_ssm_inner_size(config.mamba_num_heads * config.mamba_head_dim)
    if kind in QWEN:
        keys, values = config.linear_num_key_heads, config.linear_num_value_heads
        _mamba(writer, config.linear_conv_kernel_dim, config.linear_key_head_dim, keys, values)
        writer.add_ssm_inner_size(values * config.linear_value_head_dim)
        writer.add_full_attention_interval(4)
    if kind.startswith("lfm2"):
        writer.add_shortconv_l_cache(config.conv_L_cache)


def _mamba(writer: gguf.GGUFWriter, taps: int, state: int, groups: int, heads: int) -> None:
    writer.add_ssm_conv_kernel(taps)
    writer.add_ssm_state_size(state)
    writer.add_ssm_group_count(groups)
    writer.add_ssm_time_step_rank(heads)


def _attention(writer: gguf.GGUFWriter, config, kind: str) -> None:
    heads = config.num_key_value_heads
    if kind.startswith("lfm2") or kind in ("granitemoehybrid", "nemotron_h"):
        types = config.layers_block_type if kind == "nemotron_h" else config.layer_types
        writer.add_head_count_kv([heads if each in ("full_attention", "attention") else 0 for each in types])
    else:
        writer.add_head_count_kv(1 if kind.startswith("deepseek") else heads)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope:
        writer.add_rope_freq_base(rope["rope_theta"])
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if rope.get("mscale_all_dim"):
            writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
    if kind.startswith("deepseek"):
        if config.q_lora_rank is not None:
            writer.add_q_lora_rank(config.q_lora_rank)
        writer.add_kv_lora_rank(config.kv_lora_rank)
        writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
        writer.add_value_length(config.kv_lora_rank)
        writer.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
        writer.add_value_length_mla(config.v_head_dim)
        writer.add_rope_dimension_count(config.qk_rope_head_dim)
        return
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    if kind == "gpt_oss":
        writer.add_sliding_window(config.sliding_window)


def _feeds(writer: gguf.GGUFWriter, config, kind: str) -> None:
    if kind == "nemotron_h":
        moe = "moe" in config.layers_block_type
        width = config.moe_intermediate_size if moe else config.intermediate_size
        writer.add_feed_forward_length([width if each in ("mlp", "moe") else 0 for each in config.layers_block_type])
        if not moe:
            return
        writer.add_expert_shared_feed_forward_length(config.moe_shared_expert_intermediate_size)
    elif kind == "lfm2":
        width = config.block_multiple_of * -(-int(2 * config.intermediate_size / 3) // config.block_multiple_of)
        writer.add_feed_forward_length(width)
        return
    elif kind != "qwen3_5_moe_text":
        writer.add_feed_forward_length(getattr(config, "intermediate_size_mlp", config.intermediate_size))
    if kind == "granitemoehybrid":
        writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
    if kind == "qwen3_5_text":
        return
    if kind in QWEN:
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    _experts_described(writer, config, kind)


def _experts_described(writer: gguf.GGUFWriter, config, kind: str) -> None:
    counts = ("num_local_experts", "n_routed_experts", "num_experts")
    count = next(getattr(config, name) for name in counts if getattr(config, name, None) is not None)
    if not count:
        return
    writer.add_expert_count(count)
    writer.add_expert_used_count(config.num_experts_per_tok)
    if not kind.startswith("granitemoe"):
        width = config.moe_intermediate_size if hasattr(config, "moe_intermediate_size") else config.intermediate_size
        writer.add_expert_feed_forward_length(width)
    if kind == "llama4_text":
        writer.add_interleave_moe_layer_step(config.interleave_moe_layer_step)
    if kind == "lfm2_moe":
        writer.add_leading_dense_block_count(config.num_dense_layers)
    if kind in ("glm4_moe", "deepseek_v2", "deepseek_v3"):
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
    if kind in ("glm4_moe", "deepseek_v2", "deepseek_v3", "nemotron_h"):
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        if getattr(config, "norm_topk_prob", False):
            writer.add_expert_weights_norm(True)
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
        softmax = kind == "deepseek_v2"
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType["SOFTMAX" if softmax else "SIGMOID"])


def _stored(name: str, weight: np.ndarray, config, kind: str, names) -> Iterator[tuple[str, np.ndarray]]:
    """A tensor as the file has it, or the several it becomes."""
    block = int(match[1]) if (match := re.search(r"layers\.(\d+)\.", name)) else -1

    def part(what: str) -> str:
        return f"blk.{block}.{what}"

    if match := re.search(r"\.experts\.(gate_up|down|up)_proj(_bias)?$", name):
        yield from _experts(part, match[1], bool(match[2]), weight, kind)
    elif name.endswith("shared_mlp.input_linear.weight"):
        end = "_shexp" if config.num_local_experts else ""
        for each, half in zip(("gate", "up"), np.split(weight, 2), strict=True):
            yield part(f"ffn_{each}{end}.weight"), half
    elif name.endswith("shared_mlp.output_linear.weight"):
        yield part(f"ffn_down{'_shexp' if config.num_local_experts else ''}.weight"), weight
    elif name.endswith("kv_b_proj.weight"):
        heads, nope = config.num_attention_heads, config.qk_nope_head_dim
        keys, values = np.split(weight.reshape(heads, -1, weight.shape[1]), [nope], axis=1)
        yield part("attn_k_b.weight"), keys.swapaxes(1, 2)
        yield part("attn_v_b.weight"), values
    elif name.endswith("in_proj_qkvz.weight"):
        groups, key, value = config.linear_num_key_heads, config.linear_key_head_dim, config.linear_value_head_dim
        values = config.linear_num_value_heads // groups * value
        runs = np.split(weight.reshape(groups, -1, weight.shape[1]), np.cumsum([key, key, values]), axis=1)
        q, k, v, z = (run.reshape(-1, weight.shape[1]) for run in runs)
        yield part("attn_qkv.weight"), np.concatenate((q, k, v))
        yield part("attn_gate.weight"), z
    else:
        yield _name(name, kind, names), _changed(name, weight, config, kind)


def _experts(part, which: str, bias: bool, weight: np.ndarray, kind: str) -> Iterator[tuple[str, np.ndarray]]:
    """[experts, ...]: gate and up apart, rows outputs."""
    if kind in ("gpt_oss", "llama4_text") and not bias:
        weight = weight.swapaxes(1, 2)
    end = "bias" if bias else "weight"
    if which != "gate_up":
        yield part(f"ffn_{which}_exps.{end}"), weight
        return
    halves = (weight[:, ::2], weight[:, 1::2]) if kind == "gpt_oss" else np.split(weight, 2, axis=1)
    for each, half in zip(("gate", "up"), halves, strict=True):
        yield part(f"ffn_{each}_exps.{end}"), half


def _name(name: str, kind: str, names) -> str:
    for ours, theirs in RENAMED.items():
        name = name.removesuffix(ours) + theirs if name.endswith(ours) else name
    if kind == "nemotron_h":
        name = re.sub(r"^model\.", "backbone.", name).replace(".mixer.dt_proj.bias", ".mixer.dt.bias")
    found = names.get_name(name, (".weight", ".bias"))
    assert found is not None, name
    return found


def _tiled(name: str, weight: np.ndarray, config) -> np.ndarray:
    """A tensor of a DeltaNet layer with its value heads in the order in which llama.cpp repeats key heads."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    if name.endswith("out_proj.weight"):
        return _tiled(".z", weight.T, config).T
    before = 2 * keys * config.linear_key_head_dim if name.endswith(("in_proj_qkv.weight", "conv1d.weight")) else 0
    heads = weight[before:].reshape(keys, values // keys, -1, *weight.shape[1:]).swapaxes(0, 1)
    return np.concatenate((weight[:before], heads.reshape(-1, *weight.shape[1:])))


def _changed(name: str, weight: np.ndarray, config, kind: str) -> np.ndarray:
    if kind in QWEN[1:] and "linear_attn" in name and not name.endswith("linear_attn.norm.weight"):
        weight = _tiled(name, weight, config)
    if "conv1d.weight" in name or "conv.conv.weight" in name:
        return weight.squeeze(1)
    if name.endswith(".A_log"):
        return -np.exp(weight) if kind in QWEN else -np.exp(weight)[:, None]
    if name.endswith(".D"):
        return weight[:, None]
    if name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        groups = config.n_groups if kind == "nemotron_h" else config.mamba_n_groups
        return weight.reshape(groups, -1)
    if kind in QWEN and name.endswith("norm.weight") and "linear_attn" not in name:
        return weight + 1
    if kind.startswith("granitemoe") and name.endswith("q_proj.weight"):
        return pair_heads(weight, config.num_attention_heads)
    if kind.startswith("granitemoe") and name.endswith("k_proj.weight"):
        return pair_heads(weight, config.num_key_value_heads)
    return weight
