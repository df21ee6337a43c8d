"""Objects that several schemas hold for, as alternatives of plain ones: a schema for every declared name, for names
that fit a pattern, for all others; which there must be, and how many.

Refuses to know: other types of values.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from itertools import combinations
from math import comb, inf
from typing import Any, Protocol

from quire.generation.grammar.json_schema.negation import NOT_IN, OTHER_THAN
from quire.generation.grammar.json_schema.scalars import count
from quire.generation.grammar.json_schema.schema_document import Node, SchemaRefusal
from quire.generation.grammar.json_schema.values import matches

MAX_COUNTED = 128  # choices of optional properties that minProperties and maxProperties leave
Origins = tuple[int, ...]


class Emits(Protocol):
    def emit(self, hold: list[Any], closed: bool) -> Any: ...

    def names(self, hold: list[Any]) -> tuple[list[str] | None, str | None]: ...

    def name_fits(self, name: str, hold: list[Any]) -> bool: ...


def objects(schemas: list[tuple[Node, Origins]], emits: Emits, closed: bool) -> list[Node]:
    nodes = [schema for schema, _ in schemas]
    for node in nodes:
        for key in ("properties", "patternProperties"):
            if not isinstance(node.get(key, {}), dict):
                raise SchemaRefusal(f"{key} must be an object")
        names = node.get("required", [])
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise SchemaRefusal("required must be a list of names")
    required = list(dict.fromkeys(name for node in nodes for name in node.get("required", ())))
    names = list(dict.fromkeys([*(name for node in nodes for name in node.get("properties", {})), *required]))
    patterns = list(dict.fromkeys(pattern for node in nodes for pattern in node.get("patternProperties", {})))
    closed_here = closed and any("properties" in node for node in nodes)
    naming = [node["propertyNames"] for node in nodes if node.get("propertyNames", True) is not True]
    listed, pattern = emits.names(naming) if naming else (None, None)
    if listed is not None:
        names += [name for name in listed if name not in names]
    found: Node = {"type": "object"}
    properties: Node = {}
    for name in names:
        hold = _value(schemas, name, None, closed_here and name not in required)
        fits = not naming or emits.name_fits(name, naming)
        properties[name] = emits.emit(hold, closed) if fits else False
        if properties[name] is False and name in required:
            return []
    if properties:
        found["properties"] = properties
    if required:
        found["required"] = required
    others = emits.emit(_value(schemas, None, None, closed_here), closed)
    if naming and listed is not None:
        patterns, others = [], False
    elif naming:
        if patterns:
            raise SchemaRefusal("propertyNames beside patternProperties cannot be kept to")
        if pattern is not None and others is not False:
            found["patternProperties"], others = {pattern: others}, False
    by_pattern = {each: emits.emit(_value(schemas, None, each, closed_here), closed) for each in patterns}
    if by_pattern:
        found["patternProperties"] = _merged(by_pattern)
    if others is not True:
        found["additionalProperties"] = others
    results = [found]
    for node in nodes:
        if OTHER_THAN in node:
            results = [one for result in results for one in _with_another(result, node[OTHER_THAN])]
    return [one for result in results for one in _counted(result, nodes)]


def _with_another(found: Node, than: Collection[str]) -> list[Node]:
    """Alternatives, in each of which another property is there: of those that are declared, since the grammar cannot
    tell which name another one has."""
    properties, required = found.get("properties", {}), found.get("required", [])
    names = [name for name, schema in properties.items() if name not in than and schema is not False]
    if any(name in required for name in names):
        return [found]
    if not names and (found.get("additionalProperties", True) is not False or found.get("patternProperties")):
        raise SchemaRefusal("what does not fit additionalProperties cannot be told")
    return [found | {"required": [*required, name]} for name in names]


def _merged(by_pattern: Node) -> Node:
    """Patterns whose values keep to the same need not be told apart."""
    alike: dict[str, list[str]] = {}
    for pattern, schema in by_pattern.items():
        alike.setdefault(json.dumps(schema), []).append(pattern)
    found = {}
    for schema, patterns in alike.items():
        found[patterns[0] if len(patterns) == 1 else "|".join(f"({p})" for p in patterns)] = json.loads(schema)
    return found


def _value(schemas: list[tuple[Node, Origins]], name: str | None, pattern: str | None, closed: bool) -> list[Any]:
    """What holds for the value of a property: a declared one, one that fits just this pattern, or any other."""
    found: list[Any] = []
    covered_by_any = False
    for node, _ in schemas:
        hold, covered = _own(node, name, pattern)
        found += hold
        covered_by_any = covered_by_any or covered
        if "unevaluatedProperties" in node:
            inner = [n for n, origins in schemas if n is node or id(node) in origins]
            if not any(_own(n, name, pattern)[1] or (n is not node and "unevaluatedProperties" in n) for n in inner):
                found.append(node["unevaluatedProperties"])
                covered_by_any = True
    if closed and not covered_by_any:
        found.append(False)
    return found


def _own(node: Node, name: str | None, pattern: str | None) -> tuple[list[Any], bool]:
    """What one schema says of a property, and whether it says anything."""
    properties, by_pattern = node.get("properties", {}), node.get("patternProperties", {})
    found = [properties[name]] if name is not None and name in properties else []
    if name is not None:
        found += [schema for each, schema in by_pattern.items() if matches(each, name)]
    elif pattern is not None and pattern in by_pattern:
        found.append(by_pattern[pattern])
    if not found and "additionalProperties" in node:
        return [node["additionalProperties"]], True
    return found, bool(found)


def _counted(found: Node, nodes: list[Node]) -> list[Node]:
    """With as many properties as there must be: which of the optional ones are there is an alternative each. Where
    there may be any number, only those that come first are told apart."""
    properties, required = found.get("properties", {}), found.get("required", [])
    low = max((count(node, "minProperties") for node in nodes if "minProperties" in node), default=0)
    high: float = min((count(node, "maxProperties") for node in nodes if "maxProperties" in node), default=inf)
    out = [value for node in nodes for value in node.get(NOT_IN, ()) if isinstance(value, dict)]
    if any(out):
        raise SchemaRefusal("an object that must not be a certain one cannot be told")
    low = max(low, 1) if out else low
    if low <= len(required) and high == inf:
        return [found]
    more = found.get("additionalProperties", True) is not False or bool(found.get("patternProperties"))
    optional = [name for name, schema in properties.items() if schema is not False and name not in required]
    if not more and high >= len(required) + len(optional) and low <= len(required):
        return [found]
    lacking = max(0, low - len(required))
    at_least = high == inf or (not more and high >= len(required) + len(optional))
    most = lacking if at_least else min(len(optional), int(high) - len(required))
    if sum(comb(len(optional), size) for size in range(most + 1)) > MAX_COUNTED:
        raise SchemaRefusal("minProperties and maxProperties beside so many optional properties cannot be kept to")
    results = []
    for size in range(most + 1):
        for present in combinations(optional, size):
            have = len(required) + size
            if not more and have < low:
                continue
            if low - have > 1:
                raise SchemaRefusal(
                    "minProperties can be kept to only where all but one of so many properties are declared: "
                    "two others may have the same name"
                )
            after = optional.index(present[-1]) if at_least and size == lacking and present else len(optional)
            dropped = {name for name in optional[:after] if name not in present}
            one = found | {"required": [*required, *present]}
            if properties:
                one["properties"] = {n: False if n in dropped else s for n, s in properties.items()}
            if not one["required"]:
                del one["required"]
            if low > have:
                one["minProperties"] = low
            if high < inf and more:
                one["maxProperties"] = int(high)
            results.append(one)
    return results
