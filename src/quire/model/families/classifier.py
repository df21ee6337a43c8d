"""Decoders with a classification head instead of a vocabulary's (`LlamaForSequenceClassification`, ...): the layers of
the family's generating model, and scores of classes from the last token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.model.decoder_spec import ClassHead, DecoderSpec
from quire.model.families.architecture import IGNORED, Architecture, Target
from quire.model.families.bert import label_count

SUFFIX = "ForSequenceClassification"


def generating(name: Any) -> list[str]:
    """What the model with a vocabulary's head may be called; none: `name` is no classifier's."""
    if not isinstance(name, str) or not name.endswith(SUFFIX):
        return []
    return [f"{name.removesuffix(SUFFIX)}{head}" for head in ("ForCausalLM", "LMHeadModel")]


class Classifier:
    def __init__(self, family: Architecture, name: str):
        """`name`: of the generating model."""
        self._family = family
        self._name = name
        self.names, self.gguf_names, self.gguf_keys = family.names, family.gguf_names, family.gguf_keys

    def spec(self, config: Mapping[str, Any]) -> DecoderSpec:
        spec = self._family.spec({**config, "architectures": [self._name]})
        return replace(spec, tie_embeddings=True, class_head=ClassHead(label_count(config), "last"))

    def target(self, name: str, spec: DecoderSpec) -> Target | None:
        if name == "score.weight":
            return Target("class_out")
        return Target(IGNORED) if name.startswith("lm_head.") else self._family.target(name, spec)
