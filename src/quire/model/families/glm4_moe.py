"""GLM-4.5, 4.6: attention with RoPE of half of each head; behind the first layers experts chosen by sigmoids with a
correction, and one that every token takes. Layers beyond the last, which draft several tokens, are left out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.model.decoder_spec import DecoderSpec, Experts, LayerSpec, Norms, Router
from quire.model.families.architecture import IGNORED, Fields, Target, named_in
from quire.model.families.decoder_config import DecoderConfig
from quire.model.families.tensor_names import EXPERTS, GGUF_EXPERT_KEYS, GGUF_KEYS, LLAMA_NAMES, layer_of, target_of

_NAMES = {**LLAMA_NAMES, **EXPERTS, "post_attention_norm": ("feed_norm", 0)}


def grouped_experts(fields: DecoderConfig, **facts: Any) -> Experts:
    """As DeepSeek V3 and its followers name them: chosen by sigmoids with a correction, from the best groups."""
    router = Router(
        score="sigmoid",
        normalised=fields.flag("norm_topk_prob", True),
        scale=fields.number("routed_scaling_factor", 1.0),
        correction=True,
        groups=fields.integer("n_group", 1),
        top_groups=fields.integer("topk_group", 1),
        group_score="top2",
    )
    intermediate = fields.integer("moe_intermediate_size", most=1 << 24)
    shared = intermediate * fields.integer("n_shared_experts", 1, least=0)
    return fields.experts("moe_intermediate_size", router=router, shared=shared, **facts)


class Glm4MoeFamily:
    names: tuple[str, ...] = ("Glm4MoeForCausalLM", "glm4_moe")
    gguf_names: tuple[str, ...] = ("glm4moe",)
    gguf_keys: Mapping[str, str] = {
        **GGUF_KEYS,
        **GGUF_EXPERT_KEYS,
        "n_routed_experts": "expert_count",
        "num_nextn_predict_layers": "nextn_predict_layers",
    }

    def spec(self, config: Mapping[str, Any]) -> DecoderSpec:
        if named_in(config) == "glm4moe":  # blocks that draft are counted with the others
            main = Fields(config).integer("num_hidden_layers", most=4096) - (config["num_nextn_predict_layers"] or 0)
            config = {**config, "num_hidden_layers": main}
        fields = DecoderConfig(config, {"num_key_value_heads": 8, "head_dim": 128, "partial_rotary_factor": 0.5})
        attention = fields.attention(qk_norm="head" if fields.flag("use_qk_norm") else None, o_bias=False)
        dense = fields.integer("first_k_dense_replace", 1, least=0)
        experts, norms = grouped_experts(fields), Norms(eps=fields.number("rms_norm_eps", 1e-5))
        layers = [
            LayerSpec(attention, fields.dense(bias=False) if i < dense else experts, norms)
            for i in range(fields.layers)
        ]
        return fields.decoder("glm4_moe", layers)

    def target(self, name: str, spec: DecoderSpec) -> Target | None:
        if layer_of(name) >= len(spec.layers):
            return Target(IGNORED)
        return target_of(name, spec, _NAMES)


FAMILY = Glm4MoeFamily()
