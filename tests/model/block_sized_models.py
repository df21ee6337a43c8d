"""Tiny random models of every family whose rows are whole blocks of 32, as the compiled CPU decoder takes them."""

from __future__ import annotations

import transformers as hf
from tiny_models import GEMMA4, LLAMA3, LLAMA4, QWEN_LAYERS, YARN
from tiny_models import SIZES as TINY

SIZES = TINY | {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2}
HEADS = SIZES | {"num_attention_heads": 4, "head_dim": 32}
LATENT = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
}
GROUPS = {"n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 64,
    "partial_rotary_factor": 0.5,
    "pad_token_id": 0,
}
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
}
MAMBA = {"mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_d_state": 32, "mamba_expand": 2, "pad_token_id": 0}
MAMBA |= {"layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"]}
NEMOTRON = {name: size for name, size in HEADS.items() if name != "num_hidden_layers"} | {
    "mamba_num_heads": 4,
    "mamba_head_dim": 32,
    "ssm_state_size": 32,
    "n_groups": 2,
}
GEMMA4 = GEMMA4 | {"head_dim": 32, "global_head_dim": 64}
HALF = ["sliding_attention", "full_attention"] * 2
FALCON = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}

CONFIGS = {
    "llama": lambda: hf.LlamaConfig(**HEADS, attention_bias=True, tie_word_embeddings=True),
    "phi3": lambda: hf.Phi3Config(**SIZES, pad_token_id=0, sliding_window=11),
    "smollm3": lambda: hf.SmolLM3Config(**SIZES, no_rope_layers=[1, 0, 1, 0], pad_token_id=0),
    "olmo2": lambda: hf.Olmo2Config(**SIZES, attention_bias=True),
    "olmo3": lambda: hf.Olmo3Config(
        **SIZES,
        sliding_window=9,
        layer_types=HALF,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
            "full_attention": dict(YARN),
        },
    ),
    "gemma2": lambda: hf.Gemma2Config(
        **HEADS, query_pre_attn_scalar=12, sliding_window=9, attn_logit_softcapping=2.0, final_logit_softcapping=3.0
    ),
    "gemma3": lambda: hf.Gemma3TextConfig(
        **HEADS,
        query_pre_attn_scalar=20,
        sliding_window=9,
        layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0},
        },
    ),
    "gemma4": lambda: hf.Gemma4TextConfig(
        **HEADS | GEMMA4 | {"num_hidden_layers": 6},
        hidden_size_per_layer_input=32,
        num_kv_shared_layers=3,
        use_double_wide_mlp=True,
        layer_types=["sliding_attention", "full_attention"] * 3,
        final_logit_softcapping=3.0,
    ),
    "gemma4-moe": lambda: hf.Gemma4TextConfig(
        **HEADS | GEMMA4,
        hidden_size_per_layer_input=0,
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
        enable_moe_block=True,
        num_experts=6,
        top_k_experts=2,
        moe_intermediate_size=32,
        layer_types=HALF,
        tie_word_embeddings=False,
    ),
    "granite": lambda: hf.GraniteConfig(
        **HEADS, embedding_multiplier=3.0, attention_multiplier=0.2, residual_multiplier=0.7, logits_scaling=0.4
    ),
    "granite-moe": lambda: hf.GraniteMoeConfig(
        **SIZES,
        num_local_experts=4,
        num_experts_per_tok=2,
        residual_multiplier=0.7,
        logits_scaling=0.4,
    ),
    "ministral3": lambda: hf.Ministral3Config(
        **HEADS, rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.4}
    ),
    "cohere2": lambda: hf.Cohere2Config(**SIZES, sliding_window=9, logit_scale=0.5, layer_types=HALF),
    "glm4": lambda: hf.Glm4Config(**HEADS, attention_bias=True, pad_token_id=0),
    "falcon-7b": lambda: hf.FalconConfig(**FALCON),
    "falcon-40b": lambda: hf.FalconConfig(**FALCON, new_decoder_architecture=True, num_kv_heads=2, bias=True),
    "falcon-serial": lambda: hf.FalconConfig(**FALCON, parallel_attn=False, multi_query=False, bias=True),
    "gpt2": lambda: hf.GPT2Config(vocab_size=97, n_positions=128, n_embd=64, n_layer=3, n_head=2),
    "gpt2-variations": lambda: hf.GPT2Config(
        vocab_size=97,
        n_positions=128,
        n_embd=64,
        n_layer=3,
        n_head=2,
        n_inner=96,
        activation_function="gelu",
        scale_attn_by_inverse_layer_idx=True,
        tie_word_embeddings=False,
    ),
    "mixtral": lambda: hf.MixtralConfig(**SIZES, num_local_experts=5, num_experts_per_tok=2, sliding_window=None),
    "qwen2-moe": lambda: hf.Qwen2MoeConfig(**SIZES | EXPERTS, mlp_only_layers=[1]),
    "qwen3-moe": lambda: hf.Qwen3MoeConfig(**HEADS | EXPERTS, norm_topk_prob=True),
    "glm4-moe": lambda: hf.Glm4MoeConfig(
        **HEADS | GROUPS,
        moe_intermediate_size=32,
        routed_scaling_factor=1.7,
        use_qk_norm=True,
        attention_bias=True,
        pad_token_id=0,
    ),
    "gpt-oss": lambda: hf.GptOssConfig(
        **HEADS,
        num_local_experts=6,
        num_experts_per_tok=3,
        sliding_window=9,
        layer_types=HALF,
        rope_parameters=YARN | {"truncate": False},
    ),
    "llama4": lambda: hf.Llama4TextConfig(
        **HEADS | LLAMA4 | {"head_dim": 32, "intermediate_size_mlp": 64},
        interleave_moe_layer_step=2,
        num_experts_per_tok=2,
        rope_parameters=dict(LLAMA3),
    ),
    "deepseek-v2": lambda: hf.DeepseekV2Config(
        **SIZES | LATENT | GROUPS, q_lora_rank=None, topk_method="group_limited_greedy", routed_scaling_factor=1.3
    ),
    "deepseek-v3": lambda: hf.DeepseekV3Config(
        **SIZES | LATENT | GROUPS, q_lora_rank=32, rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}
    ),
    "qwen3-next": lambda: hf.Qwen3NextConfig(**HEADS | DELTA | EXPERTS, mlp_only_layers=[1]),
    "qwen3.5": lambda: hf.Qwen3_5TextConfig(**HEADS | DELTA, tie_word_embeddings=True),
    "qwen3.5-moe": lambda: hf.Qwen3_5MoeTextConfig(**HEADS | DELTA | EXPERTS, layer_types=QWEN_LAYERS),
    "granite-hybrid": lambda: hf.GraniteMoeHybridConfig(
        **SIZES | MAMBA,
        num_local_experts=4,
        shared_intermediate_size=32,
        residual_multiplier=0.7,
        attention_multiplier=0.2,
        logits_scaling=0.4,
        mamba_chunk_size=16,
    ),
    "nemotron-h": lambda: hf.NemotronHConfig(**NEMOTRON, hybrid_override_pattern="M-M*-M-", chunk_size=16),
    "nemotron-h-moe": lambda: hf.NemotronHConfig(
        **NEMOTRON,
        hybrid_override_pattern="MEM*E",
        n_routed_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=32,
        moe_shared_expert_intermediate_size=32,
        routed_scaling_factor=1.3,
    ),
    "lfm2": lambda: hf.Lfm2Config(
        **SIZES,
        block_multiple_of=32,
        conv_bias=True,
        layer_types=["conv", "full_attention", "conv", "conv"],
    ),
    "lfm2-moe": lambda: hf.Lfm2MoeConfig(
        **SIZES,
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=32,
        num_dense_layers=1,
        conv_L_cache=4,
        layer_types=["conv", "full_attention", "conv", "conv"],
    ),
}
