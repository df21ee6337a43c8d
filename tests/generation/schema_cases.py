"""Schemas of every keyword, with instances that are valid and some that are not: seeded, judged by `jsonschema`.

Each schema is built around one keyword, beside others, and half of them lie in a larger one. Instances are drawn near
what the schema mentions, so that both kinds are found.
"""

from __future__ import annotations

import random
from typing import Any

import jsonschema

KEYWORDS = (
    "type", "enum", "const", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength",
    "maxLength", "pattern", "format", "items", "prefixItems", "minItems", "maxItems", "contains", "minContains",
    "maxContains", "uniqueItems", "properties", "required", "additionalProperties", "patternProperties",
    "propertyNames", "minProperties", "maxProperties", "dependentRequired", "dependentSchemas", "allOf", "anyOf",
    "oneOf", "not", "if", "$ref", "unevaluatedProperties", "unevaluatedItems", "annotations",
)  # fmt: skip
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
NAMES = ("a", "b", "kind", "x-1", 'q"q')
WORDS = ("", "a", "ab", "abc", "x-1", "Zoë", "long words with spaces", 'a"b', "line\nbreak")
NUMBERS = (-7, -1, 0, 1, 2, 3, 5, 10, 0.5, 2.5, -1.5, 100)
PATTERNS = ("^a", "b$", "^[a-z]+$", "x-[0-9]", "^(ab|c)*$")
VALID = jsonschema.Draft202012Validator


