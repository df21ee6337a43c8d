"""Whether a grammar for a JSON schema takes an instance, token by token, as the server would write it.

The order of an object's properties is the grammar's, so an instance counts as taken if it is in any order of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import islice, permutations, product
from typing import Any

import numpy as np

from quire.assets import resolve
from quire.generation.grammar.llguidance_backend import LLGuidanceBackend
from quire.text import load_tokenizer, vocabulary_of
from quire.types.grammar import GrammarSpec, Vocabulary
from quire.types.seams import Grammar

MAX_ORDERS = 120  # of the properties of an instance
SERVED = (", ", ": ")  # separators as the server writes them


class SchemaJudge:
    def __init__(self, model: str = "smollm2-135m"):
        self.vocabulary: Vocabulary = vocabulary_of(load_tokenizer(resolve(model, progress=False)))
        self._backend = LLGuidanceBackend()

    def compile(self, schema: Any) -> Grammar:
        """The grammar; InputError if it is refused."""
        return self._backend.compile(GrammarSpec("json_schema", json.dumps(schema)), self.vocabulary)

    def takes(self, grammar: Grammar, instance: Any, separators: tuple[str, str] = SERVED) -> bool:
        return any(self.takes_text(grammar, text) for text in spellings(instance, separators))

    def takes_text(self, grammar: Grammar, text: str) -> bool:
        """Whether every token of a text is allowed, and the end after them."""
        state = grammar.fork()
        row = np.empty(-(-len(self.vocabulary.tokens) // 8), np.uint8)
        for token in self.vocabulary.encode(text):
            if state.done:
                return False
            state.fill(row)
            if not row[token // 8] >> token % 8 & 1:
                return False
            state.accept([token])
        if state.error or state.done:
            return not state.error
        state.fill(row)
        return any(row[end // 8] >> end % 8 & 1 for end in self.vocabulary.ends)


def spellings(instance: Any, separators: tuple[str, str]) -> Iterator[str]:
    """An instance as JSON, integral numbers as integers, its properties in every order, as far as those are few."""
    for ordered in islice(_orders(instance), MAX_ORDERS):
        yield json.dumps(ordered, ensure_ascii=False, separators=separators)


def _orders(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for names in permutations(value):
            for items in product(*(_orders(value[name]) for name in names)):
                yield dict(zip(names, items, strict=True))
    elif isinstance(value, list):
        yield from map(list, product(*map(_orders, value)))
    else:
        yield int(value) if isinstance(value, float) and value.is_integer() and abs(value) <= 2**53 else value


def escaped(text: str) -> str:
    """JSON with the letters of its strings written as escapes."""

    def letters(found: re.Match[str]) -> str:
        return '"' + re.sub(r"\\.|[a-z]", lambda c: c[0] if len(c[0]) > 1 else f"\\u{ord(c[0]):04x}", found[1]) + '"'

    return re.sub(r'"((?:\\.|[^"\\])*)"', letters, text)
