"""Character classes of patterns without the control characters that no JSON string here spells.

Strings are written with the short escapes alone (\\n, \\t, ...). Of a class that holds other control characters, but no
quote or no backslash, the compiler lets escapes of these in: `[^"]` then takes `\\"`. Nothing is lost without them.
Refuses to know: the compiler, what schemas mean.
"""

from __future__ import annotations

import re
from typing import Any

from quire.generation.grammar.json_schema.schema_document import MAPS

DATA = ("const", "enum", "default", "examples", "x-guidance")  # keys of what is no schema
UNSPELLABLE = r"[\x00-\x07\x0B\x0E-\x1F]"
PIECE = re.compile(r"\\[pP](?:\{[^}]*\}|.)|\\.|\[|[^\\\[]+|\\", re.DOTALL)
INSIDE = re.compile(r"\\.|[\[\]]|[^\\\[\]]+|\\", re.DOTALL)


def without_unspellable(schema: Any) -> Any:
    """The schema, its patterns' classes without these characters."""
    if isinstance(schema, list):
        return [without_unspellable(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "pattern" and isinstance(value, str):
            found[key] = spellable(value)
        elif key in MAPS and isinstance(value, dict):
            named = spellable if key == "patternProperties" else str
            found[key] = {named(name): without_unspellable(one) for name, one in value.items()}
        else:
            found[key] = value if key in DATA else without_unspellable(value)
    return found


def spellable(pattern: str) -> str:
    parts, at = [], 0
    while at < len(pattern):
        piece = PIECE.match(pattern, at)
        assert piece is not None, "every character begins a piece"
        end = piece.end()
        if piece[0] == "[":
            end = _class_end(pattern, at)
        text = pattern[at:end]
        wanted = piece[0] == "[" and end > at + 1
        parts.append(f"[{text}--{UNSPELLABLE}]" if wanted or piece[0][:2] in (r"\p", r"\P") else text)
        at = end
    return "".join(parts)


def _class_end(pattern: str, start: int) -> int:
    """Behind the class that begins there; right behind its bracket, if it has no end (the compiler says so)."""
    at, depth = start, 0
    while at < len(pattern):
        piece = INSIDE.match(pattern, at)
        assert piece is not None
        at = piece.end()
        if piece[0] == "[":
            depth += 1
            first = pattern[at : at + 2]
            at += 2 if first == "^]" else 1 if first[:1] == "]" else 0  # a bracket that closes nothing
        elif piece[0] == "]":
            depth -= 1
            if not depth:
                return at
    return start + 1