class Cases:
    def __init__(self, seed: int):
        self.rng = random.Random(seed)

    def scalar(self) -> Any:
        return self.rng.choice([None, True, False, *NUMBERS, *WORDS])

    def value(self, depth: int = 2) -> Any:
        if depth == 0 or self.rng.random() < 0.6:
            return self.scalar()
        if self.rng.random() < 0.5:
            return [self.value(depth - 1) for _ in range(self.rng.randint(0, 3))]
        return {name: self.value(depth - 1) for name in self.rng.sample(NAMES, self.rng.randint(0, 3))}

    def simple(self) -> dict[str, Any]:
        rng = self.rng
        return rng.choice(
            [
                {"type": rng.choice(TYPES)},
                {"type": rng.sample(TYPES, 2)},
                {"type": "integer", "minimum": rng.choice((-1, 0, 2))},
                {"type": "string", "maxLength": rng.randint(1, 5)},
                {"enum": rng.sample(WORDS, 2)},
                {"const": self.scalar()},
                {"type": "boolean"},
                {"type": "string", "pattern": rng.choice(PATTERNS)},
            ]
        )

    def object(self) -> dict[str, Any]:
        names = self.rng.sample(NAMES, self.rng.randint(1, 3))
        found: dict[str, Any] = {"type": "object", "properties": {name: self.simple() for name in names}}
        if self.rng.random() < 0.6:
            found["required"] = self.rng.sample(names, self.rng.randint(1, len(names)))
        if self.rng.random() < 0.6:
            found["additionalProperties"] = self.rng.choice([False, self.simple()])
        return found

    def keyword(self, name: str) -> dict[str, Any]:
        """A schema in which one keyword matters."""
        rng, one = self.rng, self.simple
        number, few = rng.choice((-1, 0, 1, 2, 5)), rng.randint(1, 2)
        return {
            "type": lambda: {"type": rng.choice([rng.choice(TYPES), rng.sample(TYPES, 3)])},
            "enum": lambda: {"enum": [self.value(1) for _ in range(4)]},
            "const": lambda: {"const": self.value(2)},
            "minimum": lambda: {"type": rng.choice(["integer", "number"]), "minimum": number},
            "maximum": lambda: {"type": rng.choice(["integer", "number"]), "maximum": number},
            "exclusiveMinimum": lambda: {"type": ["integer", "null"], "exclusiveMinimum": number},
            "exclusiveMaximum": lambda: {"exclusiveMaximum": number},
            "multipleOf": lambda: {"type": "number", "multipleOf": rng.choice((1, 2, 5, 0.5))},
            "minLength": lambda: {"type": "string", "minLength": few},
            "maxLength": lambda: {"maxLength": few},
            "pattern": lambda: {"type": "string", "pattern": rng.choice(PATTERNS)},
            "format": lambda: {"type": "string", "format": rng.choice(["unknown-format", "regex", "color"])},
            "items": lambda: {"type": "array", "items": one()},
            "prefixItems": lambda: {
                "type": "array",
                "prefixItems": [one(), one()],
                "items": rng.choice([False, one()]),
            },
            "minItems": lambda: {"type": "array", "minItems": few},
            "maxItems": lambda: {"type": "array", "maxItems": few, "items": one()},
            "contains": lambda: {"type": "array", "contains": one()},
            "minContains": lambda: {"type": "array", "contains": one(), "minContains": rng.randint(0, 2)},
            "maxContains": lambda: {"type": "array", "contains": {"type": "string"}, "maxContains": few},
            "uniqueItems": lambda: {
                "type": "array",
                "items": {"enum": rng.sample(WORDS, 3)},
                "uniqueItems": rng.choice([True, True, False]),
            },
            "properties": lambda: self.object(),
            "required": lambda: {"type": "object", "required": rng.sample(NAMES, few)},
            "additionalProperties": lambda: {
                "type": "object",
                "properties": {"a": one()},
                "additionalProperties": one(),
            },
            "patternProperties": lambda: {"type": "object", "patternProperties": {rng.choice(("^a", "^x-")): one()}},
            "propertyNames": lambda: {
                "type": "object",
                "propertyNames": rng.choice(
                    [
                        {"maxLength": 1},
                        {"enum": ["a", "b"]},
                        {"pattern": "^[a-z]+$"},
                    ]
                ),
            },
            "minProperties": lambda: {"type": "object", "properties": {"a": one(), "b": one()}, "minProperties": 1},
            "maxProperties": lambda: {"type": "object", "properties": {"a": one()}, "maxProperties": few},
            "dependentRequired": lambda: {"type": "object", "dependentRequired": {"a": ["b"]}},
            "dependentSchemas": lambda: {
                "type": "object",
                "dependentSchemas": {"a": {"required": ["b"], "maxProperties": 2}},
            },
            "allOf": lambda: {"allOf": [{"type": ["string", "integer"]}, {"minimum": number}, {"maxLength": 3}]},
            "anyOf": lambda: {"anyOf": [one(), one()]},
            "oneOf": lambda: {
                "oneOf": rng.choice(
                    [
                        [{"type": "integer"}, {"type": "string"}],
                        [{"type": "integer", "minimum": 2}, {"type": "integer", "maximum": 5}],
                        [{"required": ["a"]}, {"required": ["b"]}],
                        [
                            {"properties": {"kind": {"const": kind}}, "required": ["kind"], "type": "object"}
                            for kind in ("a", "ab")
                        ],
                    ]
                )
            },
            "not": lambda: {
                "not": rng.choice(
                    [
                        {"type": "string"},
                        {"const": "a"},
                        {"enum": [1, "ab", None]},
                        {"required": ["a"]},
                        {"type": "array", "maxItems": 1},
                        {"minimum": 2},
                        {"properties": {"a": {"type": "string"}}, "required": ["a"]},
                    ]
                )
            },
            "if": lambda: {
                "if": rng.choice([{"type": "string"}, {"required": ["a"]}, {"minimum": 2}]),
                "then": rng.choice([{"maxLength": 2}, {"required": ["b"]}, {"maximum": 5}, True]),
                "else": rng.choice([{"type": ["integer", "object"]}, {"not": {"type": "null"}}, True]),
            },
            "$ref": lambda: {
                "type": "object",
                "properties": {"a": {"$ref": "#/$defs/tree"}},
                "$defs": {
                    "tree": {
                        "type": ["object", "null"],
                        "properties": {"a": {"$ref": "#/$defs/tree"}},
                        "required": ["b"],
                    }
                },
            },
            "unevaluatedProperties": lambda: {
                "type": "object",
                "allOf": [{"properties": {"a": one()}}],
                "properties": {"b": True},
                "unevaluatedProperties": rng.choice([False, {"type": "integer"}]),
            },
            "unevaluatedItems": lambda: {
                "type": "array",
                "allOf": [{"prefixItems": [one()]}],
                "unevaluatedItems": rng.choice([False, one()]),
            },
            "annotations": lambda: {
                "title": "t",
                "description": "d",
                "default": {"id": 1},
                "examples": [{"$id": "#x"}],
                "x-unknown": {"type": 3},
                "deprecated": True,
                "$comment": "c",
                **one(),
            },
        }[name]()

    def case(self, name: str) -> tuple[dict[str, Any], list[Any], list[Any]]:
        """A schema, up to four valid instances and four that are not."""
        rng = self.rng
        schema = self.keyword(name)
        wrap = rng.random() < 0.4 and name not in ("$ref",)
        whole = (
            {"type": "object", "properties": {"v": schema}, "required": ["v"], "additionalProperties": False}
            if wrap
            else schema
        )
        validator = VALID(whole)
        good: list[Any] = []
        bad: list[Any] = []
        for _ in range(400):
            value = self.near(schema)
            value = {"v": value} if wrap else value
            into = good if validator.is_valid(value) else bad
            if len(into) < 4 and value not in into:
                into.append(value)
            if len(good) == len(bad) == 4:
                break
        return whole, good, bad

    def near(self, schema: dict[str, Any]) -> Any:
        """A value of a type that a schema speaks of, more often than not."""
        rng = self.rng
        words = str(schema)
        kind = schema.get("type")
        kind = rng.choice(kind) if isinstance(kind, list) else kind
        if rng.random() < 0.2:
            return self.value()
        if "enum" in schema and rng.random() < 0.5:
            return rng.choice(schema["enum"])
        if "const" in schema and rng.random() < 0.5:
            return schema["const"]
        if kind == "object" or (kind is None and "required" in words):
            value = {name: self.value(1) for name in rng.sample(NAMES, rng.randint(0, 3))}
            for name, inner in schema.get("properties", {}).items():
                if isinstance(inner, dict) and rng.random() < 0.6:
                    value[name] = self.near(inner)
            return value
        if kind == "array":
            inner = schema.get("items", schema.get("contains"))
            return [self.near(inner) if isinstance(inner, dict) else self.value(1) for _ in range(rng.randint(0, 4))]
        if kind in ("integer", "number"):
            return rng.choice(NUMBERS)
        return rng.choice(WORDS) if kind == "string" else self.value()


