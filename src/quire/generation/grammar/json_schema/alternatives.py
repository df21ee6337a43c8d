"""What a value must keep to, as alternatives: in each of them a set of schemas whose keywords all hold, nothing else.

    allOf, $ref ──► all of them        anyOf, oneOf, if, dependencies, what a `not` denies ──► one alternative each

An alternative that no type of value is left for is dropped at once, and so are objects of which a property would have
to be two constants: of many conditions on one property, few hold together. Refuses to know: how schemas are merged,
grammars.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from quire.generation.grammar.json_schema.negation import denied
from quire.generation.grammar.json_schema.schema_document import Document, Node, SchemaRefusal
from quire.generation.grammar.json_schema.values import TYPES, json_type, types_named

MAX_ALTERNATIVES = 200  # for one value
MAX_STEPS = 40_000  # over all of a schema
MAX_SEVERAL = 4  # options of an anyOf, of which several may hold
Task = tuple[bool, Any, tuple[int, ...]]  # holds or not, a schema, the schemas it is part of (ids)


@dataclass
class Alternative:
    """Types that are left for a value, and schemas all of whose own keywords hold; with each, those it is part of."""

    types: frozenset[str] = TYPES
    schemas: list[tuple[Node, tuple[int, ...]]] = field(default_factory=list)


class Alternatives:
    def __init__(self, document: Document):
        self._document = document
        self._steps = 0
        self._made: dict[tuple[Any, ...], Node] = {}

    def of(self, hold: Iterable[Any]) -> list[Alternative]:
        """For a value that all of these hold for."""
        return self._expand([(True, schema, ()) for schema in hold], Alternative(), set(), [])

    def negated(self, schema: Any) -> Any:
        """`{"not": schema}`, the same for the same schema."""
        if isinstance(schema, bool):
            return not schema
        return self._made.setdefault(("not", id(schema)), {"not": schema})

    def made(self, *key: Any, **keywords: Any) -> Node:
        """A schema that no document has, the same for the same key."""
        return self._made.setdefault(key, keywords)

    def _expand(
        self, tasks: list[Task], found: Alternative, seen: set[tuple[int, bool]], groups: list[list[list[Task]]]
    ) -> list[Alternative]:
        types, schemas, seen, groups = found.types, list(found.schemas), set(seen), list(groups)
        tasks = list(tasks)
        while tasks:
            holds, schema, origins = tasks.pop(0)
            self._steps += 1
            if self._steps > MAX_STEPS:
                raise SchemaRefusal("its alternatives combine in too many ways; make it simpler")
            if isinstance(schema, bool):
                if schema is not holds:
                    return []
                continue
            if not isinstance(schema, dict):
                raise SchemaRefusal(f"a schema must be an object or a boolean, not {schema!r}")
            if (id(schema), holds) in seen:
                continue
            seen.add((id(schema), holds))
            if not holds:
                groups.append(denied(schema, self._document, self))
                continue
            if not (self._document.old and "$ref" in schema):
                types &= _types(schema)
                if not types:
                    return []
                schemas.append((schema, origins))
            within = (*origins, id(schema)) if self._document.evaluates else ()
            tasks = self._parts(schema, within) + tasks
            groups += self._choices(schema, within)
        if "object" in types and _contradictory(schemas):
            types -= {"object"}
            if not types:
                return []
        rest = Alternative(types, schemas)
        if not groups:
            return [rest]
        group = min(groups, key=len)
        left = [other for other in groups if other is not group]
        results: list[Alternative] = []
        for option in group:
            results += self._expand(option, rest, seen, left)
            if len(results) > MAX_ALTERNATIVES:
                raise SchemaRefusal("its alternatives combine in too many ways; make it simpler")
        return results

    def _parts(self, schema: Node, origins: tuple[int, ...]) -> list[Task]:
        """What holds besides."""
        tasks: list[Task] = []
        if "$ref" in schema:
            tasks.append((True, self._document.target(schema, schema["$ref"]), origins))
            if self._document.old:
                return tasks  # whatever stands beside a reference is not looked at
        if "$dynamicRef" in schema:
            tasks.append((True, self._document.dynamic_target(schema, schema["$dynamicRef"]), origins))
        if "$recursiveRef" in schema:
            raise SchemaRefusal("$recursiveRef cannot be kept to")
        tasks += [(True, inner, origins) for inner in _list(schema, "allOf")]
        if "not" in schema:
            tasks.append((False, schema["not"], ()))
        return tasks

    def _choices(self, schema: Node, origins: tuple[int, ...]) -> list[list[list[Task]]]:
        if self._document.old and "$ref" in schema:
            return []
        groups: list[list[list[Task]]] = []
        if "anyOf" in schema:
            groups.append([[(True, option, origins) for option in some] for some in self._some(_list(schema, "anyOf"))])
        if "oneOf" in schema:
            groups.append(self._one_of(_list(schema, "oneOf"), origins))
        if "if" in schema and ("then" in schema or "else" in schema or self._document.evaluates):
            test = schema["if"]
            groups.append(
                [
                    [(True, test, origins), (True, schema.get("then", True), origins)],
                    [(False, test, ()), (True, schema.get("else", True), origins)],
                ]
            )
        for name, needs in _dependencies(schema):
            if needs in (True, [], {}):
                continue
            without = self.made("without", name, properties={name: False})
            have = self.made("with", name, type="object", required=[name])
            then: Any = needs
            if isinstance(needs, list):
                then = self.made("require", tuple(needs), required=needs)
            groups.append([[(True, without, ())], [(True, then, origins), (True, have, ())]])
        return groups

    def _some(self, options: list[Any]) -> list[tuple[Any, ...]]:
        """One of them; where it matters what others have looked at, also several."""
        most = len(options) if self._document.evaluates and len(options) <= MAX_SEVERAL else 1
        return [some for size in range(1, most + 1) for some in combinations(options, size)]

    def _one_of(self, options: list[Any], origins: tuple[int, ...]) -> list[list[Task]]:
        """One holds and the others do not; what cannot hold together need not be denied."""
        found = []
        for i, option in enumerate(options):
            others = [o for j, o in enumerate(options) if j != i and not self._apart(option, o)]
            found.append([(True, option, origins), *((False, other, ()) for other in others)])
        return found

    def _apart(self, one: Any, other: Any) -> bool:
        """Whether it is plain to see that nothing fits both: other types, other constants; of objects, the same in a
        property that both have, or one that must be there and may not be."""
        one, other = self._followed(one), self._followed(other)
        if not (isinstance(one, dict) and isinstance(other, dict)):
            return one is False or other is False
        if not _types(one) & _types(other):
            return True
        if _other_constants(one, other):
            return True
        if not _types(one) == _types(other) == {"object"}:
            return False
        here, there = (_list(each, "required") for each in (one, other))
        if any(_bars(other, name) for name in here) or any(_bars(one, name) for name in there):
            return True
        for name in set(here) & set(there):
            a, b = (self._followed((each.get("properties") or {}).get(name)) for each in (one, other))
            if isinstance(a, dict) and isinstance(b, dict) and (_other_constants(a, b) or not _types(a) & _types(b)):
                return True
        return False

    def _followed(self, schema: Any) -> Any:
        for _ in range(20):
            if not (isinstance(schema, dict) and "$ref" in schema and (self._document.old or len(schema) == 1)):
                break
            schema = self._document.target(schema, schema["$ref"])
        return schema


def _contradictory(schemas: list[tuple[Node, tuple[int, ...]]]) -> bool:
    """Whether it is plain to see that a property that must be there can have no value."""
    required = {name for node, _ in schemas for name in node.get("required", ()) if isinstance(name, str)}
    for name in required:
        inner = [(node.get("properties") or {}).get(name) for node, _ in schemas]
        lists = [found for schema in inner if isinstance(schema, dict) and (found := _constants(schema)) is not None]
        out = [value for schema in inner if isinstance(schema, dict) for value in _left_out(schema)]
        if lists and not any(value not in out and all(value in one for one in lists) for value in lists[0]):
            return True
    return False


def _left_out(schema: Node) -> list[tuple[str, Any]]:
    """Constants that a `not` of nothing else leaves out."""
    denied = schema.get("not")
    return (_constants(denied) or []) if isinstance(denied, dict) and denied.keys() <= {"const", "enum"} else []


def _other_constants(one: Node, other: Node) -> bool:
    mine, theirs = _constants(one), _constants(other)
    return mine is not None and theirs is not None and not any(value in theirs for value in mine)


def _bars(schema: Node, name: Any) -> bool:
    """Whether a property must not be there."""
    if name in (schema.get("properties") or {}):
        return schema["properties"][name] is False
    return schema.get("additionalProperties") is False and not schema.get("patternProperties")


def _constants(schema: Node) -> list[tuple[str, Any]] | None:
    """With their types: 1 is not true."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return [(json_type(value), value) for value in values] if isinstance(values, list) else None


def _types(schema: Node) -> frozenset[str]:
    types = types_named(schema["type"]) if "type" in schema else TYPES
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        types &= {json_type(value) for value in values}
    return types


def _list(schema: Node, key: str) -> list[Any]:
    value = schema.get(key, [])
    if not isinstance(value, list):
        raise SchemaRefusal(f"{key} must be a list")
    return value


def _dependencies(schema: Node) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key in ("dependentRequired", "dependentSchemas", "dependencies"):
        if not isinstance(value := schema.get(key, {}), dict):
            raise SchemaRefusal(f"{key} must be an object")
        found += [(name, [needs] if isinstance(needs, str) else needs) for name, needs in value.items()]
    return found
