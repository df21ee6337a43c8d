"""Fill-in-the-middle: how code models are asked for the text between a prefix and a suffix, told from their vocabulary.

Refuses to know: requests, what is infilled.
"""

from __future__ import annotations

from typing import NamedTuple

from quire.text.tokenizer import Tokenizer


class FimFormat(NamedTuple):
    """Tokens before the prefix, before the suffix and before what is to be filled in; names of tokens that end it."""

    prefix: str
    suffix: str
    middle: str = ""
    suffix_first: bool = False
    ends: tuple[str, ...] = ()


FORMATS = (
    # Qwen coder, CodeGemma
    FimFormat(
        "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>",
        ends=("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>", "<|endoftext|>"),
    ),
    # StarCoder, Granite, SmolLM's relatives; SantaCoder
    FimFormat("<fim_prefix>", "<fim_suffix>", "<fim_middle>", ends=("<file_sep>", "<filename>", "<|endoftext|>")),
    FimFormat("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ends=("<|endoftext|>",)),
    # DeepSeek coder
    FimFormat("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    # CodeLlama
    FimFormat("▁<PRE>", "▁<SUF>", "▁<MID>", ends=("▁<EOT>",)),
    FimFormat("<PRE>", "<SUF>", "<MID>", ends=("<EOT>",)),
    # CodeGeeX and GLM
    FimFormat("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>", ends=("<|endoftext|>",)),
    # Seed-Coder
    FimFormat("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>", suffix_first=True),
    # Codestral
    FimFormat("[PREFIX]", "[SUFFIX]", suffix_first=True),
)  # fmt: skip


class Infill(NamedTuple):
    prompt: list[int]
    ends: list[int]  # tokens that end what is filled in, besides the model's own


def infill(tokenizer: Tokenizer, prefix: str, suffix: str) -> Infill | None:
    """The prompt for what stands between two texts; None for a model that was not trained for it. Special tokens that
    the texts themselves spell are text."""
    for format in FORMATS:
        marks = [tokenizer.token_id(mark) for mark in (format.prefix, format.suffix, format.middle) if mark]
        if None in marks:
            continue
        before, after, *middle = [mark for mark in marks if mark is not None]
        first = [before, *tokenizer.encode_on(prefix, parse_special=False)]
        second = [after, *tokenizer.encode_on(suffix, parse_special=False)]
        begin = [i for i in tokenizer.encode("")[:1] if i == tokenizer.bos_id]
        ends = [i for end in format.ends if (i := tokenizer.token_id(end)) is not None]
        return Infill(begin + (second + first if format.suffix_first else first + second) + middle, ends)
    return None