def cases(count: int, seed: int = 1) -> list[tuple[str, dict[str, Any], list[Any], list[Any]]]:
    """So many schemas, each keyword in turn."""
    made = Cases(seed)
    found = []
    for number in range(count):
        name = KEYWORDS[number % len(KEYWORDS)]
        found.append((name, *made.case(name)))
    return found


def composed(count: int, seed: int = 1) -> list[tuple[str, dict[str, Any], list[Any], list[Any]]]:
    """Schemas put together from those around single keywords: all of them, some, one, none, the one if the other."""
    made = Cases(seed)
    found = []
    while len(found) < count:
        a, b, c = (made.keyword(made.rng.choice([name for name in KEYWORDS if name != "$ref"])) for _ in range(3))
        name, schema = made.rng.choice(
            [
                ("allOf", {"allOf": [a, b]}),
                ("anyOf", c | {"anyOf": [a, b]}),
                ("not", {"not": a}),
                ("oneOf", {"oneOf": [a, b]}),
                ("if", {"if": a, "then": b, "else": c}),
                ("allOf, not", {"allOf": [a, {"not": b}]}),
                ("$ref", b | a | {"$ref": "#/$defs/c", "$defs": {"c": c}}),
            ]
        )
        validator = VALID(schema)
        values = [made.near(made.rng.choice((a, b, c))) for _ in range(12)]
        good = [value for value in values if validator.is_valid(value)]
        found.append((name, schema, good[:4], [value for value in values if value not in good][:4]))
    return found
