"""Nemotron-H and Nemotron 3: blocks of one thing each (Mamba-2, attention without positions, an MLP or experts), of
which a mixer and the feed behind it make a layer here. MLPs have no gate, and square what is positive."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.model.decoder_spec import DecoderSpec, LayerSpec, Norms, Router
from quire.model.families.architecture import ACTIVATIONS, IGNORED, Fields, Target
from quire.model.families.decoder_config import DecoderConfig
from quire.model.families.mamba_config import mamba2
from quire.model.families.tensor_names import EXPERTS, GGUF_EXPERT_KEYS, GGUF_KEYS, LLAMA_NAMES, MAMBA, Names, target_of
from quire.model.recurrent_spec import Mamba2
from quire.types.errors import ModelFileError

_PATTERN = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_TYPES = {"mamba": "linear_attention", "attention": "full_attention"} | {each: each for each in _PATTERN.values()}
_FEEDS = ("mlp", "moe")
_NAMES: Names = {
    **{name: place for name, place in {**LLAMA_NAMES, **EXPERTS}.items() if name.startswith(("attn_", "ffn_", "exp_"))},
    **MAMBA,
    "ffn_up": ("up", 0),
    "ffn_up_exps": ("experts_up", 0),
    "ffn_up_shexp": ("shared_up", 0),
    "mixer_norm": ("mixer_norm", 0),
    "feed_norm": ("feed_norm", 0),
    "mixer.in_proj": ("in_proj", 0),
    "mixer.conv1d": ("conv", 0),
    "mixer.a_log": ("a_log", 0),
    "mixer.dt_bias": ("dt_bias", 0),
    "mixer.d": ("d", 0),
    "mixer.norm": ("gate_norm", 0),
    "mixer.out_proj": ("o", 0),
    "mixer.q_proj": ("qkv", 0),
    "mixer.k_proj": ("qkv", 1),
    "mixer.v_proj": ("qkv", 2),
    "mixer.o_proj": ("o", 0),
    "mixer.up_proj": ("up", 0),
    "mixer.down_proj": ("down", 0),
    "mixer.gate": ("router", 0),
    "mixer.gate.e_score_correction": ("router_correction", 0),
    "mixer.experts.up_proj": ("experts_up", 0),
    "mixer.experts.down_proj": ("experts_down", 0),
    "mixer.shared_experts.up_proj": ("shared_up", 0),
    "mixer.shared_experts.down_proj": ("shared_down", 0),
}


class NemotronHFamily:
    names: tuple[str, ...] = ("NemotronHForCausalLM", "nemotron_h")
    gguf_names: tuple[str, ...] = ("nemotron_h", "nemotron_h_moe")
    gguf_keys: Mapping[str, str] = {
        **GGUF_KEYS,
        **GGUF_EXPERT_KEYS,
        "layer_norm_epsilon": "attention.layer_norm_rms_epsilon",
        "n_routed_experts": "expert_count",
        "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length",
        "moe_latent_size": "moe_latent_size",
        "conv_kernel": "ssm.conv_kernel",
        "ssm_state_size": "ssm.state_size",
        "n_groups": "ssm.group_count",
        "mamba_num_heads": "ssm.time_step_rank",
        "mamba_inner": "ssm.inner_size",
    }

    def spec(self, config: Mapping[str, Any]) -> DecoderSpec:
        if isinstance(config.get("kv_heads_by_layer"), list):
            config = _from_gguf(config)
        types = _block_types(config)
        fields = DecoderConfig({**config, "num_hidden_layers": len(types)}, {"head_dim": 128, "num_key_value_heads": 8})
        if fields.raw("moe_latent_size") is not None:
            raise ModelFileError("model config: experts behind a latent projection (moe_latent_size) are not supported")
        act = fields.choice("mlp_hidden_act", "relu2", ACTIVATIONS)
        norms = Norms(eps=fields.number("layer_norm_epsilon", 1e-5))
        made: dict[str, Any] = {"linear_attention": _mamba(fields), "full_attention": fields.attention(rope=None)}
        if "mlp" in types:
            made["mlp"] = fields.dense(activation=act, gated=False)
        if "moe" in types:
            made["moe"] = _experts(fields, act)
        return fields.decoder("nemotron_h", [LayerSpec(made[m], made.get(feed), norms) for m, feed in _layers(types)])

    def target(self, name: str, spec: DecoderSpec) -> Target | None:
        if re.match(r"(?:model\.)?mtp\.", name):
            return Target(IGNORED)
        name = re.sub(r"^backbone\.", "model.", name)
        name = name.replace("model.embeddings.", "model.embed_tokens.").replace("model.norm_f.", "model.norm.")
        name = name.replace("output_norm.", "model.norm.")
        match = re.match(r"(?:model\.layers|blk)\.(\d{1,5})\.", name)
        if match is None:
            return target_of(name, spec, _NAMES)
        places = [(i, at) for i, layer in enumerate(spec.layers) for at in range(1 if layer.feed is None else 2)]
        if int(match[1]) >= len(places):
            return None
        layer, at = places[int(match[1])]
        name = re.sub(r"(layers\.\d+|blk\.\d+)\.(?:norm|attn_norm)\.", rf"\1.{('mixer_norm', 'feed_norm')[at]}.", name)
        target = target_of(name, spec, _NAMES)
        if target is None:
            return None
        inner = target.module.split(".")[2]
        part = target.part // 2 if inner == "experts_up" else target.part  # there is no gate beside it
        return replace(target, module=f"layers.{layer}.{inner}", part=part)


def _from_gguf(config: Mapping[str, Any]) -> dict[str, Any]:
    """A block with KV heads attends, one with a width is a feed, the others are recurrent."""
    heads, inner = (Fields(config).integer(name, most=1 << 20) for name in ("mamba_num_heads", "mamba_inner"))
    widths = config.get("feeds_by_layer")
    feed = "moe" if config.get("n_routed_experts") else "mlp"
    types = [
        "attention" if kv else feed if isinstance(widths, list) and widths[i] else "mamba"
        for i, kv in enumerate(config["kv_heads_by_layer"])
    ]
    return {
        **config,
        "layers_block_type": types,
        "mamba_head_dim": inner // heads,
        "use_conv_bias": config["conv_bias"],
    }


def _block_types(config: Mapping[str, Any]) -> list[str]:
    pattern = config.get("layers_block_type") or config.get("layer_types") or config.get("hybrid_override_pattern")
    types = [_PATTERN.get(each) for each in pattern] if isinstance(pattern, str) else pattern
    types = [_TYPES.get(str(each)) for each in types] if isinstance(types, list) else []
    known = [each for each in types if each is not None]
    if not known or len(known) != len(types) or len(known) > 4096:
        raise ModelFileError(f"model config: layers_block_type should be of {', '.join(_TYPES)}, got {pattern!r}")
    if "linear_attention" not in known or "full_attention" not in known:
        raise ModelFileError("model config: layers_block_type needs Mamba and attention blocks")
    return known


def _layers(types: list[str]) -> list[tuple[str, str]]:
    """(mixer, feed) of each layer; no feed: an empty string."""
    layers: list[tuple[str, str]] = []
    for i, each in enumerate(types):
        if each not in _FEEDS:
            layers.append((each, ""))
        elif layers and not layers[-1][1]:
            layers[-1] = (layers[-1][0], each)
        else:
            raise ModelFileError(f"model config: block {i} is a feed ({each}) without a mixer before it")
    return layers


def _mamba(fields: DecoderConfig) -> Mamba2:
    shortest = fields.number("time_step_min", 0.001)  # which transformers takes for the limit
    return mamba2(
        Fields({"time_step_limit": (shortest, float("inf"))}),
        heads=fields.integer("mamba_num_heads", 128),
        head_dim=fields.integer("mamba_head_dim", 64),
        groups=fields.integer("n_groups", fields.raw("mamba_n_groups") or 8),
        state_size=fields.integer("ssm_state_size", 128),
        taps=fields.integer("conv_kernel", fields.raw("mamba_d_conv") or 4, least=2, most=64),
        conv_bias=fields.flag("use_conv_bias", True),
        bias=fields.flag("use_bias") or fields.flag("mamba_proj_bias"),
    )


def _experts(fields: DecoderConfig, act: Any) -> Any:
    router = Router(
        score="sigmoid",
        normalised=fields.flag("norm_topk_prob", True),
        scale=fields.number("routed_scaling_factor", 1.0),
        correction=True,
        groups=fields.integer("n_group", 1),
        top_groups=fields.integer("topk_group", 1),
        group_score="top2",
    )
    shared = fields.integer("moe_shared_expert_intermediate_size", 7688, most=1 << 24)
    return fields.experts("moe_intermediate_size", activation=act, gated=False, router=router, shared=shared)


FAMILY = NemotronHFamily()
