"""gpt-oss: attention with sinks and biases, every second layer windowed, and experts with biases and a clamped SwiGLU.
Files hold the experts' matrices as [in, out], gate and up interleaved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.model.decoder_spec import DecoderSpec, LayerSpec, Norms, Router
from quire.model.families.architecture import Target
from quire.model.families.decoder_config import DecoderConfig
from quire.model.families.tensor_names import EXPERTS, LLAMA_NAMES, SINKS, target_of
from quire.model.loading.stored_tensor import UnpairedHeads

_DEFAULTS = {"head_dim": 64, "num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 128}


class GptOssFamily:
    names: tuple[str, ...] = ("GptOssForCausalLM", "gpt_oss")
    gguf_names: tuple[str, ...] = ()
    gguf_keys: Mapping[str, str] = {}

    def spec(self, config: Mapping[str, Any]) -> DecoderSpec:
        fields = DecoderConfig(config, _DEFAULTS)
        types = fields.layer_types("full_attention" if i % 2 else "sliding_attention" for i in range(fields.layers))
        bias = fields.flag("attention_bias", True)
        attention = fields.attention(sinks=True, qkv_bias=bias, o_bias=bias)
        experts = fields.experts("intermediate_size", activation="swiglu_oai", bias=True, router=Router(bias=True))
        norms = Norms(eps=fields.number("rms_norm_eps", 1e-5))
        layers = [LayerSpec(replace(attention, window=fields.window(each)), experts, norms) for each in types]
        return fields.decoder("gpt_oss", layers)

    def target(self, name: str, spec: DecoderSpec) -> Target | None:
        target = target_of(name, spec, {**LLAMA_NAMES, **EXPERTS, **SINKS})
        if target is None or "experts_" not in target.module:
            return target
        order = UnpairedHeads(1) if target.module.endswith("experts_up") else None
        return replace(target, order=order, transposed=target.kind == "weight")


FAMILY = GptOssFamily()
