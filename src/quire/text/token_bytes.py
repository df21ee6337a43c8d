"""What bytes each token stands for.

Text is the UTF-8 reading of the bytes of its tokens, one after another. That holds for byte-level vocabularies
(GPT-2's alphabet of printable stand-ins for bytes) and for SentencePiece-type ones (a visible mark for the space,
`<0x0A>` for a single byte), so for these decoding is a table and a join, and text once said stays said. (The
library's own ByteFallback, meeting one wrong byte, turns a whole run of byte tokens into U+FFFD, the right ones
before it too; here only the wrong ones are.) Other decoders are not described here: `pieces_of` then answers None
and decoding is left to the tokenizers library.

Knows: alphabets. Refuses to know: files, special tokens, streams.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's stand-ins: printable Latin-1 characters mean themselves, the other bytes are moved to U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(moved)}


BYTE_ALPHABET = _byte_alphabet()
# Latin-1 characters outside the alphabet must not pass for bytes: they become something Latin-1 cannot hold.
_TO_LATIN1 = str.maketrans({chr(b): "\uffff" for b in range(256)} | {c: chr(b) for c, b in BYTE_ALPHABET.items()})
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Pieces(msgspec.Struct, frozen=True):
    """The bytes of every token id, and how many spaces are dropped where a text begins."""

    table: list[bytes]
    leading: int = 0


def byte_level_piece(token: str) -> bytes:
    try:
        return token.translate(_TO_LATIN1).encode("latin-1")
    except UnicodeEncodeError:  # not in the alphabet: an added token, spelled as itself
        return token.encode("utf-8", "replace")


def pieces_of(decoder: Any, tokens: Sequence[str]) -> Pieces | None:
    """The table for a decoder of the tokenizers library, or None if it is not of the two kinds above."""
    if decoder is None:
        return None
    steps = _steps(json.loads(decoder.__getstate__()))
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return Pieces([byte_level_piece(token) for token in tokens])
    leading = 0
    if kinds[-1:] == ["Strip"]:
        last = steps.pop()
        if last.get("content") != " " or last.get("stop") or kinds[-2:-1] != ["Fuse"]:
            return None
        leading = int(last.get("start", 0))
    replaced = [(s["pattern"].get("String"), s["content"]) for s in steps if s["type"] == "Replace"]
    if set(kinds) - {"Replace", "ByteFallback", "Fuse", "Strip"} or not all(old for old, _ in replaced):
        return None
    return Pieces([*map(_sentencepiece(replaced, "ByteFallback" in kinds), tokens)], leading)


def _steps(state: dict[str, Any]) -> list[dict[str, Any]]:
    """A decoder's state as a flat list of steps."""
    if state["type"] != "Sequence":
        return [state]
    return [step for inner in state["decoders"] for step in _steps(inner)]


def _sentencepiece(replaced: list[tuple[str, str]], byte_tokens: bool) -> Callable[[str], bytes]:
    def piece(token: str) -> bytes:
        if byte_tokens and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(match[1])
        for old, new in replaced:
            token = token.replace(old, new)
        return token.encode("utf-8", "replace")

    return piece
