"""Llama 4 (Scout, Maverick), its text: three layers of rotary positions and attention within chunks, queries and keys
L2-normed, to one that knows no positions and sees everything, its queries sharpened with their position; experts beside
a shared one in every or every second layer, chosen by sigmoids that weigh their inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.model.decoder_spec import Attention, DecoderSpec, LayerSpec, Norms, QueryScaling, Router
from quire.model.families.architecture import Target, named_in
from quire.model.families.decoder_config import DecoderConfig
from quire.model.families.tensor_names import EXPERTS, GGUF_KEYS, LLAMA_NAMES, target_of
from quire.model.loading.stored_tensor import UnpairedHeads
from quire.types.errors import ModelFileError

_DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "num_local_experts": 16,
    "num_experts_per_tok": 1,
    "attention_chunk_size": 8192,
}
_NAMES = {name.replace("mlp.", "feed_forward."): place for name, place in {**LLAMA_NAMES, **EXPERTS}.items()}


class Llama4Family:
    names: tuple[str, ...] = ("Llama4ForCausalLM", "llama4_text")
    gguf_names: tuple[str, ...] = ("llama4",)
    gguf_keys: Mapping[str, str] = GGUF_KEYS | {
        "intermediate_size": "expert_feed_forward_length",
        "intermediate_size_mlp": "feed_forward_length",
        "interleave_moe_layer_step": "interleave_moe_layer_step",
        "num_local_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
        "sliding_window": "attention.sliding_window",
        "attn_scale": "attention.temperature_scale",
        "floor_scale": "attention.temperature_length",
    }

    def spec(self, config: Mapping[str, Any]) -> DecoderSpec:
        if named_in(config) == "llama4":  # GGUF: what files do not say is as llama.cpp has it
            chunk = None if config["sliding_window"] == 0 else _DEFAULTS["attention_chunk_size"]
            config = {**config, "use_qk_norm": config["num_local_experts"] != 128, "attention_chunk_size": chunk}
        fields = DecoderConfig(config, _DEFAULTS)
        router = Router(score="sigmoid", normalised=False, weighs_input=True)
        shared = fields.integer("intermediate_size", most=1 << 24)
        experts = fields.experts("intermediate_size", router=router, shared=shared)
        dense = fields.dense(intermediate=fields.integer("intermediate_size_mlp", 16384, most=1 << 24), bias=False)
        every = fields.integer("interleave_moe_layer_step", 1)
        every_nth = range(every - 1, fields.layers, every)
        sparse = every_nth if fields.raw("moe_layers") is None else fields.integers("moe_layers")
        norms = Norms(eps=fields.number("rms_norm_eps", 1e-5))
        mixers = _mixers(fields)
        return fields.decoder(
            "llama4", [LayerSpec(m, experts if i in sparse else dense, norms) for i, m in enumerate(mixers)]
        )

    def target(self, name: str, spec: DecoderSpec) -> Target | None:
        target = target_of(name, spec, _NAMES)
        if target is None:
            return None
        if ".experts_" in target.module and not name.startswith("blk."):
            return replace(target, transposed=True)
        if not target.module.endswith(".qkv") or target.part > 1:
            return target
        mixer = spec.attending[int(target.module.split(".")[1])]
        order = UnpairedHeads((mixer.heads, mixer.kv_heads)[target.part])
        return target if mixer.rope is None else replace(target, order=order)


def _mixers(fields: DecoderConfig) -> list[Attention]:
    """By layer: which are rotated is one list, which attend within chunks another that usually follows from it."""
    every = fields.integer("no_rope_layer_interval", 4)
    rotated = fields.raw("no_rope_layers") or [int((i + 1) % every != 0) for i in range(fields.layers)]
    if not isinstance(rotated, list) or len(rotated) < fields.layers:
        raise ModelFileError(f"model config: no_rope_layers should be {fields.layers} numbers, got {rotated!r}")
    types = fields.layer_types(
        ("chunked_attention" if rotated[i] else "full_attention" for i in range(fields.layers)),
        "chunked_attention",
        "full_attention",
    )
    chunk = None if fields.raw("attention_chunk_size") is None else fields.integer("attention_chunk_size", most=1 << 30)
    attention = fields.attention()
    assert attention.rope is not None
    if fields.flag("use_qk_norm", True):  # behind the rotation, so that its scale of cos and sin counts for nothing
        rope = replace(attention.rope, params={**attention.rope.params, "attention_factor": 1.0})
        attention = replace(attention, qk_norm="unit", rope=rope)
    tuning = QueryScaling(fields.number("attn_scale", 0.1), fields.integer("floor_scale", 8192, most=1 << 30), offset=1)
    everywhere = replace(
        attention,
        rope=None,
        qk_norm=None,
        query_scaling=tuning if fields.flag("attn_temperature_tuning", True) else None,
    )
    mixers = [attention if rotated[i] else everywhere for i in range(fields.layers)]
    chunked = [chunk is not None and each == "chunked_attention" for each in types]
    return [
        replace(mixer, window=chunk, chunked=True) if local else mixer
        for mixer, local in zip(mixers, chunked, strict=True)
    ]


FAMILY = Llama4Family()
