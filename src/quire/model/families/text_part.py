"""The text part of a multimodal checkpoint: its config lies in `text_config`, its tensors behind `language_model.`;
those of other parts (vision, audio, projectors) are left out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from quire.model.decoder_spec import DecoderSpec
from quire.model.families.architecture import OTHER_MODALITY, Architecture, Target

_OTHERS = re.compile(
    r"(?:model\.)?(?:vision_\w+|visual|multi_modal_projector|embed_vision|audio_\w+|embed_audio|patch_merger)\..*"
)
_TEXT = re.compile(r"(?:model\.language_model\.|language_model\.)")


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the text part, as if it were a model's own."""
    inner = {key: value for key, value in config["text_config"].items() if key != "architectures"}
    if "tie_word_embeddings" in config:
        inner.setdefault("tie_word_embeddings", config["tie_word_embeddings"])
    return inner


class TextPart:
    def __init__(self, family: Architecture):
        self._family = family
        self.names, self.gguf_names, self.gguf_keys = family.names, family.gguf_names, family.gguf_keys

    def spec(self, config: Mapping[str, Any]) -> DecoderSpec:
        return self._family.spec(text_config(config))

    def target(self, name: str, spec: DecoderSpec) -> Target | None:
        if _OTHERS.fullmatch(name):
            return Target(OTHER_MODALITY)
        return self._family.target(_TEXT.sub("", name, count=1), spec)
