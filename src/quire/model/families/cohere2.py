"""Cohere 2 (Command R7B, Command A): attention and MLP beside each other behind one LayerNorm without bias; windowed
layers are rotated in interleaved pairs, the others know no positions; logits are scaled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.model.decoder_spec import DecoderSpec, LayerSpec, Norms
from quire.model.families.architecture import Target
from quire.model.families.decoder_config import DecoderConfig
from quire.model.families.tensor_names import GGUF_KEYS, LLAMA_NAMES, target_of
from quire.model.loading.stored_tensor import UnpairedHeads


class Cohere2Family:
    names: tuple[str, ...] = ("Cohere2ForCausalLM", "cohere2")
    gguf_names: tuple[str, ...] = ("cohere2",)
    gguf_keys: Mapping[str, str] = GGUF_KEYS | {
        "sliding_window": "attention.sliding_window",
        "layer_norm_eps": "attention.layer_norm_epsilon",
        "logit_scale": "logit_scale",
    }

    def spec(self, config: Mapping[str, Any]) -> DecoderSpec:
        fields = DecoderConfig(config, {"max_position_embeddings": 8192, "sliding_window": 4096})
        every = fields.integer("sliding_window_pattern", 4)
        types = fields.layer_types(
            "sliding_attention" if (i + 1) % every else "full_attention" for i in range(fields.layers)
        )
        windowed = fields.attention(window=fields.window("sliding_attention"))
        mixers = {"sliding_attention": windowed, "full_attention": replace(windowed, window=None, rope=None)}
        norms = Norms("layer", fields.number("layer_norm_eps", 1e-5))
        return fields.decoder(
            "cohere2",
            [LayerSpec(mixers[each], fields.dense(bias=False), norms, "one_norm") for each in types],
            tie_embeddings=fields.flag("tie_word_embeddings", True),
            logit_scale=fields.number("logit_scale", 0.0625),
        )

    def target(self, name: str, spec: DecoderSpec) -> Target | None:
        target = target_of(name, spec, LLAMA_NAMES)
        if target is None or not target.module.endswith(".qkv") or target.part > 1:
            return target
        layer = spec.attending[int(target.module.split(".")[1])]
        order = UnpairedHeads((layer.heads, layer.kv_heads)[target.part])
        return target if layer.rope is None else replace(target, order=order)


FAMILY = Cohere2Family()
