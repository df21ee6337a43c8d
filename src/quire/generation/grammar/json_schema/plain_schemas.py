"""Schemas made of keywords that the compiler keeps to as they are: copied without annotations, objects closed where
they are to be. However deeply they are nested.

Refuses to know: anything that needs to be rewritten.
"""

from __future__ import annotations

import json
from typing import Any

from quire.generation.grammar.json_schema.formats import KNOWN_FORMATS
from quire.generation.grammar.json_schema.schema_document import Node
from quire.generation.grammar.json_schema.values import MAX_EXACT, TYPES, UNWRITABLE, loose_edge
from quire.types.grammar import CLOSED

VALUES = ("type", "required", "minItems", "maxItems", "minLength", "maxLength", "pattern", "minimum", "maximum",
          "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "enum", "const")  # fmt: skip
REWRITTEN = ("allOf", "oneOf", "not", "if", "then", "else", "dependencies", "dependentRequired", "dependentSchemas",
             "uniqueItems", "contains", "minContains", "maxContains", "propertyNames", "patternProperties",
             "minProperties", "maxProperties", "unevaluatedItems", "unevaluatedProperties", "additionalItems",
             "$dynamicRef", "$recursiveRef", "$id", "$anchor", "$dynamicAnchor")  # fmt: skip
MAX_COMPARED = 64  # options of an anyOf
NAMED_TYPES = TYPES - {"fraction"} | {"number"}


def plain_copy(schema: Any) -> Any:
    """The schema with plain keywords only; None where there are others."""
    whole: list[Any] = [schema]
    references: set[str] = set()
    left: list[tuple[Any, Any, bool]] = [(whole, 0, False)]  # where a schema lies, and whether objects there are closed
    while left:
        place, key, closed = left.pop()
        node = place[key]
        if isinstance(node, bool):
            continue
        if not isinstance(node, dict):
            return None
        copy = _copied(node, closed)
        if copy is None:
            return None
        closed = bool(node.get(CLOSED, closed))
        place[key] = copy
        references |= {copy["$ref"]} if "$ref" in copy else set()
        left += [
            (copy[key], name, closed) for key in ("properties", "$defs", "definitions") for name in copy.get(key, ())
        ]
        left += [(copy[key], i, closed) for key in ("anyOf", "prefixItems") for i in range(len(copy.get(key, ())))]
        left += [(copy, key, closed) for key in ("items", "additionalProperties") if key in copy]
    return whole[0] if all(_points(schema, reference) for reference in references) else None


def _points(schema: Any, reference: str) -> bool:
    """Whether a reference within a schema leads somewhere."""
    for part in reference.split("/")[1:]:
        if not isinstance(schema, dict) or part not in schema:
            return False  # or so it seems: names may be escaped
        schema = schema[part]
    return True


def _copied(node: Node, closed: bool) -> Node | None:
    if any(key in node for key in REWRITTEN) or "2020-12" not in str(node.get("$schema", "2020-12")):
        return None
    copy: Node = {key: node[key] for key in VALUES if key in node}
    for key, kind in (
        ("properties", dict),
        ("$defs", dict),
        ("definitions", dict),
        ("anyOf", list),
        ("prefixItems", list),
    ):
        if key in node:
            if not isinstance(node[key], kind):
                return None
            copy[key] = kind(node[key])
    if "anyOf" in copy:
        copy["anyOf"] = _distinct(copy["anyOf"])
    for key in ("items", "additionalProperties"):
        if key in node:
            copy[key] = node[key]
    if "$ref" in node:
        if len(copy.keys() - {"$defs", "definitions"}) or not str(node["$ref"]).startswith("#/"):
            return None
        copy["$ref"] = node["$ref"]
    if "format" in node and node["format"] in KNOWN_FORMATS:
        copy["format"] = node["format"]
    if not _exact(copy) or isinstance(copy.get("items"), list):
        return None
    if node.get(CLOSED, closed) and "properties" in copy:
        if "anyOf" in copy:
            return None  # what is declared there counts, too
        if "additionalProperties" not in copy:
            required = copy.get("required", [])
            copy["properties"] |= {name: True for name in required if name not in copy["properties"]}
            copy["additionalProperties"] = False
    return copy


def _distinct(options: list[Any]) -> list[Any]:
    """Each once: every copy of an option doubles the ways in which a value may be read."""
    found: list[Any] = []
    try:
        for option in options if len(options) <= MAX_COMPARED else ():
            if not any(option == one and json.dumps(option) == json.dumps(one) for one in found):  # 1 equals True
                found.append(option)
    except RecursionError:
        return options
    return found or options


def _exact(copy: Node) -> bool:
    """Types that there are, numbers that a float says, sizes that are integers."""
    types = copy.get("type", [])
    if not all(name in NAMED_TYPES for name in (types if isinstance(types, list) else [types])):
        return False
    if not isinstance(copy.get("required", []), list) or not all(isinstance(n, str) for n in copy.get("required", [])):
        return False
    sizes = [copy[key] for key in ("minItems", "maxItems", "minLength", "maxLength") if key in copy]
    if not all(isinstance(size, int) and not isinstance(size, bool) for size in sizes):
        return False
    values = [copy[key] for key in VALUES[7:] if key in copy]
    while values:
        value = values.pop()
        if isinstance(value, dict):
            values += value.values()
        elif isinstance(value, list):
            values += value
        elif isinstance(value, str):
            if UNWRITABLE.search(value):
                return False
        elif (isinstance(value, float) and value.is_integer()) or (value is not None and not abs(value) <= MAX_EXACT):
            return False
    return _kept_open(copy)


def _kept_open(copy: Node) -> bool:
    """Whether the compiler leaves out the ends of a range that are to be left out."""
    low, high = copy.get("exclusiveMinimum"), copy.get("exclusiveMaximum")
    if low is None and high is None:
        return True
    ends = (copy.get("minimum") if low is None else low), (copy.get("maximum") if high is None else high)
    return all(isinstance(end, int | float | None) for end in ends) and loose_edge(*ends) is None
