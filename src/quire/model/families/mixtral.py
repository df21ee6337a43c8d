"""Mixtral: Mistral's attention, and experts of which each token takes two."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.model.decoder_spec import DecoderSpec, LayerSpec, Norms
from quire.model.families.architecture import Target
from quire.model.families.decoder_config import DecoderConfig
from quire.model.families.tensor_names import EXPERTS, LLAMA_NAMES, target_of


class MixtralFamily:
    names: tuple[str, ...] = ("MixtralForCausalLM", "mixtral")
    gguf_names: tuple[str, ...] = ()  # GGUF files of it say llama
    gguf_keys: Mapping[str, str] = {}

    def spec(self, config: Mapping[str, Any]) -> DecoderSpec:
        fields = DecoderConfig(config, {"num_key_value_heads": 8, "max_position_embeddings": 131072, "rope_theta": 1e6})
        layer = LayerSpec(
            fields.attention(window=fields.window("sliding_attention")),
            fields.experts("intermediate_size"),
            Norms(eps=fields.number("rms_norm_eps", 1e-5)),
        )
        return fields.decoder("mixtral", (layer,) * fields.layers)

    def target(self, name: str, spec: DecoderSpec) -> Target | None:
        return target_of(name, spec, {**LLAMA_NAMES, **EXPERTS})


FAMILY = MixtralFamily()
