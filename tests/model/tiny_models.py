"""Tiny random models of every family, made by transformers: the oracle's side of the comparison."""

from __future__ import annotations

import pytest
import torch
import transformers as hf
from transformers import AutoModelForCausalLM, PreTrainedModel

SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 24,
    "rope_theta": 500.0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1000.0}
LATENT = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
}
DELTA = {
    "head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 10,
    "partial_rotary_factor": 0.5,
    "pad_token_id": 0,
}
LLAMA4 = {
    "head_dim": 8,
    "intermediate_size_mlp": 56,
    "num_local_experts": 5,
    "attention_chunk_size": 11,
    "floor_scale": 6,
    "attn_scale": 0.5,
    "pad_token_id": 0,
}
GEMMA4 = {"head_dim": 8, "global_head_dim": 16, "sliding_window": 9, "vocab_size_per_layer_input": 97}
QWEN_LAYERS = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
}
MAMBA = {"mamba_n_heads": 6, "mamba_n_groups": 2, "mamba_d_state": 10, "mamba_expand": 2, "pad_token_id": 0}
MAMBA |= {"layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"]}
NEMOTRON = {name: size for name, size in SIZES.items() if name != "num_hidden_layers"} | {
    "head_dim": 12,
    "mamba_num_heads": 6,
    "mamba_head_dim": 8,
    "ssm_state_size": 10,
    "n_groups": 2,
}

