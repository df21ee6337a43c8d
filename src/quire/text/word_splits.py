"""How byte-level BPE tokenizers of GGUF files cut text into words before they merge, by `tokenizer.ggml.pre`.

The patterns are those of the models' own tokenizer.json; several are applied one after the other, each to what those
before it left. Whether a word that is a token is taken as it is, and BOS put before a text where the file does not say,
is as llama.cpp has it. Refuses to know: vocabularies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, pre_tokenizers

_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACE}"
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35 = rf"{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACE}"


def _cased(digits: str, line_ends: str, suffix: str = "", less: str = "") -> str:
    """Words that end where small letters do; `less`: letters that are none of theirs."""
    upper, lower = (rf"[{kinds}\p{{Lm}}\p{{Lo}}\p{{M}}{less}]" for kinds in (r"\p{Lu}\p{Lt}", r"\p{Ll}"))
    before = r"[^\r\n\p{L}\p{N}]?"
    words = f"{before}{upper}*{lower}+{suffix}|{before}{upper}+{lower}*{suffix}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+{line_ends}*|{_SPACE}"


_TEKKEN = _cased(r"\p{N}", r"[\r\n/]")
_GPT4O = _cased(r"\p{N}{1,3}", r"[\r\n/]", f"{_SUFFIX}?")
_KIMI = r"[\p{Han}]+|" + _cased(r"\p{N}{1,3}", r"[\r\n]", f"{_SUFFIX}?", r"&&[^\p{Han}]")
_CJK = "[一-龥ࠀ-一가-퟿]+"
_LETTERS = (  # with a case, as the tokenizer lists them
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚ"
    "Ḁ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼ"
    "ℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_DEEPSEEK = (r"[\r\n]", rf"\s?[{_LETTERS}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", _CJK, r"\p{N}+")
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"""
    + _SPACE,
)


@dataclass(frozen=True)
class WordSplits:
    patterns: tuple[str, ...]
    compose: bool = False  # text is brought to NFC first
    whole_words: bool = False  # a word that is a token is not merged
    bos: bool = False  # unless the file says otherwise

    def pre_tokenizer(self) -> Any:
        splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in self.patterns]
        return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _named(names: str, *patterns: str, **flags: bool) -> dict[str, WordSplits]:
    return dict.fromkeys(names.split(), WordSplits(patterns, **flags))


WORD_SPLITS = {
    **_named("default gpt-2 phi-2 mpt olmo jais granite-docling exaone4", _GPT2),
    **_named("smollm starcoder refact codeshell exaone", r"\p{N}", _GPT2),
    **_named("command-r", r"\p{N}", _GPT2, compose=True),
    **_named("llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral lfm2", _LLAMA3, whole_words=True, bos=True),
    **_named("dbrx smaug-bpe glm4 chatglm-bpe", _LLAMA3),
    **_named("qwen2 deepseek-r1-qwen megrez hunyuan", _QWEN2, compose=True),
    **_named("qwen35", _QWEN35, compose=True),
    **_named("tekken", _TEKKEN, whole_words=True, bos=True),
    **_named("gpt-4o llama4", _GPT4O),
    **_named("kimi-k2", _KIMI),
    **_named("deepseek-llm", *_DEEPSEEK),
    **_named("deepseek-coder", *_DEEPSEEK_CODER),
    **_named("deepseek-v3", *_DEEPSEEK_V3),
    **_named("falcon", r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]"),
}
