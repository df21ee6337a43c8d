"""OLMo 2 and 3: Llama's blocks with RMS norms behind attention and MLP instead of before them, and norms of queries and
keys over all heads at once. In OLMo 3 three of four layers are windowed, and only the others have a scaled RoPE."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.model.decoder_spec import DecoderSpec, LayerSpec, Norms
from quire.model.families.architecture import Target, named_in, rope_spec
from quire.model.families.decoder_config import DecoderConfig
from quire.model.families.tensor_names import GGUF_KEYS, POST_NORMS, PROJECTIONS, QK_NORMS, target_of


class OlmoFamily:
    names: tuple[str, ...] = ("Olmo2ForCausalLM", "olmo2", "Olmo3ForCausalLM", "olmo3")
    gguf_names: tuple[str, ...] = ("olmo2",)
    gguf_keys: Mapping[str, str] = GGUF_KEYS | {"sliding_window": "attention.sliding_window"}

    def spec(self, config: Mapping[str, Any]) -> DecoderSpec:
        third = named_in(config) in ("Olmo3ForCausalLM", "olmo3") or config.get("sliding_window") is not None
        fields = DecoderConfig(config, {"sliding_window": 4096, "rope_theta": 5e5} if third else {})
        feed, norms = fields.dense(), Norms(eps=fields.number("rms_norm_eps", 1e-5), before=False, after=True)
        types = ["full_attention"] * fields.layers
        if third:
            types = fields.layer_types("sliding_attention" if (i + 1) % 4 else types[0] for i in range(fields.layers))
        plain = dict(fields.config)
        if isinstance(plain.get("rope_scaling"), Mapping):  # an older config: of layers that see everything
            plain |= {"rope_scaling": None}
        attention = {"full_attention": fields.attention("full_attention", qk_norm="all")}
        if third:
            rope = rope_spec(plain, fields.head_dim, fields.max_position, "sliding_attention")
            windowed = replace(attention["full_attention"], rope=rope, window=fields.window("sliding_attention"))
            attention["sliding_attention"] = windowed
        layers = [LayerSpec(attention[each], feed, norms) for each in types]
        return fields.decoder("olmo3" if third else "olmo2", layers)

    def target(self, name: str, spec: DecoderSpec) -> Target | None:
        return target_of(name, spec, {**PROJECTIONS, **QK_NORMS, **POST_NORMS})


FAMILY = OlmoFamily()
