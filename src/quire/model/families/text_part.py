"""The text part of a multimodal checkpoint: its config lies in `text_config`, its tensors behind `language_model.`;
those of other parts (vision, audio, projectors) are left out."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from quire.model.decoder_spec import DecoderSpec
from quire.model.families.architecture import OTHER_MODALITY, Architecture, Target

_OTHERS = re.compile(
    r"(?:model\.)?(?:vision_\w+|visual|multi_modal_projector|embed_vision|audio_\w+|embed_audio|patch_merger)\..*"
)
_TEXT = re.compile(r"(?:model\.language_model\.|language_model\.)")


def text_config(config: Mapping[str, Any], tensors: Collection[str]) -> dict[str, Any]:
    """The config of the text part, as if it were a model's own. Whether embeddings are tied is a fact of the whole;
    where it does not say, its tensors do."""
    inner = {key: value for key, value in config["text_config"].items() if key != "architectures"}
    headless = not any(name.endswith("lm_head.weight") for name in tensors)
    return inner | {"tie_word_embeddings": config.get("tie_word_embeddings", headless)}


class TextPart:
    def __init__(self, family: Architecture, config: Mapping[str, Any]):
        self._family = family
        self._config = config
        self.names, self.gguf_names, self.gguf_keys = family.names, family.gguf_names, family.gguf_keys

    def spec(self, config: Mapping[str, Any]) -> DecoderSpec:
        return self._family.spec(self._config)

    def target(self, name: str, spec: DecoderSpec) -> Target | None:
        if _OTHERS.fullmatch(name):
            return Target(OTHER_MODALITY)
        return self._family.target(_TEXT.sub("", name, count=1), spec)
