"""Arguments in formats that write strings as they are: which type a text stands for is a matter of the tool's schema.

Refuses to know: formats.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from typing import Any

_TYPES = {
    str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null", list: "array", dict: "object",
}  # fmt: skip
MAX_DEPTH = 16  # of references and alternatives


def types_of(schema: Any, root: Mapping[str, Any], depth: int = MAX_DEPTH) -> frozenset[str]:
    """JSON types that a schema allows, as far as it says; none: it does not."""
    if not isinstance(schema, Mapping) or depth == 0:
        return frozenset()
    if isinstance(reference := schema.get("$ref"), str):
        return types_of(resolved(reference, root), root, depth - 1)
    if isinstance(declared := schema.get("type"), str | list):
        return frozenset([declared] if isinstance(declared, str) else declared)
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        return frozenset(_TYPES.get(type(value), "") for value in values)
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            found = [types_of(one, root, depth - 1) for one in schema[key]]
            return frozenset().union(*found) if all(found) else frozenset()
    for one in schema.get("allOf") or ():
        if found_one := types_of(one, root, depth - 1):
            return found_one
    return frozenset({"object"}) if "properties" in schema else frozenset()


def resolved(reference: str, root: Mapping[str, Any]) -> Any:
    """What a reference within the schema of a tool's parameters points to."""
    node: Any = root
    for part in reference.removeprefix("#").strip("/").split("/") if reference.startswith("#") else ():
        part = part.replace("~1", "/").replace("~0", "~")
        node = node.get(part) if isinstance(node, Mapping) else None
    return node if reference.startswith("#") else None


def property_of(schema: Mapping[str, Any], name: str) -> Any:
    """The schema of one argument, if it is declared."""
    properties = schema.get("properties")
    return properties.get(name) if isinstance(properties, Mapping) else None


def typed(text: str, types: frozenset[str]) -> Any:
    """The value that a text stands for, where the schema allows `types`."""
    if types == {"string"}:
        return text
    for value in _readings(text.strip()):
        kind = _TYPES[type(value)]
        if not types or kind in types or (kind == "integer" and "number" in types):
            return value
        if kind == "number" and "integer" in types and float(value).is_integer():
            return int(value)
    return text


def _readings(text: str) -> Iterator[Any]:
    """As JSON, else as a Python literal."""
    try:
        yield json.loads(text)
        return
    except (ValueError, RecursionError):
        pass
    value = python_value(text)
    if value is not _NO_VALUE and not isinstance(value, str):
        yield value


_NO_VALUE = object()


def python_value(text: str) -> Any:
    """A Python literal as a JSON value; `NO_VALUE` if it is none."""
    try:
        value = ast.literal_eval(text)
        return json.loads(json.dumps(value, allow_nan=False))
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return _NO_VALUE


def literal(text: str) -> Any:
    """A Python literal or JSON; ValueError if it is neither."""
    value = python_value(text)
    if value is _NO_VALUE:
        value = json.loads(text)
    return value