CONFIGS = {
    "llama2": lambda: hf.LlamaConfig(**SIZES | {"num_key_value_heads": 6}),
    "llama-biased-tied": lambda: hf.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "llama3": lambda: hf.LlamaConfig(**SIZES, rope_parameters=dict(LLAMA3)),
    "llama-linear": lambda: hf.LlamaConfig(
        **SIZES, rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    ),
    "llama-dynamic": lambda: hf.LlamaConfig(
        **SIZES, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    ),
    "yarn": lambda: hf.LlamaConfig(**SIZES, rope_parameters=dict(YARN)),
    "yarn-mscale": lambda: hf.LlamaConfig(
        **SIZES, rope_parameters=YARN | {"mscale": 1.3, "mscale_all_dim": 0.7, "beta_fast": 8.0, "truncate": False}
    ),
    "block-sized": lambda: hf.LlamaConfig(
        **SIZES | {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 32}
    ),  # all rows are whole GGUF blocks
    "super-block-sized": lambda: hf.LlamaConfig(
        **SIZES | {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "head_dim": 32}
    ),
    "one-kv-head": lambda: hf.LlamaConfig(**SIZES | {"num_key_value_heads": 1}, head_dim=16),
    "mistral-window": lambda: hf.MistralConfig(**SIZES, sliding_window=9),
    "mistral-full": lambda: hf.MistralConfig(**SIZES, sliding_window=None),
    "qwen2": lambda: hf.Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen2-mixed-windows": lambda: hf.Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=7, max_window_layers=3
    ),
    "qwen2-layer-types": lambda: hf.Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=5, layer_types=["sliding_attention", "full_attention"] * 2
    ),
    "qwen3": lambda: hf.Qwen3Config(**SIZES, head_dim=12),
    "olmo2": lambda: hf.Olmo2Config(**SIZES),
    "olmo2-biased-tied": lambda: hf.Olmo2Config(**SIZES, attention_bias=True, tie_word_embeddings=True),
    "gemma2": lambda: hf.Gemma2Config(
        **SIZES,
        head_dim=12,
        query_pre_attn_scalar=12,
        sliding_window=9,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
    ),  # small caps, so that they show
    "gemma2-variations": lambda: hf.Gemma2Config(
        **SIZES,
        head_dim=8,
        query_pre_attn_scalar=20,
        sliding_window=7,
        layer_types=["full_attention"] * 3 + ["sliding_attention"],
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        hidden_activation="gelu",
        attention_bias=True,
        tie_word_embeddings=False,
    ),
    "granite": lambda: hf.GraniteConfig(
        **SIZES,
        embedding_multiplier=3.0,
        attention_multiplier=0.2,
        residual_multiplier=0.7,
        logits_scaling=0.4,
    ),
    "ministral": lambda: hf.MinistralConfig(
        **SIZES, head_dim=8, sliding_window=9, layer_types=["full_attention", "sliding_attention"] * 2
    ),
    "ministral3": lambda: hf.Ministral3Config(
        **SIZES, head_dim=8, rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.4}
    ),
    "smollm3": lambda: hf.SmolLM3Config(**SIZES, no_rope_layers=[1, 0, 1, 0], pad_token_id=0),
    "smollm3-gguf": lambda: hf.SmolLM3Config(**SIZES, pad_token_id=0),
    "cohere2-gguf": lambda: hf.Cohere2Config(**SIZES, sliding_window=9, logit_scale=0.5),
    "gemma3-gguf": lambda: hf.Gemma3TextConfig(
        **SIZES | {"num_hidden_layers": 7}, head_dim=12, query_pre_attn_scalar=12, sliding_window=9
    ),
    "olmo3": lambda: hf.Olmo3Config(
        **SIZES,
        sliding_window=9,
        layer_types=["sliding_attention", "full_attention"] * 2,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
            "full_attention": dict(YARN),
        },
    ),
    "gemma3": lambda: hf.Gemma3TextConfig(
        **SIZES,
        head_dim=12,
        query_pre_attn_scalar=20,
        sliding_window=9,
        layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0},
        },
    ),
    "phi3": lambda: hf.Phi3Config(**SIZES, pad_token_id=0, sliding_window=11),
    "phi3-partial": lambda: hf.Phi3Config(
        **SIZES,
        pad_token_id=0,
        rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.5, "rope_theta": 99.0},
    ),
    "phi3-longrope": lambda: hf.Phi3Config(
        **SIZES,
        pad_token_id=0,
        original_max_position_embeddings=16,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [1.0, 2.0, 3.0, 4.0],
            "original_max_position_embeddings": 16,
        },
    ),
    "cohere2": lambda: hf.Cohere2Config(
        **SIZES, sliding_window=9, logit_scale=0.5, layer_types=["sliding_attention", "full_attention"] * 2
    ),
    "glm4": lambda: hf.Glm4Config(**SIZES, head_dim=8, attention_bias=True, pad_token_id=0),
    "glm": lambda: hf.GlmConfig(**SIZES, head_dim=8, attention_bias=True, pad_token_id=0),
    "falcon-7b": lambda: hf.FalconConfig(vocab_size=97, hidden_size=48, num_hidden_layers=3, num_attention_heads=6),
    "falcon-40b": lambda: hf.FalconConfig(
        vocab_size=97,
        hidden_size=48,
        num_hidden_layers=3,
        num_attention_heads=6,
        new_decoder_architecture=True,
        num_kv_heads=2,
        bias=True,
    ),
    "falcon-serial": lambda: hf.FalconConfig(
        vocab_size=97,
        hidden_size=48,
        num_hidden_layers=3,
        num_attention_heads=6,
        parallel_attn=False,
        multi_query=False,
        bias=True,
    ),
    "mixtral": lambda: hf.MixtralConfig(**SIZES, num_local_experts=5, num_experts_per_tok=2, sliding_window=None),
    "qwen2-moe": lambda: hf.Qwen2MoeConfig(
        **SIZES,
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=40,
        mlp_only_layers=[1],
    ),
    "qwen2-moe-everywhere": lambda: hf.Qwen2MoeConfig(
        **SIZES, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=24, shared_expert_intermediate_size=40
    ),
    "qwen3-moe": lambda: hf.Qwen3MoeConfig(
        **SIZES, head_dim=12, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=24, norm_topk_prob=True
    ),
    "granite-moe": lambda: hf.GraniteMoeConfig(
        **SIZES, num_local_experts=4, num_experts_per_tok=2, residual_multiplier=0.7, logits_scaling=0.4
    ),
    "glm4-moe": lambda: hf.Glm4MoeConfig(
        **SIZES,
        head_dim=12,
        n_routed_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=1.7,
        use_qk_norm=True,
        attention_bias=True,
        pad_token_id=0,
    ),
    "gpt-oss": lambda: hf.GptOssConfig(
        **SIZES,
        head_dim=8,
        num_local_experts=6,
        num_experts_per_tok=3,
        sliding_window=9,
        layer_types=["sliding_attention", "full_attention"] * 2,
        rope_parameters=YARN | {"truncate": False},
    ),
    "deepseek-v2": lambda: hf.DeepseekV2Config(
        **SIZES | LATENT,
        q_lora_rank=None,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        topk_method="group_limited_greedy",
        routed_scaling_factor=1.3,
        first_k_dense_replace=1,
    ),
    "deepseek-v3": lambda: hf.DeepseekV3Config(
        **SIZES | LATENT,
        q_lora_rank=20,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
        rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 0.7},
    ),
    "qwen3-next": lambda: hf.Qwen3NextConfig(**SIZES | DELTA | EXPERTS, mlp_only_layers=[1]),
    "qwen3.5": lambda: hf.Qwen3_5TextConfig(
        **SIZES | DELTA | {"num_hidden_layers": 5, "head_dim": 16, "partial_rotary_factor": 0.25},
        tie_word_embeddings=True,
    ),
    "qwen3.5-moe": lambda: hf.Qwen3_5MoeTextConfig(**SIZES | DELTA | EXPERTS, layer_types=QWEN_LAYERS),
    "granite-hybrid": lambda: hf.GraniteMoeHybridConfig(
        **SIZES | MAMBA,
        num_local_experts=4,
        shared_intermediate_size=24,
        residual_multiplier=0.7,
        attention_multiplier=0.2,
        logits_scaling=0.4,
        mamba_chunk_size=16,
    ),
    "granite-hybrid-dense": lambda: hf.GraniteMoeHybridConfig(
        **SIZES | MAMBA | {"mamba_n_groups": 1},
        num_local_experts=0,
        shared_intermediate_size=72,
        position_embedding_type="rope",
        mamba_proj_bias=True,
        mamba_conv_bias=False,
        mamba_d_conv=3,
    ),
    "nemotron-h": lambda: hf.NemotronHConfig(**NEMOTRON, hybrid_override_pattern="M-M*-M-", chunk_size=16),
    "nemotron-h-moe": lambda: hf.NemotronHConfig(
        **NEMOTRON,
        hybrid_override_pattern="MEM*E",
        n_routed_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        moe_shared_expert_intermediate_size=20,
        routed_scaling_factor=1.3,
    ),
    "lfm2": lambda: hf.Lfm2Config(
        **SIZES, block_multiple_of=8, conv_bias=True, layer_types=["conv", "full_attention", "conv", "conv"]
    ),
    "lfm2-moe": lambda: hf.Lfm2MoeConfig(
        **SIZES,
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        num_dense_layers=1,
        conv_L_cache=4,
        layer_types=["conv", "full_attention", "conv", "conv"],
    ),
    "llama4": lambda: hf.Llama4TextConfig(
        **SIZES | LLAMA4, interleave_moe_layer_step=2, num_experts_per_tok=1, rope_parameters=dict(LLAMA3)
    ),
    "llama4-variations": lambda: hf.Llama4TextConfig(
        **SIZES | LLAMA4,
        num_experts_per_tok=3,
        moe_layers=[0, 1, 3],
        no_rope_layers=[1, 0, 1, 1],
        use_qk_norm=False,
        attn_temperature_tuning=False,
        attention_bias=True,
        tie_word_embeddings=True,
    ),
    "gemma4": lambda: hf.Gemma4TextConfig(
        **SIZES | GEMMA4 | {"num_hidden_layers": 6},
        hidden_size_per_layer_input=16,
        num_kv_shared_layers=3,
        use_double_wide_mlp=True,
        layer_types=["sliding_attention", "full_attention"] * 3,
        final_logit_softcapping=3.0,
    ),  # as E2B: per-layer embeddings, and layers that attend keys of others
    "gemma4-unified": lambda: hf.Gemma4UnifiedTextConfig(
        **SIZES,
        head_dim=8,
        global_head_dim=16,
        sliding_window=9,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "gemma4-moe": lambda: hf.Gemma4TextConfig(
        **SIZES | GEMMA4,
        hidden_size_per_layer_input=0,
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
        enable_moe_block=True,
        num_experts=6,
        top_k_experts=2,
        moe_intermediate_size=24,
        layer_types=["sliding_attention", "full_attention"] * 2,
        tie_word_embeddings=False,
    ),
    "llama4-gguf": lambda: hf.Llama4TextConfig(
        **SIZES | {name: value for name, value in LLAMA4.items() if "scale" not in name and "chunk" not in name},
        interleave_moe_layer_step=2,
        num_experts_per_tok=2,
        rope_parameters=dict(LLAMA3),
    ),  # chunks and temperature are llama.cpp's own
    "deepseek-v3-gguf": lambda: hf.DeepseekV3Config(
        **SIZES | LATENT,
        q_lora_rank=20,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
        rope_parameters=YARN | {"mscale": 0.7, "mscale_all_dim": 0.7},
    ),
    "qwen3.5-moe-gguf": lambda: hf.Qwen3_5MoeTextConfig(**SIZES | DELTA | EXPERTS),
    "qwen3-next-gguf": lambda: hf.Qwen3NextConfig(**SIZES | DELTA | EXPERTS),
    "gpt2": lambda: hf.GPT2Config(vocab_size=97, n_positions=128, n_embd=48, n_layer=3, n_head=4),
    "gpt2-variations": lambda: hf.GPT2Config(
        vocab_size=97,
        n_positions=128,
        n_embd=48,
        n_layer=3,
        n_head=4,
        n_inner=64,
        activation_function="gelu",
        scale_attn_by_inverse_layer_idx=True,
        tie_word_embeddings=False,
    ),
}


def tiny(name: str, seed: int = 0) -> PreTrainedModel:
    """Skips the test where the transformers that is installed has no such family."""
    try:
        config = CONFIGS[name]()
    except AttributeError as error:
        pytest.skip(f"this transformers has none: {error}")
    return filled(config, seed)


def filled(config: hf.PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    """Weights large enough, and norms and biases off their neutral values, that every part shows in the logits."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.copy_(torch.randn_like(buffer) * 0.2)
            if name.endswith("layer_scalar"):
                buffer.copy_(0.5 + torch.rand_like(buffer))
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.copy_(torch.randn_like(parameter) * 0.15)
    return model


def their_logits(model: PreTrainedModel, prompt: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([prompt])).logits[0].float()


def prompts(*lengths: int, vocabulary: int = 97, seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocabulary, (n,), generator=generator).tolist() for n in lengths]
