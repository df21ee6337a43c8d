"""All families, and the one that a model's own description names.

Adding a family is a file beside this one, which maps a config to a spec and tensor names to targets, and its name in
`FAMILY_MODULES`.
"""

from __future__ import annotations

import difflib
from functools import cache
from importlib import import_module
from typing import Any

from quire.model.decoder_spec import Attention, DecoderSpec, Latent
from quire.model.families.architecture import Architecture, named_in
from quire.model.families.classifier import Classifier, generating
from quire.model.families.text_part import TextPart, text_config
from quire.model.loading.gguf_config import config_from_gguf, is_gguf
from quire.types.errors import ModelFileError
from quire.types.seams import WeightSource

FAMILY_MODULES = (
    "llama",
    "gpt2",
    "olmo",
    "gemma",
    "gemma4",
    "granite",
    "phi3",
    "cohere2",
    "glm4",
    "falcon",
    "mixtral",
    "qwen_moe",
    "llama4",
    "glm4_moe",
    "gpt_oss",
    "deepseek",
    "qwen3_next",
    "granite_hybrid",
    "nemotron_h",
    "lfm2",
    "bert",
)


@cache
def families() -> tuple[Architecture, ...]:
    return tuple(import_module(f"quire.model.families.{name}").FAMILY for name in FAMILY_MODULES)


def read_spec(source: WeightSource) -> DecoderSpec:
    """What the model is, from its metadata and tensor list alone."""
    return read_family(source)[1]


def read_family(source: WeightSource) -> tuple[Architecture, DecoderSpec]:
    family, spec = _read(source)
    if not any(isinstance(layer.mixer, Attention | Latent) for layer in spec.layers):
        raise ModelFileError("model config: none of its layers attends, which is not supported")
    return family, spec


def _read(source: WeightSource) -> tuple[Architecture, DecoderSpec]:
    metadata = source.metadata()
    if is_gguf(metadata):
        named = metadata["general.architecture"]
        family = _find(named, {name: f for f in families() for name in f.gguf_names})
        return family, family.spec(config_from_gguf(metadata, source.tensors(), family.gguf_keys))
    known = {name: f for f in families() for name in f.names}
    if isinstance(metadata.get("text_config"), dict) and named_in(metadata) not in known:
        inner = text_config(metadata, source.tensors())
        text = TextPart(_find(named_in(inner), known), inner)
        return text, text.spec(metadata)
    named = named_in(metadata)
    base = next((name for name in generating(named) if name in known and named not in known), None)
    family = _find(named, known) if base is None else Classifier(known[base], base)
    return family, family.spec(metadata)


def _find(named: Any, known: dict[str, Architecture]) -> Architecture:
    if not isinstance(named, str) or named not in known:
        close = difflib.get_close_matches(str(named), known, n=3)
        guess = f" (did you mean {' or '.join(close)}?)" if close else ""
        raise ModelFileError(f"architecture {named!r} is not supported{guess}; docs/models.md lists those that are")
    return known[named]
