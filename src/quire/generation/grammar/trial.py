"""What is tried of a grammar before an answer begins under it: how it begins, and where each of its strings begins.

Refuses to know: the compiler.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from quire.generation.grammar.schema_sources import EMBEDDED, parsed_at
from quire.types.grammar import GrammarSpec

MAX_OPENINGS = 50  # properties that may come first
MAX_STRINGS = 100  # patterns


def openings(source: GrammarSpec) -> Iterator[str]:
    """Texts that an answer may begin with: nothing, an object, the string of each property that may come first. An
    answer that need be no object may yet become one."""
    yield ""
    if source.kind not in ("json_object", "json_schema"):
        return
    yield "{"
    properties = _dict(json.loads(source.source or "{}")).get("properties")
    for name in list(_dict(properties))[:MAX_OPENINGS]:
        yield f'{{{json.dumps(name, ensure_ascii=False)}: "'


def strings(source: GrammarSpec) -> list[str]:
    """Schemas of strings with a pattern, wherever they are in it, each once."""
    found: dict[str, None] = {}
    left: list[Any] = list(_schemas(source))
    while left and len(found) < MAX_STRINGS:
        node = left.pop()
        if isinstance(node, dict):
            if "pattern" in node or "format" in node:
                kept = {key: node[key] for key in ("pattern", "format", "minLength", "maxLength") if key in node}
                if all(isinstance(value, str | int) for value in kept.values()):
                    found[json.dumps({"type": "string"} | kept, ensure_ascii=False)] = None
            left += [value for key, value in node.items() if key not in ("enum", "const")]
        elif isinstance(node, list):
            left += node
    return list(found)


def _schemas(source: GrammarSpec) -> Iterator[Any]:
    if source.kind == "json_schema":
        yield json.loads(source.source)
    elif source.kind == "lark":
        for embedded in EMBEDDED.finditer(source.source):
            if (found := parsed_at(source.source, embedded.end())) is not None:
                yield found[0]


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
