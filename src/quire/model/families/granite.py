"""Granite: Llama's layers with multipliers of embeddings, of attention scores and of what is added to the residual
stream, and a divisor of logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.model.decoder_spec import DecoderSpec
from quire.model.families.architecture import Fields, Target
from quire.model.families.llama import LlamaFamily


class GraniteFamily:
    names: tuple[str, ...] = ("GraniteForCausalLM", "granite")
    gguf_names: tuple[str, ...] = ()
    gguf_keys: Mapping[str, str] = {}

    def spec(self, config: Mapping[str, Any]) -> DecoderSpec:
        fields = Fields(config)
        llama = LlamaFamily().spec({**config, "architectures": ["LlamaForCausalLM"]})
        scale = fields.number("attention_multiplier", 1.0)
        return replace(
            llama,
            architecture="granite",
            layers=tuple(replace(layer, mixer=replace(layer.mixer, scale=scale)) for layer in llama.layers),
            embedding_scale=fields.number("embedding_multiplier", 1.0),
            residual_scale=fields.number("residual_multiplier", 1.0),
            logit_scale=1 / fields.number("logits_scaling", 1.0),
        )

    def target(self, name: str, spec: DecoderSpec) -> Target | None:
        return LlamaFamily().target(name, spec)


FAMILY = GraniteFamily()
