"""Tiny random encoders and cross-encoders in the files of published ones, made by transformers."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
import torch
import transformers as hf
from tokenizers import models, pre_tokenizers, processors
from transformers import PreTrainedModel, PreTrainedTokenizerFast

WORDS = [
    "the",
    "a",
    "cat",
    "dog",
    "sat",
    "ran",
    "on",
    "under",
    "mat",
    "tree",
    "red",
    "blue",
    "who",
    "where",
    "is",
    "not",
]
SIZES = {
    "vocab_size": 40,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 66,
}
POOLING = "sentence_transformers.models.Pooling"
NORMALIZE = "sentence_transformers.models.Normalize"


def filled(model: PreTrainedModel) -> PreTrainedModel:
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.copy_(torch.randn_like(parameter) * 0.3)
    return model.eval()


def bert(labels: int = 0, **config) -> PreTrainedModel:
    made = hf.BertConfig(**SIZES, **({"num_labels": labels} if labels else {}), **config)
    return filled(hf.BertForSequenceClassification(made) if labels else hf.BertModel(made))


def xlm_roberta(labels: int = 0, **config) -> PreTrainedModel:
    extra = {"num_labels": labels} if labels else {}
    made = hf.XLMRobertaConfig(**SIZES, type_vocab_size=1, pad_token_id=1, **extra, **config)
    return filled(hf.XLMRobertaForSequenceClassification(made) if labels else hf.XLMRobertaModel(made))


def tokenizer() -> PreTrainedTokenizerFast:
    """Words, in BERT's way of putting texts and pairs of them together."""
    vocabulary = {word: i for i, word in enumerate(["[UNK]", "[PAD]", "[CLS]", "[SEP]", *WORDS])}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["[UNK]", "[PAD]", "[CLS]", "[SEP]"])
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="[UNK]",
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


def save(model: PreTrainedModel, path: Path, *, mode: str | None = None, normalize: bool = False) -> Path:
    """`mode`: of pooling, as sentence-transformers writes it; None: nothing of it is there."""
    path.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(path)
    tokenizer().save_pretrained(path)
    if mode is not None:
        modules = [{"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"}]
        modules.append({"idx": 1, "path": "1_Pooling", "type": POOLING})
        modules += [{"idx": 2, "path": "2_Normalize", "type": NORMALIZE}] if normalize else []
        (path / "modules.json").write_text(json.dumps(modules))
        (path / "1_Pooling").mkdir()
        names = ("cls_token", "mean_tokens", "max_tokens", "lasttoken")
        (path / "1_Pooling" / "config.json").write_text(
            json.dumps({"word_embedding_dimension": 48} | {f"pooling_mode_{name}": name == mode for name in names})
        )
    return path
