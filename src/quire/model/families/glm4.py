"""GLM-4: norms on both sides of attention and MLP (in `Glm`, the model before it, only before them), biases of queries,
keys and values, gate and up stored as one matrix, and RoPE of half of each head in interleaved pairs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.model.decoder_spec import DecoderSpec, LayerSpec, Norms
from quire.model.families.architecture import Target, named_in
from quire.model.families.decoder_config import DecoderConfig
from quire.model.families.tensor_names import GGUF_KEYS, LLAMA_NAMES, target_of
from quire.model.loading.stored_tensor import UnpairedHeads

_NAMES = {
    **LLAMA_NAMES,
    "mlp.gate_up_proj": ("up", 0),
    "ffn_up": ("up", 0),
    "post_self_attn_layernorm": ("mixer_post_norm", 0),
    "post_attention_norm": ("mixer_post_norm", 0),
    "post_mlp_layernorm": ("feed_post_norm", 0),
    "post_ffw_norm": ("feed_post_norm", 0),
}


class Glm4Family:
    names: tuple[str, ...] = ("Glm4ForCausalLM", "glm4", "GlmForCausalLM", "glm")
    gguf_names: tuple[str, ...] = ("glm4",)
    gguf_keys: Mapping[str, str] = GGUF_KEYS

    def spec(self, config: Mapping[str, Any]) -> DecoderSpec:
        fields = DecoderConfig(config, {"num_key_value_heads": 2, "head_dim": 128, "partial_rotary_factor": 0.5})
        after = named_in(config) in ("Glm4ForCausalLM", "glm4")
        layer = LayerSpec(
            fields.attention(o_bias=False),
            fields.dense(bias=False),
            Norms(eps=fields.number("rms_norm_eps", 1.5625e-7), after=after),
        )
        return fields.decoder("glm4" if after else "glm", (layer,) * fields.layers)

    def target(self, name: str, spec: DecoderSpec) -> Target | None:
        target = target_of(name, spec, _NAMES)
        if target is None or not target.module.endswith(".qkv") or target.part > 1:
            return target
        mixer = spec.attention
        assert mixer.rope is not None
        return replace(target, order=UnpairedHeads((mixer.heads, mixer.kv_heads)[target.part], mixer.rope.dim))


FAMILY = Glm4Family()
