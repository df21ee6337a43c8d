"""What it takes for a schema not to hold: alternatives, in each of which one of its keywords fails.

Where that cannot be said, an alternative says so (`REFUSE`), and counts only if its type of value is possible at all.
Refuses to know: how alternatives are put together.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any, Protocol

from quire.generation.grammar.json_schema.formats import KNOWN_FORMATS
from quire.generation.grammar.json_schema.schema_document import Document, Node, SchemaRefusal
from quire.generation.grammar.json_schema.values import TYPES, types_named

# Keywords that no document has; an object has a property OTHER_THAN these; NOT_FITTING is told of constants only.
NOT_IN, NOT_FITTING, REFUSE, OTHER_THAN = "\0not in", "\0not fitting", "\0refuse", "\0other than"
FLIPPED = {
    "minimum": ("number", "exclusiveMaximum"), "maximum": ("number", "exclusiveMinimum"),
    "exclusiveMinimum": ("number", "maximum"), "exclusiveMaximum": ("number", "minimum"),
}  # fmt: skip
LOWERED = {
    "minLength": ("string", "maxLength"),
    "minItems": ("array", "maxItems"),
    "minProperties": ("object", "maxProperties"),
}
RAISED = {
    "maxLength": ("string", "minLength"),
    "maxItems": ("array", "minItems"),
    "maxProperties": ("object", "minProperties"),
}
UNDENIABLE = {
    "pattern": "string", "multipleOf": "number", "patternProperties": "object", "propertyNames": "object",
    "uniqueItems": "array", "unevaluatedProperties": "object", "unevaluatedItems": "array",
}  # fmt: skip
Task = tuple[bool, Any, tuple[int, ...]]


class Makes(Protocol):
    def made(self, *key: Any, **keywords: Any) -> Node: ...

    def negated(self, schema: Any) -> Any: ...


def check_sayable(nodes: list[Node]) -> None:
    for node in nodes:
        if REFUSE in node:
            raise SchemaRefusal(node[REFUSE])


def denied(node: Node, document: Document, makes: Makes) -> list[list[Task]]:
    """Alternatives, each of things that hold or do not."""
    options: list[list[Task]] = []

    def option(**keywords: Any) -> None:
        options.append([(True, makes.made("deny", id(node), len(options), **keywords), ())])

    if "$ref" in node:
        options.append([(False, document.target(node, node["$ref"]), ())])
        if document.old:
            return options
    if "$dynamicRef" in node:
        options.append([(False, document.dynamic_target(node, node["$dynamicRef"]), ())])
    if "type" in node and (others := TYPES - types_named(node["type"])):
        option(type=sorted(others))
    if "const" in node or "enum" in node:
        option(**{NOT_IN: [node["const"]] if "const" in node else node["enum"]})
    for key, (of, flipped) in FLIPPED.items():
        if key in node:
            option(type=of, **{flipped: node[key]})
    for key, (of, other) in LOWERED.items():
        if node.get(key, 0) > 0:
            option(type=of, **{other: int(node[key]) - 1})
    for key, (of, other) in RAISED.items():
        if key in node:
            option(type=of, **{other: int(node[key]) + 1})
    for key, of in UNDENIABLE.items():
        if key == "multipleOf" and node.get(key) == 1:
            option(type=["fraction"])
        elif node.get(key) not in (None, False, {}, True) or (key == "uniqueItems" and node.get(key)):
            known = {NOT_FITTING: {key: node[key]}} if key in ("pattern", "multipleOf") else {}
            option(type=of, **{REFUSE: f"what does not fit a {key} cannot be told"}, **known)
    if node.get("format") in KNOWN_FORMATS:
        option(type="string", **{REFUSE: "what does not fit a format cannot be told"})
    if node.get("propertyNames") is False:
        option(type="object", minProperties=1)
    _applicators(node, options)
    _objects(node, option, options, makes)
    _arrays(node, option, makes)
    return options


def _applicators(node: Node, options: list[list[Task]]) -> None:
    options += [[(False, part, ())] for part in node.get("allOf", [])]
    if "anyOf" in node:
        options.append([(False, part, ()) for part in node["anyOf"]])
    if "oneOf" in node:
        options.append([(False, part, ()) for part in node["oneOf"]])
        options += [[(True, a, ()), (True, b, ())] for a, b in combinations(node["oneOf"], 2)]
    if "not" in node:
        options.append([(True, node["not"], ())])
    if "if" in node:
        for holds, key in ((True, "then"), (False, "else")):
            if key in node:
                options.append([(holds, node["if"], ()), (False, node[key], ())])


def _objects(node: Node, option: Any, options: list[list[Task]], makes: Makes) -> None:
    declared, required = node.get("properties", {}), node.get("required", [])
    for name in required:  # it is not there, or not what it should be
        option(type="object", properties={name: makes.negated(declared.get(name, True))})
    for name, schema in declared.items():
        if schema not in (True, {}) and name not in required:
            option(type="object", required=[name], properties={name: makes.negated(schema)})
    for key in ("dependentRequired", "dependentSchemas", "dependencies"):
        for name, needs in node.get(key, {}).items():
            for other in needs if isinstance(needs, list) else ():
                option(type="object", required=[name], properties={other: False})
            if not isinstance(needs, list):
                have = makes.made("with", name, type="object", required=[name])
                options.append([(True, have, ()), (False, needs, ())])
    more = node.get("additionalProperties", True)
    if more is False and not node.get("properties") and not node.get("patternProperties"):
        option(type="object", minProperties=1)
    elif more is False and not node.get("patternProperties"):
        option(type="object", **{OTHER_THAN: frozenset(declared)})
    elif more is not True and more != {}:
        option(type="object", **{REFUSE: "what does not fit additionalProperties cannot be told"})


def _arrays(node: Node, option: Any, makes: Makes) -> None:
    prefix: list[Any] = node["items"] if isinstance(node.get("items"), list) else node.get("prefixItems", [])
    rest = node.get("additionalItems") if isinstance(node.get("items"), list) else node.get("items")
    for i, schema in enumerate(prefix):
        if schema is not True:
            option(type="array", minItems=i + 1, prefixItems=[True] * i + [makes.negated(schema)])
    if rest is False:
        option(type="array", minItems=len(prefix) + 1)
    elif rest not in (None, True) and not prefix:
        option(type="array", contains=makes.negated(rest))
    elif rest not in (None, True):
        option(type="array", **{REFUSE: "what does not fit items after prefixItems cannot be told"})
    if "contains" in node:
        if node.get("minContains", 1) == 1 and "maxContains" not in node:
            option(type="array", items=makes.negated(node["contains"]))
        else:
            option(type="array", **{REFUSE: "what does not fit minContains and maxContains cannot be told"})
