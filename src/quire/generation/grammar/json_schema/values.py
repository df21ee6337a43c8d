"""JSON values: their types, whether two are equal, text that is none of some strings.

A number is an integer or, here, a `fraction`: the two make up `number`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

from quire.generation.grammar.json_schema.schema_document import SchemaRefusal

TYPES = frozenset({"null", "boolean", "integer", "fraction", "string", "array", "object"})
MAX_EXACT = 2**53
UNWRITABLE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f\ud800-\udfff]")  # without an escape of their own
ATOM = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|\$", re.DOTALL)
ECMA = {r"\d": "[0-9]", r"\D": "[^0-9]", r"\w": "[A-Za-z0-9_]", r"\W": "[^A-Za-z0-9_]", "$": r"\Z"}


def json_type(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return "integer"
    if isinstance(value, float):
        return "fraction"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def types_named(names: Any) -> frozenset[str]:
    """What a `type` keyword allows."""
    found: set[str] = set()
    for name in names if isinstance(names, list) else [names]:
        if name == "number":
            found |= {"integer", "fraction"}
        elif name in TYPES:
            found.add(name)
        else:
            raise SchemaRefusal(f"there is no type {name!r}")
    return frozenset(found)


def same(a: Any, b: Any) -> bool:
    """As JSON: 1 is 1.0, and true is not 1."""
    if json_type(a) != json_type(b):
        return False
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return bool(a == b)


def exact_number(value: Any, keyword: str) -> int | float:
    """A number of a schema that the grammar can say exactly."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise SchemaRefusal(f"{keyword} must be a number, not {value!r}")
    if isinstance(value, float) and value.is_integer() and abs(value) < MAX_EXACT:
        return int(value)
    return value


def loose_edge(low: int | float | None, high: int | float | None) -> int | None:
    """The end of an open range of numbers that the compiler would let in: an integer, the other end less than one
    beyond it."""
    if low is None or high is None or low == high:
        return None
    if low >= 0 and low == int(low) and high < low + 1:
        return int(low)
    return int(high) if high <= 0 and high == int(high) and low > high - 1 else None


def matches(pattern: str, text: str) -> bool:
    """Whether a pattern of a schema is found in a text."""
    try:
        translated = ATOM.sub(lambda found: ECMA.get(found[0], found[0]), pattern)
        return re.search(translated, text) is not None
    except re.error as error:
        raise SchemaRefusal(f"the pattern {pattern!r} is not understood: {error}") from None


def none_of(texts: Iterable[str]) -> str:
    """A pattern for all strings but these."""
    trie: dict[str, Any] = {}
    for text in texts:
        at = trie
        for char in text:
            at = at.setdefault(char, {})
        at[""] = {}
    return f"^(?:{_other(trie)})$"


def _other(trie: dict[str, Any]) -> str:
    """What goes on otherwise."""
    chars = [char for char in trie if char]
    inside = "".join(re.escape(char) if char not in "^-]\\" else "\\" + char for char in chars)
    options = [] if "" in trie else [""]
    options.append(f"[^{inside}](?s:.*)" if chars else "(?s:.+)")
    options += [f"{_literal(char)}(?:{_other(trie[char])})" for char in chars]
    return "|".join(options)


def _literal(char: str) -> str:
    return re.escape(char)
