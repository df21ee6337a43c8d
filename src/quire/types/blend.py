"""What a caller may ask of chunks reused at other places, and what the engine is told of them."""

from __future__ import annotations

import msgspec

from quire.types.errors import InputError

MAX_SEPARATOR = 256
MAX_CHUNKS = 1024
RECOMPUTE = 0.15  # of the tokens of chunks; what the literature finds enough


class BlendParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The text between two occurrences of `separator` is a chunk: a document that may stand at another place in another
    prompt. Its KV is computed once, after what comes before the first separator, and reused wherever the chunk stands;
    of its tokens, the part `recompute` that its new neighbours change most is computed again. The separator itself is
    no part of the prompt."""

    separator: str
    recompute: float = RECOMPUTE

    def __post_init__(self) -> None:
        if not 1 <= len(self.separator) <= MAX_SEPARATOR:
            message = f"the separator must have 1 to {MAX_SEPARATOR} characters, got {len(self.separator)}"
            raise InputError(message, param="blend")
        if not 0.0 <= self.recompute <= 1.0:
            raise InputError(f"recompute is a part of the tokens, from 0 to 1, got {self.recompute!r}", param="blend")


class Blend(msgspec.Struct, frozen=True):
    """Chunks of a prompt, each [start, end) in tokens, in order; the same tokens mean the same chunk wherever it is."""

    chunks: list[tuple[int, int]]
    recompute: float = RECOMPUTE
