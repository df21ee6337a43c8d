"""A tokenizer from the files of a model directory: tokenizer.json, and what its neighbours say of special tokens.

For a directory that is only a config.json (random weights), a vocabulary of bytes and numbers stands in and says so.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from quire.assets import LocalModel
from quire.assets.json_files import read_json
from quire.text.token_bytes import BYTE_ALPHABET
from quire.text.tokenizer import Tokenizer, library_errors
from quire.types.errors import ModelFileError

MAX_TOKENIZER = 256 << 20
_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def tokenizer_from_files(model: LocalModel) -> Tokenizer:
    path = model.file("tokenizer.json")
    if path is None:
        return _without_tokenizer(model)
    backend = _read(path)
    config = _json(model, "tokenizer_config.json")
    named = _named_tokens(_json(model, "special_tokens_map.json") | config)
    _add_missing(backend, config, named)
    tokens = _tokens(backend)
    ids = {name: backend.token_to_id(text) for name, text in named.items()}
    eos = [ids.get("eos_token"), *_declared_ends(_json(model, "config.json"))]
    eos += _declared_ends(_json(model, "generation_config.json"))
    return Tokenizer(
        backend,
        tokens,
        named=named,
        bos_id=ids.get("bos_token"),
        eos_ids=[i for i in eos if i is not None],
    )


def _read(path: Path) -> tokenizers.Tokenizer:
    if path.stat().st_size > MAX_TOKENIZER:
        raise ModelFileError(f"{path} is larger than {MAX_TOKENIZER} bytes; that is no tokenizer")
    with library_errors(f"{path} is not a tokenizer that can be read"):
        return tokenizers.Tokenizer.from_file(str(path))


def _json(model: LocalModel, name: str) -> dict[str, Any]:
    path = model.file(name)
    return read_json(path) if path else {}


def _text(value: Any) -> str | None:
    """Special tokens are written as text or as an object with the text in `content`."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) and content else None


def _named_tokens(config: dict[str, Any]) -> dict[str, str]:
    return {name: text for name in _NAMED if (text := _text(config.get(name))) is not None}


def _add_missing(backend: tokenizers.Tokenizer, config: dict[str, Any], named: dict[str, str]) -> None:
    """Tokens the configuration lists but tokenizer.json forgot, in the order of their ids."""
    listed = config.get("added_tokens_decoder")
    entries = sorted(listed.items(), key=lambda item: int(item[0])) if isinstance(listed, dict) else []
    have = {token.content for token in backend.get_added_tokens_decoder().values()}
    for _, entry in entries:
        text = _text(entry)
        if text is not None and text not in have:
            flags = {k: bool(entry[k]) for k in ("lstrip", "rstrip", "normalized", "single_word") if k in entry}
            backend.add_tokens([AddedToken(text, special=bool(entry.get("special")), **flags)])
            have.add(text)
    missing = [text for text in dict.fromkeys(named.values()) if text not in have]
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in missing])


def _tokens(backend: tokenizers.Tokenizer) -> list[str]:
    """The vocabulary by id; ids that nothing has are empty."""
    vocabulary = backend.get_vocab(with_added_tokens=True)
    tokens = [""] * (max(vocabulary.values(), default=-1) + 1)
    for token, i in vocabulary.items():
        tokens[i] = token
    return tokens


def _declared_ends(config: dict[str, Any]) -> list[int]:
    """eos_token_id of a configuration: a number or a list of them."""
    value = config.get("eos_token_id")
    values = value if isinstance(value, list) else [value]
    return [i for i in values if type(i) is int and i >= 0]


def _without_tokenizer(model: LocalModel) -> Tokenizer:
    """No tokenizer.json. A model with weights is incomplete; a bare configuration gets bytes and numbers."""
    weights = any(model.path.glob("*.safetensors"))
    others = [name for name in ("tokenizer.model", "vocab.json", "vocab.txt") if model.file(name)]
    if weights or others:
        found = f" ({', '.join(others)} cannot be read here)" if others else ""
        raise ModelFileError(
            f"{model.path} has no tokenizer.json{found}; fetch it, or make it with transformers: "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    config = _json(model, "config.json")
    size = config.get("vocab_size")
    if not isinstance(size, int) or not 0 < size < 1 << 24:
        raise ModelFileError(f"{model.path / 'config.json'} has no sensible vocab_size: {size!r}")
    spelled = sorted(BYTE_ALPHABET, key=BYTE_ALPHABET.__getitem__)[:size]
    spelled += [f"Ġ{i}" for i in range(len(spelled), size)]  # a token without text is not streamed
    backend = tokenizers.Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(spelled)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    note = f"{model.name} has no tokenizer: tokens are read as plain bytes and numbers, which suits random weights only"
    return Tokenizer(backend, spelled, eos_ids=_declared_ends(config), note=note)
