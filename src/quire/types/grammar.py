"""What an answer must look like: a grammar as it travels, as text. Compiling it is the business of a GrammarBackend."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from quire.types.errors import InputError

GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "each", "lark", "gbnf", "free"]
CLOSED = "x-quire-closed"  # in a schema: whether objects that declare properties have no others, from there down
MAX_GRAMMAR = 256 << 10  # characters of one grammar
TokenMasks = npt.NDArray[np.uint8]  # [rows, bytes]: a bit a token, lowest first


class ThoughtSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """A thought before an answer, which no grammar holds for."""

    open: str  # begins it
    closes: tuple[str, ...]  # any of these ends it; the first is what is forced at its budget
    inside: bool = False  # the prompt has begun it
    budget: int | None = None  # tokens it may have
    gap: bool = True  # white space may stand between it and the answer


class GrammarSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """`source` is, by kind: a JSON schema, a regular expression, a JSON list of strings, a Lark or GBNF grammar;
    nothing for `json_object`. `each` is a list of strings too: of several answers, each spells its own. `free` says
    nothing of the answer: only its thought is bounded."""

    kind: GrammarKind
    source: str = ""
    lead: str = ""  # in Lark's notation, what stands before the answer
    thought: ThoughtSpec | None = None  # comes before all that

    def __post_init__(self) -> None:
        if len(self.source) > MAX_GRAMMAR:
            raise InputError(
                f"the grammar has {len(self.source)} characters, at most {MAX_GRAMMAR} are taken",
                param="grammar",
                code="invalid_grammar",
            )

    @property
    def parts(self) -> list[GrammarSpec]:
        """What holds for each of several answers, if not the same for all."""
        if self.kind != "each":
            return []
        texts = [json.dumps([text], ensure_ascii=False) for text in json.loads(self.source)]
        return [GrammarSpec("choice", text, self.lead, self.thought) for text in texts]

    @property
    def answer(self) -> GrammarSpec:
        """What holds behind the thought."""
        return msgspec.structs.replace(self, thought=None)


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """What a grammar must know of a model's tokens."""

    tokens: Sequence[bytes]  # what each id stands for; nothing: it is never allowed
    special: frozenset[int]  # ids that are no text, whatever their name
    ends: Sequence[int]  # ids that end an answer
    encode: Callable[[str], list[int]]  # the ids of a text that continues another
