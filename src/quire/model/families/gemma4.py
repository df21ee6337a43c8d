"""Gemma 4, its text: Gemma 3's norms and windows, heads of another size in layers that see everything (where values may
be the keys), values normed, scores not scaled; the last layers may attend keys and values of earlier ones, each layer
may take an embedding of its own (E2B, E4B), and experts may stand beside the MLP, normed apart (26B-A4B)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.model.decoder_spec import Attention, DecoderSpec, Dense, Experts, LayerSpec, Norms
from quire.model.families.architecture import ACTIVATIONS, IGNORED, Fields, Target, named_in, rope_spec
from quire.model.families.decoder_config import DecoderConfig
from quire.model.families.tensor_names import EXPERTS, POST_NORMS, PROJECTIONS, QK_NORMS, layer_of, target_of
from quire.types.errors import ModelFileError

_COMMON: dict[str, Any] = {"head_dim": 256, "num_key_value_heads": 4, "global_head_dim": 512}
_DEFAULTS = {
    "gemma4_text": {
        **_COMMON,
        "max_position_embeddings": 131072,
        "sliding_window": 512,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262144,
    },
    "gemma4_unified_text": {**_COMMON, "max_position_embeddings": 262144, "sliding_window": 1024},
}
_KINDS = {"Gemma4ForCausalLM": "gemma4_text", "Gemma4UnifiedForCausalLM": "gemma4_unified_text"}
_ROPE: dict[str, Any] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
_NAMES = {
    **PROJECTIONS,
    **QK_NORMS,
    **POST_NORMS,
    "input_layernorm": ("mixer_norm", 0),
    "pre_feedforward_layernorm": ("feed_norm", 0),
    "layer_scalar": ("layer_scalar", 0),
    "per_layer_input_gate": ("input_gate", 0),
    "per_layer_projection": ("input_up", 0),
    "post_per_layer_input_norm": ("input_norm", 0),
}
_EXPERTS = {
    **_NAMES,
    **{name.removeprefix("mlp."): place for name, place in EXPERTS.items() if name.startswith("mlp.experts.")},
    "mlp.gate_proj": ("shared_up", 0),
    "mlp.up_proj": ("shared_up", 1),
    "mlp.down_proj": ("shared_down", 0),
    "router.proj": ("router", 0),
    "router.scale": ("router_norm", 0),
    "router.per_expert_scale": ("router_scales", 0),
    "pre_feedforward_layernorm_2": ("experts_norm", 0),
    "post_feedforward_layernorm_1": ("shared_post_norm", 0),
    "post_feedforward_layernorm_2": ("experts_post_norm", 0),
}
_OF_KEYS = ("self_attn.k_proj", "self_attn.v_proj", "self_attn.k_norm", "self_attn.v_norm")


class Gemma4Family:
    names: tuple[str, ...] = (*_KINDS, *_DEFAULTS)
    gguf_names: tuple[str, ...] = ()
    gguf_keys: Mapping[str, str] = {}

    def spec(self, config: Mapping[str, Any]) -> DecoderSpec:
        defaults = _DEFAULTS[_KINDS.get(named_in(config), named_in(config))]
        fields = DecoderConfig(config, {**defaults, "num_experts_per_tok": config.get("top_k_experts")})
        if fields.raw("use_bidirectional_attention") == "all":
            raise ModelFileError("model config: attention that sees what comes later is not supported")
        types = fields.layer_types(
            "full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in range(fields.layers)
        )
        types = [*types[:-1], "full_attention"]
        width = fields.integer("hidden_size_per_layer_input", 0, least=0)
        if width and fields.raw("vocab_size_per_layer_input") != fields.raw("vocab_size"):
            raise ModelFileError("model config: vocab_size_per_layer_input other than vocab_size is not supported")
        shared = fields.integer("num_kv_shared_layers", 0, least=0, most=fields.layers - 1)
        norms = Norms(eps=fields.number("rms_norm_eps", 1e-6), before=True, after=True)
        activation = fields.choice("hidden_activation", "gelu_pytorch_tanh", ACTIVATIONS)
        mixers = _mixers(fields, types, fields.layers - shared)
        feeds = [_feed(fields, activation, wide=i >= fields.layers - shared) for i in range(fields.layers)]
        cap = fields.raw("final_logit_softcapping")
        return fields.decoder(
            "gemma4",
            [
                LayerSpec(mixer, feed, norms, input_activation=activation, scaled=True)
                for mixer, feed in zip(mixers, feeds, strict=True)
            ],
            tie_embeddings=fields.flag("tie_word_embeddings", True),
            embedding_scale=fields.hidden**0.5,
            layer_input=width,
            logit_softcap=None if cap is None else fields.number("final_logit_softcapping", 1.0),
        )

    def target(self, name: str, spec: DecoderSpec) -> Target | None:
        mixer = spec.attending.get(layer_of(name))
        if mixer is not None and mixer.kv_from is not None and any(f".{part}." in name for part in _OF_KEYS):
            return Target(IGNORED)  # files may still have what such layers do not use
        experts = isinstance(spec.layers[0].feed, Experts)
        return target_of(name, spec, _EXPERTS if experts else _NAMES)


def _mixers(fields: DecoderConfig, types: list[str], own: int) -> list[Attention]:
    """By layer; those from `own` on attend what the last layer of their type before them has kept."""
    config = {**fields.config, "rope_parameters": fields.raw("rope_parameters") or _ROPE}
    mixers: list[Attention] = []
    last: dict[str, int] = {}
    for i, each in enumerate(types):
        heads, dim = _sizes(fields, i, each)
        mixer = fields.attention(
            rope=rope_spec(config, dim, fields.max_position, each),
            window=fields.window(each),
            scale=1.0,
            qk_norm="head",
            v_norm=True,
            v_from_k=each == "full_attention" and fields.flag("attention_k_eq_v"),
            kv_from=last.get(each) if i >= own else None,
        )
        if i >= own and each not in last:
            raise ModelFileError(f"model config: layer {i} shares keys with none before it (num_kv_shared_layers)")
        if fields.heads % heads:
            raise ModelFileError(f"model config: {fields.heads} attention heads cannot share {heads} KV heads evenly")
        mixers.append(replace(mixer, kv_heads=heads, head_dim=dim))
        if i < own:
            last[each] = i
    return mixers


def _sizes(fields: DecoderConfig, layer: int, layer_type: str) -> tuple[int, int]:
    """KV heads and head dimension; configs say which layers have others, or what those that see everything have."""
    said = fields.raw("per_layer_config")
    if isinstance(said, Mapping):
        own = Fields({**fields.config, **Fields(said).mapping(str(layer))})
        return own.integer("num_key_value_heads"), own.integer("head_dim")
    if layer_type == "sliding_attention":
        return fields.kv_heads, fields.head_dim
    heads = fields.raw("num_global_key_value_heads") if fields.flag("attention_k_eq_v") else None
    return (
        fields.kv_heads if heads is None else fields.integer("num_global_key_value_heads"),
        fields.integer("global_head_dim"),
    )


def _feed(fields: DecoderConfig, activation: Any, *, wide: bool) -> Dense | Experts:
    """`wide`: of a layer without keys of its own, whose MLP may be twice as wide."""
    dense = fields.dense(activation=activation, bias=False)
    if wide and fields.flag("use_double_wide_mlp"):
        dense = replace(dense, intermediate=2 * dense.intermediate)
    if not fields.flag("enable_moe_block"):
        return dense
    return fields.experts("moe_intermediate_size", activation=activation, shared=dense.intermediate, own_norms=True)


FAMILY = Gemma4Family()
