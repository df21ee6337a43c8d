"""What most families' configs have in common, read into the parts of a spec; a family adds what it has of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from quire.model.decoder_spec import Attention, DecoderSpec, Dense, Experts, LayerSpec
from quire.model.families.architecture import ACTIVATIONS, Fields, rope_spec
from quire.types.errors import ModelFileError


class DecoderConfig(Fields):
    """`defaults`: what a config.json that does not say means, as its authors' library reads it."""

    def __init__(self, config: Mapping[str, Any], defaults: Mapping[str, Any] | None = None):
        super().__init__({**(defaults or {}), **config})
        self.hidden = self.integer("hidden_size", most=1 << 20)
        self.layers = self.integer("num_hidden_layers", most=4096)
        self.heads = self.integer("num_attention_heads")
        self.kv_heads = self.integer("num_key_value_heads", self.heads)
        self.head_dim = self.integer("head_dim", self.hidden // self.heads)
        if self.heads % self.kv_heads:
            raise ModelFileError(
                f"model config: {self.heads} attention heads cannot share {self.kv_heads} KV heads evenly"
            )
        self.max_position = self.integer("max_position_embeddings", 2048, most=1 << 30)

    def attention(self, layer_type: str | None = None, **facts: Any) -> Attention:
        """Rotated as the config says, of this type of layers where types differ; `facts` come on top."""
        bias = self.flag("attention_bias")
        facts = {"qkv_bias": bias, "o_bias": bias, "scale": self.head_dim**-0.5} | facts
        if "rope" not in facts:
            facts["rope"] = rope_spec(self.config, self.head_dim, self.max_position, layer_type)
        return Attention(heads=self.heads, kv_heads=self.kv_heads, head_dim=self.head_dim, **facts)

    def dense(self, **facts: Any) -> Dense:
        facts = {"bias": self.flag("mlp_bias")} | facts
        if "activation" not in facts:
            facts["activation"] = self.choice("hidden_act", "silu", ACTIVATIONS)
        if "intermediate" not in facts:
            facts["intermediate"] = self.integer("intermediate_size", most=1 << 24)
        return Dense(**facts)

    def experts(self, intermediate: str, **facts: Any) -> Experts:
        """`intermediate`: the name of the field that says how wide an expert is."""
        counts = ("num_experts", "num_local_experts", "n_routed_experts")
        count = self.integer(next((name for name in counts if self.raw(name) is not None), counts[0]), most=1 << 12)
        if "activation" not in facts:
            facts["activation"] = self.choice("hidden_act", "silu", ACTIVATIONS)
        made = Experts(
            count=count,
            top_k=self.integer("num_experts_per_tok", 2, most=count),
            intermediate=self.integer(intermediate, most=1 << 24),
            **facts,
        )
        _check_groups(made)
        return made

    def decoder(self, architecture: str, layers: Iterable[LayerSpec], **facts: Any) -> DecoderSpec:
        facts = {"tie_embeddings": self.flag("tie_word_embeddings")} | facts
        return DecoderSpec(
            architecture=architecture,
            vocab_size=self.integer("vocab_size", most=1 << 24),
            hidden=self.hidden,
            max_position=self.max_position,
            layers=tuple(layers),
            **facts,
        )

    def layer_types(self, otherwise: Iterable[str], *known: str) -> list[str]:
        """By layer, full attention or windowed unless others are `known`; `otherwise`: where the config does not
        say."""
        known = known or ("full_attention", "sliding_attention")
        types = self.raw("layer_types")
        types = list(otherwise) if types is None else types
        if not isinstance(types, list) or len(types) != self.layers or any(str(t) not in known for t in types):
            raise ModelFileError(
                f"model config: layer_types should be {self.layers} of {', '.join(known)}, got {types!r}"
            )
        return types

    def window(self, layer_type: str) -> int | None:
        """Of a layer of this type."""
        sliding = layer_type == "sliding_attention" and self.raw("sliding_window") is not None
        return self.integer("sliding_window", most=1 << 30) if sliding else None


def _check_groups(experts: Experts) -> None:
    router = experts.router
    size, left = divmod(experts.count, router.groups)
    scored = 2 if router.group_score == "top2" else 1  # of each group
    enough = router.top_groups <= router.groups and router.top_groups * size >= experts.top_k
    if router.groups > 1 and (left or size < scored or not enough):
        raise ModelFileError(
            f"model config: {experts.top_k} of {experts.count} experts cannot be chosen from {router.top_groups} of "
            f"{router.groups} groups"
        )
