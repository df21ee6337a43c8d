"""What a caller may ask of chunks reused at other places, and what the engine is told of them."""

from __future__ import annotations

import math

import msgspec

from quire.types.errors import InputError

MAX_SEPARATOR = 256
MAX_CHUNKS = 1024
RECOMPUTE = 0.15  # of the tokens of chunks: what the literature and our own measurements find enough


class BlendParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The text between two occurrences of `separator` is a chunk: a document that may stand at another place in another
    prompt. Its KV is computed once and reused wherever the chunk stands; of its tokens, those that the question pays
    most attention to are computed again: the part `recompute`, or only as many as leave an error of `max_error`. The
    separator itself is no part of the prompt. Of a prompt of token ids, `chunks` are the positions [start, end).

    The error is how far the values that are reused as they are deviate from what this prompt makes of them, relative
    to their size, in the first layer that knows of neighbours, weighted by the attention that the question pays to
    each: 0 is a prompt computed whole. Where only `max_error` is given, as much is computed again as that takes."""

    separator: str = ""
    chunks: list[tuple[int, int]] = []
    recompute: float | None = None
    max_error: float = 0.0

    def __post_init__(self) -> None:
        if self.chunks and self.separator:
            raise InputError("chunks are found by a separator, or given by positions, not both", param="blend")
        if not self.chunks and not 1 <= len(self.separator) <= MAX_SEPARATOR:
            message = f"the separator must have 1 to {MAX_SEPARATOR} characters, got {len(self.separator)}"
            raise InputError(message, param="blend")
        if self.recompute is not None and not 0.0 <= self.recompute <= 1.0:
            raise InputError(f"recompute is a part of the tokens, from 0 to 1, got {self.recompute!r}", param="blend")
        if not 0.0 <= self.max_error < math.inf:
            raise InputError(f"max_error is relative, 0 or more, got {self.max_error!r}", param="blend")

    def of(self, chunks: list[tuple[int, int]]) -> Blend:
        """The same for chunks at these positions."""
        recompute = self.recompute
        if recompute is None:
            recompute = 1.0 if self.max_error else RECOMPUTE
        return Blend(chunks, recompute, self.max_error)


class Blend(msgspec.Struct, frozen=True):
    """Chunks of a prompt, each [start, end) in tokens, in order; the same tokens mean the same chunk wherever it is."""

    chunks: list[tuple[int, int]]
    recompute: float = RECOMPUTE  # most of their tokens that are computed again, as a part
    max_error: float = 0.0  # fewer, if the error that is left is not above this
