"""Prompts for fill-in-the-middle, by what a vocabulary holds."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from quire.text import Tokenizer
from quire.text.fim import FORMATS, FimFormat, infill
from quire.text.token_bytes import BYTE_ALPHABET


def tokenizer_with(*special: str, bos: str | None = None) -> Tokenizer:
    """Single bytes, and these tokens."""
    vocabulary = {character: id for id, character in enumerate(BYTE_ALPHABET)}
    backend = Backend(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokens = [token for token, _ in sorted(backend.get_vocab().items(), key=lambda item: item[1])]
    return Tokenizer(backend, tokens, bos_id=None if bos is None else backend.token_to_id(bos))


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.prefix)
def test_every_format_is_found(format: FimFormat) -> None:
    marks = [mark for mark in (format.prefix, format.suffix, format.middle) if mark]
    tokenizer = tokenizer_with(*marks, *format.ends)
    found = infill(tokenizer, "ab", "cd")
    assert found is not None
    text = tokenizer.decode(found.prompt, skip_special_tokens=False)
    before, after = f"{format.prefix}ab", f"{format.suffix}cd"
    assert text == (after + before if format.suffix_first else before + after) + format.middle
    assert found.ends == [tokenizer.token_id(end) for end in format.ends]


def test_marks_in_the_texts_are_text() -> None:
    format = FORMATS[0]
    tokenizer = tokenizer_with(format.prefix, format.suffix, format.middle)
    found = infill(tokenizer, f"a{format.suffix}b", format.middle)
    assert found is not None
    assert [found.prompt.count(tokenizer.token_id(mark)) for mark in (format.suffix, format.middle)] == [1, 1]


def test_a_vocabulary_without_the_tokens() -> None:
    assert infill(tokenizer_with("<|fim_prefix|>", "<|fim_middle|>"), "a", "b") is None
