"""Words that byte-level tokenizers of GGUF files cut text into: as published, and as another regex engine cuts them."""

from __future__ import annotations

import random

import pytest
import regex
from tokenizers import pre_tokenizers

from quire.text.word_splits import WORD_SPLITS

TEXT = "HelloWorld's it'S 12345 a_b.c = x+1;\r\n\n  你好，世界 ひらがな café naïve\u0301 ١٢٣ Straße—“quote” DŽ \t end  "
WORDS = {
    "llama-bpe": "HelloWorld|'s| it|'S| |123|45| a|_b|.c| =| x|+|1|;\r\n\n| ",
    "qwen2": "HelloWorld|'s| it|'S| |1|2|3|4|5| a|_b|.c| =| x|+|1|;\r\n\n| ",
    "gpt-4o": "Hello|World's| it'S| |123|45| a|_b|.c| =| x|+|1|;\r\n\n| ",
    "tekken": "Hello|World|'s| it|'S| |1|2|3|4|5| a|_b|.c| =| x|+|1|;\r\n\n| ",
    "deepseek-v3": "HelloWorld|'s| it|'S| |123|45| a|_b|.c| =| x|+|1|;\r\n\n| ",
    "deepseek-llm": "HelloWorld|'|s| it|'|S| |12345| a|_|b|.|c| =| x|+|1|;|\r|\n|\n|",
    "smollm": "HelloWorld|'s| it|'|S| |1|2|3|4|5| a|_|b|.|c| =| x|+|1|;|\r\n\n ",
    "falcon": "HelloWorld|'|s| it|'|S| |123|45| a|_|b|.|c| |=| x|+|1|;|\r\n\n ",
}
SPECIAL = " \n\r\t'aAzZéßǅʰ١9½.,;+$一ひア가\u0301\u0e01\u0e34😀_/s t"


def cut(name: str, text: str) -> list[str]:
    pieces = pre_tokenizers.Sequence([WORD_SPLITS[name].pre_tokenizer()]).pre_tokenize_str(text)
    return [text[start:end] for _, (start, end) in pieces]


def by_another_engine(name: str, text: str) -> list[str]:
    pieces = [text]
    for pattern in WORD_SPLITS[name].patterns:
        found, compiled = [], regex.compile(pattern, regex.V1)
        for piece in pieces:
            at = 0
            for match in compiled.finditer(piece):
                found += [piece[at : match.start()], match[0]]
                at = match.end()
            found.append(piece[at:])
        pieces = [piece for piece in found if piece]
    return pieces


@pytest.mark.parametrize("name", WORDS)
def test_known_words(name: str) -> None:
    expected = WORDS[name].split("|")
    assert cut(name, TEXT)[: len(expected) - 1] == expected[:-1]


@pytest.mark.parametrize("name", WORD_SPLITS)
def test_another_engine_cuts_alike(name: str) -> None:
    rng = random.Random(7)
    for text in [TEXT, *("".join(rng.choices(SPECIAL, k=40)) for _ in range(60))]:
        assert cut(name, text) == by_another_engine(name, text), text


def test_letters_of_chinese_are_words_of_their_own() -> None:
    assert cut("kimi-k2", "Qwen你好World's 世界12345") == ["Qwen", "你好", "World's", " ", "世界", "123", "45"]
