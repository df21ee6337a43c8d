"""What a caller may ask of chunks reused at other places, and what the engine is told of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from quire.types.errors import InputError

MAX_SEPARATOR = 256
MAX_CHUNKS = 1024
RECOMPUTE = 0.15  # of the tokens of chunks: what the literature and our own measurements find enough


class BlendParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The text between two occurrences of `separator` is a chunk: a document that may stand at another place in another
    prompt. Its KV is computed once and reused wherever the chunk stands; of its tokens, those that the question pays
    most attention to are computed again: the part `recompute`, or only as many as leave an error of `max_error`. The
    separator itself is no part of the prompt. Of a prompt of token ids, `chunks` are the positions [start, end), in
    order; where there are none (nothing was retrieved) it is a prompt like any other.

    The error is how far the values that are reused as they are deviate from what this prompt makes of them, relative
    to their size, in the first layer that knows of neighbours, weighted by the attention that the question pays to
    each: 0 is a prompt computed whole. Where only `max_error` is given, as much is computed again as that takes."""

    separator: str = ""
    chunks: list[tuple[int, int]] | None = None
    recompute: float | None = None
    max_error: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.chunks, list | tuple | None):
            raise InputError(f"chunks is a list of [start, end), got {self.chunks!r}", param="blend")
        if self.chunks and self.separator:
            raise InputError("chunks are found by a separator, or given by positions, not both", param="blend")
        if not isinstance(self.separator, str):
            raise InputError(f"the separator is a text, got {self.separator!r}", param="blend")
        if (self.chunks is None or self.separator) and not 1 <= len(self.separator) <= MAX_SEPARATOR:
            message = f"the separator must have 1 to {MAX_SEPARATOR} characters, got {len(self.separator)}"
            raise InputError(message, param="blend")
        if self.recompute is not None and not (_is_number(self.recompute) and 0.0 <= self.recompute <= 1.0):
            raise InputError(f"recompute is a part of the tokens, from 0 to 1, got {self.recompute!r}", param="blend")
        if not (_is_number(self.max_error) and 0.0 <= self.max_error < math.inf):
            raise InputError(f"max_error is relative, 0 or more, got {self.max_error!r}", param="blend")

    @classmethod
    def read(cls, given: object) -> BlendParams:
        """As they are, or out of a mapping that has their names."""
        try:
            return msgspec.convert(given, cls)
        except msgspec.ValidationError as error:
            raise InputError(f"blend: {error}", param="blend") from None

    def of(self, chunks: list[tuple[int, int]]) -> Blend:
        """The same for chunks at these positions."""
        recompute = self.recompute
        if recompute is None:
            recompute = 1.0 if self.max_error else RECOMPUTE
        return Blend(chunks, recompute, self.max_error)


BlendLike = BlendParams | Mapping[str, Any]


class Blend(msgspec.Struct, frozen=True):
    """Chunks of a prompt, each [start, end) in tokens, in order; the same tokens mean the same chunk wherever it is."""

    chunks: list[tuple[int, int]]
    recompute: float = RECOMPUTE  # most of their tokens that are computed again, as a part
    max_error: float = 0.0  # fewer, if the error that is left is not above this


def check_chunks(chunks: Sequence[tuple[int, int]], length: int) -> None:
    """Refuse chunks that are not in order inside a prompt of so many tokens; which, and why."""
    if len(chunks) > MAX_CHUNKS:
        raise InputError(f"blend takes at most {MAX_CHUNKS} chunks, got {len(chunks)}", param="blend")
    before = 0
    for at, chunk in enumerate(chunks):
        if not isinstance(chunk, tuple | list) or [type(position) for position in chunk] != [int, int]:
            raise InputError(f"chunks[{at}] of blend must be two positions, [start, end), got {chunk!r}", param="blend")
        start, end = chunk
        problem = ""
        if start < 0:
            problem = "begins before the prompt"
        elif end > length:
            problem = f"ends behind the prompt, which has {length} tokens"
        elif end <= start:
            problem = "has no tokens: it must end behind its start"
        elif start < before:
            problem = f"begins before chunks[{at - 1}] ends, at {before}"
        if problem:
            raise InputError(f"chunks[{at}] of blend, [{start}, {end}), {problem}", param="blend")
        before = end


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
