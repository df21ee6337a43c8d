"""BERT, RoBERTa and XLM-RoBERTa, encoders for embeddings (MiniLM, BGE, E5) and for scores of classes or of pairs of
texts: attention both ways, LayerNorms behind each addition to the residual stream, learned positions (RoBERTa's begin
at 2), vectors of segments, ungated MLP, biases everywhere. They generate nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from quire.model.decoder_spec import ClassHead, DecoderSpec, LayerSpec, Norms
from quire.model.families.architecture import IGNORED, Fields, Target, named_in
from quire.model.families.decoder_config import DecoderConfig
from quire.types.errors import ModelFileError

_KINDS = {"Bert": "bert", "Roberta": "roberta", "XLMRoberta": "xlm-roberta"}
_PARTS = ("Model", "ForMaskedLM", "ForSequenceClassification")
_INNER = {
    "attention.self.query": ("qkv", 0),
    "attention.self.key": ("qkv", 1),
    "attention.self.value": ("qkv", 2),
    "attention.output.dense": ("o", 0),
    "attention.output.LayerNorm": ("feed_norm", 0),
    "intermediate.dense": ("up", 0),
    "output.dense": ("down", 0),
}
_OUTSIDE = {
    "embeddings.word_embeddings": "embed",
    "embeddings.position_embeddings": "positions",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "layers.0.mixer_norm",
}
_HEADS = {
    "bert": {"pooler.dense": "class_dense", "classifier": "class_out"},
    "roberta": {"classifier.dense": "class_dense", "classifier.out_proj": "class_out"},
}
_UNUSED = ("pooler.", "cls.", "lm_head.", "embeddings.position_ids", "embeddings.token_type_ids")
_LAYER = re.compile(r"encoder\.layer\.(\d{1,5})\.(.+)")
_OLD = {"gamma": "weight", "beta": "bias"}


class BertFamily:
    names: tuple[str, ...] = (*(f"{kind}{part}" for kind in _KINDS for part in _PARTS), *_KINDS.values())
    gguf_names: tuple[str, ...] = ()
    gguf_keys: Mapping[str, str] = {}

    def spec(self, config: Mapping[str, Any]) -> DecoderSpec:
        named = named_in(config)
        fields = DecoderConfig({**config, "num_key_value_heads": None}, {"max_position_embeddings": 512})
        bert = named.startswith("Bert") or named == "bert"
        kind = fields.raw("position_embedding_type") or "absolute"
        if kind != "absolute" or fields.flag("is_decoder"):
            raise ModelFileError(f"model config: encoders with learned positions are supported, not {kind!r} decoders")
        before = 0 if bert else fields.integer("pad_token_id", 1, least=0) + 1
        fields.max_position -= before
        attention = fields.attention(rope=None, bidirectional=True, qkv_bias=True, o_bias=True)
        feed = fields.dense(gated=False, bias=True, **({} if fields.raw("hidden_act") else {"activation": "gelu"}))
        norms = Norms("layer", fields.number("layer_norm_eps", 1e-12), bias=True, replaces=True)
        classifies = str(named).endswith("ForSequenceClassification")
        return fields.decoder(
            "bert" if bert else "roberta",
            [LayerSpec(attention, feed, norms)] * fields.layers,
            tie_embeddings=True,
            learned_positions=True,
            position_offset=before,
            token_types=fields.integer("type_vocab_size", 2),
            class_head=ClassHead(label_count(config), "cls", dense=True, bias=True) if classifies else None,
        )

    def target(self, name: str, spec: DecoderSpec) -> Target | None:
        name = re.sub(r"^(?:bert|roberta)\.", "", name)
        module, _, kind = name.rpartition(".")
        kind = _OLD.get(kind, kind)
        heads = _HEADS[spec.architecture] if spec.class_head is not None else {}
        if module in heads:
            return Target(heads[module], kind)
        if name.startswith(_UNUSED):
            return Target(IGNORED)
        if match := _LAYER.fullmatch(module):
            index, inner = int(match[1]), match[2]
            if inner == "output.LayerNorm":  # what the next layer begins with
                last = index + 1 == len(spec.layers)
                return Target("final_norm" if last else f"layers.{index + 1}.mixer_norm", kind)
            return Target(f"layers.{index}.{_INNER[inner][0]}", kind, _INNER[inner][1]) if inner in _INNER else None
        return Target(_OUTSIDE[module], kind) if module in _OUTSIDE else None


def label_count(config: Mapping[str, Any]) -> int:
    """As transformers reads it."""
    labels = config.get("id2label")
    return len(labels) if isinstance(labels, Mapping) and labels else Fields(config).integer("num_labels", 2)


FAMILY = BertFamily()
