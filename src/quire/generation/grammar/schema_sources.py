"""The schemas of a grammar in forms that the compiler takes: its own, or those embedded in a Lark grammar.

Refuses to know: the compiler.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from quire.generation.grammar.json_schema.plain_schemas import plain_copy
from quire.generation.grammar.json_schema.rewriting import rewritten
from quire.generation.grammar.json_schema.schema_document import SchemaRefusal
from quire.generation.grammar.json_schema.spellable_classes import without_unspellable
from quire.types.grammar import GrammarSpec

__all__ = ["SchemaRefusal", "as_is", "in_plain_keywords", "with_spellable_classes"]

EMBEDDED, DECODER = re.compile(r"%json\s*(?=\{)"), json.JSONDecoder()
STYLE = "x-guidance"  # how JSON is written: the compiler's own key
ESCAPES = 'nrbtf\\"'  # one way to spell each string: no declared name is written otherwise to pass for another
# A small model left free to choose white space may choose it for ever; and what is fixed need not be computed.
JSON_STYLE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
STYLE_KEYS = ("whitespace_flexible", "whitespace_pattern", "item_separator", "key_separator")


def as_is(spec: GrammarSpec) -> GrammarSpec | None:
    """With schemas copied, if they need no more than that."""
    return _with_schemas(spec, plain_copy)


def in_plain_keywords(spec: GrammarSpec) -> GrammarSpec | None:
    """With schemas rewritten; of several, those that need to be."""

    def write(schema: Any) -> Any:
        copy = plain_copy(schema) if spec.kind == "lark" else None
        return rewritten(schema) if copy is None else copy

    return _with_schemas(spec, write)


def with_spellable_classes(spec: GrammarSpec) -> GrammarSpec:
    """With patterns as the compiler takes them by their meaning; of a source that is one of the above."""
    return _with_schemas(spec, without_unspellable) or spec


def parsed_at(text: str, at: int) -> tuple[Any, int] | None:
    """The schema in a Lark grammar that begins there, and where it ends."""
    try:
        return DECODER.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None  # the compiler says it better


def _style(schema: Any) -> dict[str, Any]:
    """What a schema says itself of how JSON is written."""
    style = schema.get(STYLE) if isinstance(schema, dict) else None
    return {key: style[key] for key in STYLE_KEYS if key in style} if isinstance(style, dict) else {}


def _with_schemas(spec: GrammarSpec, write: Callable[[Any], Any]) -> GrammarSpec | None:
    if spec.kind == "json_schema":
        schema = _parsed(spec.source)
        found = write(schema)
        if found is None:
            return None
        found = {} if found is True else found
        if style := _style(schema):
            found = found | {STYLE: style}
        return GrammarSpec(spec.kind, json.dumps(found, ensure_ascii=False))
    parts, end = [], 0
    for embedded in EMBEDDED.finditer(spec.source):
        if embedded.start() < end:
            continue
        if (parsed := parsed_at(spec.source, embedded.end())) is None:
            continue
        schema, after = parsed
        found = write(schema)
        if found is None:
            return None
        style = JSON_STYLE | _style(schema) | {"json_allowed_escapes": ESCAPES}
        found = ({} if found is True else found) | {STYLE: style}
        parts += [spec.source[end : embedded.end()], json.dumps(found, ensure_ascii=False)]
        end = after
    return GrammarSpec(spec.kind, "".join([*parts, spec.source[end:]]))


def _parsed(source: str) -> Any:
    try:
        schema = json.loads(source, parse_constant=lambda name: float("nan"))
    except ValueError as error:
        raise SchemaRefusal(f"it is no JSON: {error}") from None
    except RecursionError:
        raise SchemaRefusal("it is nested too deeply") from None
    if isinstance(schema, bool):
        return {} if schema else {"not": {}}
    if not isinstance(schema, dict):
        raise SchemaRefusal("a schema must be an object or a boolean")
    return schema
