"""Granite 4: Mamba-2 in most layers, attention (often without positions) in a few; Granite's multipliers; experts
beside a shared MLP, or that alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.model.decoder_spec import DecoderSpec, LayerSpec, Norms
from quire.model.families.architecture import Fields, Target
from quire.model.families.decoder_config import DecoderConfig
from quire.model.families.granite import FAMILY as GRANITE
from quire.model.families.granite import unpaired
from quire.model.families.mamba_config import mamba2
from quire.model.families.tensor_names import EXPERTS, LLAMA_NAMES, MAMBA, Names, target_of
from quire.model.recurrent_spec import Mamba2

_NAMES: Names = {
    **LLAMA_NAMES,
    **EXPERTS,
    **MAMBA,
    "mamba.in_proj": ("in_proj", 0),
    "mamba.conv1d": ("conv", 0),
    "mamba.a_log": ("a_log", 0),
    "mamba.dt_bias": ("dt_bias", 0),
    "mamba.d": ("d", 0),
    "mamba.norm": ("gate_norm", 0),
    "mamba.out_proj": ("o", 0),
}
_SHARED: dict[bool, Names] = {  # beside experts, or alone
    True: {"shared_mlp.input_linear": ("shared_up", 0), "shared_mlp.output_linear": ("shared_down", 0)},
    False: {"shared_mlp.input_linear": ("up", 0), "shared_mlp.output_linear": ("down", 0)},
}


class GraniteHybridFamily:
    names: tuple[str, ...] = ("GraniteMoeHybridForCausalLM", "granitemoehybrid")
    gguf_names: tuple[str, ...] = ("granitehybrid",)
    gguf_keys: Mapping[str, str] = {
        **GRANITE.gguf_keys,
        "shared_intermediate_size": "expert_shared_feed_forward_length",
        "mamba_d_conv": "ssm.conv_kernel",
        "mamba_d_state": "ssm.state_size",
        "mamba_n_groups": "ssm.group_count",
        "mamba_n_heads": "ssm.time_step_rank",
        "mamba_inner": "ssm.inner_size",
        "rotates": "rope.scaling.finetuned",
    }

    def spec(self, config: Mapping[str, Any]) -> DecoderSpec:
        if isinstance(by_layer := config.get("kv_heads_by_layer"), list):
            config = _from_gguf(config, by_layer)
        fields = DecoderConfig(config)
        rope = {} if fields.raw("position_embedding_type") == "rope" else {"rope": None}
        attention = fields.attention(scale=fields.number("attention_multiplier", 1.0), **rope)
        shared = fields.integer("shared_intermediate_size", 1024, most=1 << 24)
        moe = fields.raw("num_local_experts") != 0
        feed = fields.experts("intermediate_size", shared=shared) if moe else fields.dense(intermediate=shared)
        norms = Norms(eps=fields.number("rms_norm_eps", 1e-6))
        mamba = _mamba(fields)
        types = fields.raw("layer_types") or fields.raw("layers_block_type") or ["mamba"] * fields.layers
        fields.config = {**fields.config, "layer_types": types}
        types = fields.layer_types((), "full_attention", "attention", "linear_attention", "mamba")
        return fields.decoder(
            "granitemoehybrid",
            [LayerSpec(attention if "full" in each or each == "attention" else mamba, feed, norms) for each in types],
            embedding_scale=fields.number("embedding_multiplier", 1.0),
            residual_scale=fields.number("residual_multiplier", 1.0),
            logit_scale=1 / fields.number("logits_scaling", 1.0),
        )

    def target(self, name: str, spec: DecoderSpec) -> Target | None:
        name = name.replace(".block_sparse_moe.router.weight", ".block_sparse_moe.gate.weight")
        name = name.replace(".block_sparse_moe.experts.", ".mlp.experts.")
        target = target_of(name, spec, {**_NAMES, **_SHARED[hasattr(spec.layers[0].feed, "count")]})
        return target if target is None or not name.startswith("blk.") else unpaired(target, spec)


def _from_gguf(config: Mapping[str, Any], by_layer: list[int]) -> dict[str, Any]:
    heads, inner = (Fields(config).integer(name, most=1 << 20) for name in ("mamba_n_heads", "mamba_inner"))
    return {
        **config,
        "layer_types": ["attention" if each else "mamba" for each in by_layer],
        "num_local_experts": config.get("num_local_experts") or 0,
        "mamba_d_head": inner // heads,
        "mamba_conv_bias": config["conv_bias"],
        "position_embedding_type": "rope" if config.get("rotates") else None,
    }


def _mamba(fields: DecoderConfig) -> Mamba2:
    heads = fields.integer("mamba_n_heads", 128)
    head_dim = fields.raw("mamba_d_head")
    if head_dim in (None, "auto"):
        head_dim = int(fields.number("mamba_expand", 2) * fields.hidden) // heads
    return mamba2(
        fields,
        heads=heads,
        head_dim=head_dim,
        groups=fields.integer("mamba_n_groups", 1),
        state_size=fields.integer("mamba_d_state", 256),
        taps=fields.integer("mamba_d_conv", 4, least=2, most=64),
        conv_bias=fields.flag("mamba_conv_bias", True),
        bias=fields.flag("mamba_proj_bias"),
    )


FAMILY = GraniteHybridFamily()
