"""A tokenizer rebuilt from the metadata of a GGUF file: vocabulary, merges or scores, token types.

Two kinds exist among the families served here: byte-level BPE ("gpt2"), whose way of cutting text into words is
named by `tokenizer.ggml.pre`, and SentencePiece-type BPE ("llama"), whose merges follow from the scores. Anything
else is refused by name: a tokenizer that is nearly right gives a model that is quietly wrong.
"""

from __future__ import annotations

from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from quire.text.tokenizer import Tokenizer, library_errors
from quire.text.word_splits import WORD_SPLITS
from quire.types.errors import ModelFileError

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # token types
MAX_TOKEN = 1024  # characters of one token


def tokenizer_from_gguf(meta: dict[str, Any], where: str) -> Tokenizer:
    kind = meta.get("tokenizer.ggml.model")
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if kind not in builders:
        raise ModelFileError(
            f"{where} has a tokenizer of the kind {kind!r}, which cannot be rebuilt here (these can: "
            f"{', '.join(builders)}); use the model's safetensors directory with its tokenizer.json instead"
        )
    vocabulary = _Vocabulary(meta, where)
    bos_id, eos_id = vocabulary.id_of("bos"), vocabulary.id_of("eos")
    with library_errors(f"{where}: a tokenizer cannot be made of its vocabulary"):
        backend, add_bos = builders[kind](vocabulary)
        _add_special(backend, vocabulary)
        _surround(backend, vocabulary, add_bos)
    ends = (eos_id, vocabulary.id_of("eot"), vocabulary.id_of("eom"))
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {f"{short}_token": vocabulary.id_of(long) for short, long in names.items()}
    return Tokenizer(
        backend,
        vocabulary.tokens,
        named={name: vocabulary.tokens[i] for name, i in ids.items() if i is not None},
        bos_id=bos_id,
        eos_ids=[i for i in ends if i is not None],
    )


class _Vocabulary:
    """The tokenizer's metadata, with types and lengths checked."""

    def __init__(self, meta: dict[str, Any], where: str):
        self._meta = meta
        self.where = where
        self.tokens: list[str] = self._list("tokens", str, None)
        if not self.tokens or max(map(len, self.tokens)) > MAX_TOKEN:
            raise ModelFileError(f"{where}: the vocabulary is empty or has tokens longer than {MAX_TOKEN} characters")
        count = len(self.tokens)
        self.types: list[int] = self._list("token_type", int, count) or [_NORMAL] * count
        self.scores: list[float] = self._list("scores", float, count)
        self.merges: list[str] = self._list("merges", str, None)
        self.ids = {token: i for i, token in enumerate(self.tokens)}

    def _list(self, name: str, kind: type, length: int | None) -> list[Any]:
        value = self._meta.get(f"tokenizer.ggml.{name}", [])
        if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
            raise ModelFileError(f"{self.where}: tokenizer.ggml.{name} is not a list of {kind.__name__}")
        if value and length is not None and len(value) != length:
            raise ModelFileError(f"{self.where}: tokenizer.ggml.{name} has {len(value)} entries for {length} tokens")
        return value

    def flag(self, name: str, default: bool) -> bool:
        return bool(self._meta.get(f"tokenizer.ggml.{name}", default))

    def text(self, name: str, default: str) -> str:
        return str(self._meta.get(f"tokenizer.ggml.{name}", default))

    def id_of(self, name: str) -> int | None:
        """The id of a named special token (bos, eos, eot, ...) if the file gives one."""
        value = self._meta.get(f"tokenizer.ggml.{name}_token_id")
        if value is not None and not (isinstance(value, int) and 0 <= value < len(self.tokens)):
            raise ModelFileError(f"{self.where}: tokenizer.ggml.{name}_token_id is {value!r}, outside the vocabulary")
        return value

    def of_type(self, kind: int) -> list[str]:
        return [token for token, t in zip(self.tokens, self.types, strict=True) if t == kind and token]


def _byte_level(vocabulary: _Vocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    pre = vocabulary.text("pre", "default")
    if pre not in WORD_SPLITS:
        raise ModelFileError(
            f"{vocabulary.where} cuts text in the way {pre!r}, which is not known here; known: "
            f"{', '.join(WORD_SPLITS)}. Use the model's safetensors directory with its tokenizer.json instead"
        )
    words = WORD_SPLITS[pre]
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in vocabulary.merges)]
    for left, right in merges:
        if not (left in vocabulary.ids and right in vocabulary.ids and left + right in vocabulary.ids):
            raise ModelFileError(f"{vocabulary.where}: the merge of {left!r} and {right!r} is not in the vocabulary")
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary.ids, merges=merges, ignore_merges=words.whole_words))
    if words.compose:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = words.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    return backend, words.bos


def _sentencepiece(vocabulary: _Vocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    if not vocabulary.scores:
        raise ModelFileError(f"{vocabulary.where}: a SentencePiece-type tokenizer needs tokenizer.ggml.scores")
    unknown = vocabulary.id_of("unknown")
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocabulary.ids,
            merges=_merges_from_scores(vocabulary),
            unk_token=None if unknown is None else vocabulary.tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = vocabulary.flag("add_space_prefix", True)
    scheme = "first" if prefix else "never"
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(content=" ", left=1)] if prefix else steps)
    return backend, True


def _merges_from_scores(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """SentencePiece joins the two neighbours whose union scores best; so every way to cut a token in two known
    ones is a merge, and the best-scored tokens come first. Of one token's cuts the one with the longer left part
    comes first, as converters in the field order them. Tokens that are no text never come out of a merge."""
    ids = vocabulary.ids
    words = {_NORMAL, _USER_DEFINED}
    found: list[tuple[float, int, int, int, str, str]] = []
    for token, score, kind in zip(vocabulary.tokens, vocabulary.scores, vocabulary.types, strict=True):
        if kind not in words:
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                found.append((-score, -cut, -len(right), len(found), left, right))
    found.sort()
    return [(left, right) for *_, left, right in found]


def _add_special(backend: tokenizers.Tokenizer, vocabulary: _Vocabulary) -> None:
    """Control tokens are special; user-defined ones are merely never cut."""
    backend.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in vocabulary.of_type(_CONTROL)])
    backend.add_tokens([AddedToken(t, normalized=False, special=False) for t in vocabulary.of_type(_USER_DEFINED)])


def _surround(backend: tokenizers.Tokenizer, vocabulary: _Vocabulary, add_bos: bool) -> None:
    """Put BOS before and EOS after an encoded text, as the file says or its kind implies."""
    before = vocabulary.id_of("bos") if vocabulary.flag("add_bos_token", add_bos) else None
    after = vocabulary.id_of("eos") if vocabulary.flag("add_eos_token", False) else None
    named = [(alias, i) for alias, i in (("BOS", before), ("EOS", after)) if i is not None]
    if named:
        single = " ".join(["BOS"] * (before is not None) + ["$A"] + ["EOS"] * (after is not None))
        special = [{"id": alias, "ids": [i], "tokens": [vocabulary.tokens[i]]} for alias, i in named]
        backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)
