"""gpt-oss: attention with sinks and biases, every second layer windowed, and experts with biases and a clamped SwiGLU.
Files hold the experts' matrices as [in, out], or [out, in] in blocks (MXFP4), gate and up interleaved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.model.decoder_spec import DecoderSpec, LayerSpec, Norms, Router
from quire.model.families.architecture import Target, named_in
from quire.model.families.decoder_config import DecoderConfig
from quire.model.families.tensor_names import EXPERTS, GGUF_KEYS, LLAMA_NAMES, SINKS, target_of
from quire.model.loading.stored_tensor import UnpairedHeads

_NAMES = {**LLAMA_NAMES, **EXPERTS, **SINKS, "post_attention_norm": ("feed_norm", 0)}
_DEFAULTS = {"head_dim": 64, "num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 128}


class GptOssFamily:
    names: tuple[str, ...] = ("GptOssForCausalLM", "gpt_oss")
    gguf_names: tuple[str, ...] = ("gpt-oss",)
    gguf_keys: Mapping[str, str] = GGUF_KEYS | {
        "sliding_window": "attention.sliding_window",
        "num_local_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
    }

    def spec(self, config: Mapping[str, Any]) -> DecoderSpec:
        if named_in(config) == "gpt-oss" and config.get(
            "rope_scaling"
        ):  # as the models have it, which files do not say
            config = {**config, "rope_scaling": {**config["rope_scaling"], "truncate": False}}
        fields = DecoderConfig(config, _DEFAULTS)
        types = fields.layer_types("full_attention" if i % 2 else "sliding_attention" for i in range(fields.layers))
        bias = fields.flag("attention_bias", True)
        attention = fields.attention(sinks=True, qkv_bias=bias, o_bias=bias)
        experts = fields.experts("intermediate_size", activation="swiglu_oai", bias=True, router=Router(bias=True))
        norms = Norms(eps=fields.number("rms_norm_eps", 1e-5))
        layers = [LayerSpec(replace(attention, window=fields.window(each)), experts, norms) for each in types]
        return fields.decoder("gpt_oss", layers)

    def target(self, name: str, spec: DecoderSpec) -> Target | None:
        blocks = name.endswith(".blocks")
        target = target_of(name.removesuffix("blocks") + "weight" if blocks else name, spec, _NAMES)
        if target is None or "experts_" not in target.module or name.startswith("blk."):
            return target
        order = UnpairedHeads(1) if target.module.endswith("experts_up") else None
        return replace(target, order=order, transposed=target.kind == "weight" and not blocks)


FAMILY = GptOssFamily()
