"""JSON schemas of many kinds: some written by hand after what people send, the others put together from seeded parts.

Only keywords that a grammar can hold an answer to. Strings and lists mostly have a most: a schema that lets an answer
go on for ever does not say that a model must end it. Refuses to know: engines, grammars.
"""

from __future__ import annotations

import json
import random
from importlib.resources import files
from typing import Any

Schema = dict[str, Any]

TOPICS = (
    "book", "city", "film", "recipe", "invoice", "patient", "flight", "song", "employee", "planet", "car", "course",
    "animal", "product", "match", "address", "ticket", "event", "device", "paper",
)  # fmt: skip
FIELDS = (
    "name", "title", "kind", "size", "year", "price", "owner", "status", "notes", "rating", "country", "code", "colour",
    "length", "start", "end", "email", "active", "tags", "parts", "level", "score", "parent", "unit", "source",
)  # fmt: skip
WORDS = ("red", "green", "blue", "small", "large", "open", "closed", "north", "south", "new", "used", "high", "low")
FORMATS = ("date", "time", "date-time", "email", "uuid", "ipv4", "hostname", "duration")
PATTERNS = ("^[A-Z]{3}$", "^[a-z]{2,8}$", r"^\d{4}-\d{2}$", "^#[0-9a-f]{6}$", "^(yes|no|maybe)$", r"^v\d+\.\d+\.\d+$")


def by_hand() -> list[Schema]:
    return json.loads(files("quire.bench").joinpath("data/schemas.json").read_text("utf-8"))


def schemas(count: int, seed: int = 1) -> list[Schema]:
    """`count` schemas: those written by hand first, then seeded ones."""
    maker = _Maker(random.Random(seed))
    known = by_hand()[:count]
    return known + [maker.document() for _ in range(count - len(known))]


class _Maker:
    def __init__(self, rng: random.Random):
        self._rng = rng

    def document(self) -> Schema:
        """A whole schema: usually an object, sometimes with definitions, sometimes something else at the top."""
        rng = self._rng
        way = rng.random()
        if way < 0.62:
            return {"title": rng.choice(TOPICS), **self.thing(2)}
        if way < 0.74:
            return self.defined()
        if way < 0.82:
            return {"title": rng.choice(TOPICS), "type": "array", "items": self.thing(1), "minItems": 1, "maxItems": 3}
        if way < 0.90:
            variants = [self.variant(kind) for kind in rng.sample(TOPICS, rng.randint(2, 3))]
            return {"title": "one of several", "anyOf": variants}
        return {"title": rng.choice(FIELDS), **self.value(0)}

    def thing(self, depth: int) -> Schema:
        """An object; what is required, and whether more may come, varies."""
        rng = self._rng
        names = rng.sample(FIELDS, rng.randint(1, 5))
        result: Schema = {"type": "object", "properties": {name: self.value(depth - 1) for name in names}}
        required = names if rng.random() < 0.6 else rng.sample(names, rng.randint(0, len(names)))
        if required:
            result["required"] = required
        result["additionalProperties"] = False
        return result

    def variant(self, kind: str) -> Schema:
        """One of several objects, told apart by a constant."""
        body = self.thing(0)
        properties = {"type": {"const": kind}, **body["properties"]}
        return {**body, "properties": properties, "required": ["type", *body.get("required", [])]}

    def defined(self) -> Schema:
        """Parts by reference, and at times a part that contains itself."""
        rng = self._rng
        part = self.thing(0)
        if rng.random() < 0.5:
            part["properties"]["next"] = {"anyOf": [{"$ref": "#/$defs/part"}, {"type": "null"}]}
            part["required"] = [*dict.fromkeys([*part.get("required", []), "next"])]
        whole = self.thing(1)
        whole["properties"]["part"] = {"$ref": "#/$defs/part"}
        whole["required"] = [*dict.fromkeys([*whole.get("required", []), "part"])]
        return {"title": rng.choice(TOPICS), **whole, "$defs": {"part": part}}

    def value(self, depth: int) -> Schema:
        rng = self._rng
        makers = [self._text, self._text, self._number, self._number, self._choice, self._flag, self._formatted]
        if depth > 0:
            makers += [self._list, self._list, self._map, self._tuple, lambda: self.thing(depth), self._maybe]
        return rng.choice(makers)()

    def _text(self) -> Schema:
        low = self._rng.choice((0, 1, 3))
        return {"type": "string", "minLength": low, "maxLength": low + self._rng.choice((5, 20, 60))}

    def _number(self) -> Schema:
        rng = self._rng
        kind = rng.choice(("integer", "integer", "number"))
        bounds: Schema = {"minimum": rng.choice((-50, 0, 1)), "maximum": rng.choice((10, 150, 9999))}
        if rng.random() < (0.2 if kind == "integer" else 0.7):  # a fraction may have any number of digits
            bounds["multipleOf"] = 5 if kind == "integer" else 0.25
        return {"type": kind, **bounds}

    def _choice(self) -> Schema:
        rng = self._rng
        if rng.random() < 0.2:
            return {"const": rng.choice(WORDS)}
        values: list[Any] = rng.sample(WORDS, rng.randint(2, 5))
        return {"enum": [*values, None] if rng.random() < 0.3 else values}

    def _flag(self) -> Schema:
        return {"type": self._rng.choice(("boolean", ["boolean", "null"]))}

    def _formatted(self) -> Schema:
        rng = self._rng
        if rng.random() < 0.5:
            return {"type": "string", "pattern": rng.choice(PATTERNS)}
        return {"type": "string", "format": rng.choice(FORMATS), "maxLength": 40}

    def _list(self) -> Schema:
        low = self._rng.choice((0, 0, 1, 2))
        return {"type": "array", "items": self.value(0), "minItems": low, "maxItems": low + self._rng.choice((1, 3))}

    def _tuple(self) -> Schema:
        first = [self.value(0) for _ in range(self._rng.randint(1, 3))]
        return {"type": "array", "prefixItems": first, "items": False, "minItems": len(first)}

    def _map(self) -> Schema:
        return {"type": "object", "additionalProperties": self.value(0), "maxProperties": 3}

    def _maybe(self) -> Schema:
        return {"anyOf": [self.value(0), {"type": "null"}]}
