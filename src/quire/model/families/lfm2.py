"""LFM2: short convolutions between gates in most layers, attention with normed queries and keys in the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.model.decoder_spec import DecoderSpec, Experts, LayerSpec, Norms, Router
from quire.model.families.architecture import Target, named_in
from quire.model.families.decoder_config import DecoderConfig
from quire.model.families.tensor_names import EXPERTS, GGUF_KEYS, LLAMA_NAMES, Names, target_of
from quire.model.recurrent_spec import ShortConv

_NAMES: Names = {
    **{name: place for name, place in {**LLAMA_NAMES, **EXPERTS}.items() if name.startswith(("attn_", "ffn_", "exp_"))},
    "shortconv.in_proj": ("in_proj", 0),
    "shortconv.conv": ("conv", 0),
    "shortconv.out_proj": ("o", 0),
    "operator_norm": ("mixer_norm", 0),
    "ffn_norm": ("feed_norm", 0),
    "conv.in_proj": ("in_proj", 0),
    "conv.conv": ("conv", 0),
    "conv.out_proj": ("o", 0),
    "self_attn.q_proj": ("qkv", 0),
    "self_attn.k_proj": ("qkv", 1),
    "self_attn.v_proj": ("qkv", 2),
    "self_attn.out_proj": ("o", 0),
    "self_attn.q_layernorm": ("q_norm", 0),
    "self_attn.k_layernorm": ("k_norm", 0),
    "feed_forward.w1": ("up", 0),
    "feed_forward.w3": ("up", 1),
    "feed_forward.w2": ("down", 0),
    "feed_forward.gate": ("router", 0),
    "feed_forward.expert_correction": ("router_correction", 0),
    "feed_forward.experts.gate_up_proj": ("experts_up", 0),
    "feed_forward.experts.down_proj": ("experts_down", 0),
    "feed_forward.experts.w1": ("experts_up", 0),
    "feed_forward.experts.w3": ("experts_up", 1),
    "feed_forward.experts.w2": ("experts_down", 0),
}


class Lfm2Family:
    names: tuple[str, ...] = ("Lfm2ForCausalLM", "lfm2", "Lfm2MoeForCausalLM", "lfm2_moe")
    gguf_names: tuple[str, ...] = ("lfm2", "lfm2moe")
    gguf_keys: Mapping[str, str] = GGUF_KEYS | {
        "norm_eps": "attention.layer_norm_rms_epsilon",
        "conv_L_cache": "shortconv.l_cache",
        "num_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
        "moe_intermediate_size": "expert_feed_forward_length",
        "num_dense_layers": "leading_dense_block_count",
        "norm_topk_prob": "expert_weights_norm",
        "routed_scaling_factor": "expert_weights_scale",
    }

    def spec(self, config: Mapping[str, Any]) -> DecoderSpec:
        if isinstance(by_layer := config.get("kv_heads_by_layer"), list):  # GGUF, where widths are as they are used
            types = ["full_attention" if heads else "conv" for heads in by_layer]
            config = {**config, "layer_types": types, "block_auto_adjust_ff_dim": False}
        defaults = {"num_key_value_heads": 8, "max_position_embeddings": 128_000, "rope_theta": 1e6}
        fields, moe = DecoderConfig(config, defaults), "oe" in str(named_in(config))
        attention = fields.attention(qk_norm="head", qkv_bias=False, o_bias=False)
        conv = ShortConv(
            width=fields.hidden, taps=fields.integer("conv_L_cache", 3, least=2, most=64), bias=fields.flag("conv_bias")
        )
        attending = fields.raw("full_attn_idxs")
        types = fields.layer_types(
            ("full_attention" if attending is None or i in attending else "conv" for i in range(fields.layers)),
            "full_attention",
            "conv",
        )
        norms = Norms(eps=fields.number("norm_eps", 1e-5))
        dense = fields.dense(intermediate=_intermediate(fields, adjusted=not moe), bias=False)
        first = fields.integer("num_dense_layers", 2, least=0) if moe else fields.layers
        layers = [
            LayerSpec(attention if each == "full_attention" else conv, dense if i < first else _experts(fields), norms)
            for i, each in enumerate(types)
        ]
        tied = fields.flag("tie_embedding", fields.flag("tie_word_embeddings", True))
        return fields.decoder("lfm2_moe" if moe else "lfm2", layers, tie_embeddings=tied)

    def target(self, name: str, spec: DecoderSpec) -> Target | None:
        name = name.replace(".feed_forward.expert_bias", ".feed_forward.expert_correction.weight")
        name = name.replace("model.embedding_norm.", "model.norm.").replace("token_embd_norm.", "output_norm.")
        return target_of(name, spec, _NAMES)


def _intermediate(fields: DecoderConfig, *, adjusted: bool) -> int:
    size = fields.integer("block_ff_dim" if fields.raw("block_ff_dim") else "intermediate_size", most=1 << 24)
    if not adjusted or not fields.flag("block_auto_adjust_ff_dim", True):
        return size
    size = int(2 * size / 3)
    multiple = fields.integer("block_multiple_of", 256)
    size = int(fields.number("block_ffn_dim_multiplier", 1.0) * size)
    return multiple * -(-size // multiple)


def _experts(fields: DecoderConfig) -> Experts:
    router = Router(
        score="sigmoid",
        normalised=fields.flag("norm_topk_prob", True),
        scale=fields.number("routed_scaling_factor", 1.0),
        correction=fields.flag("use_expert_bias", True),
    )
    return fields.experts("moe_intermediate_size", router=router)


FAMILY = Lfm2Family()
