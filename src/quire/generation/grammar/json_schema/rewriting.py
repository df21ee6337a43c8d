"""A JSON schema rewritten: what a grammar compiler does not know becomes what it does, meaning the same, or less where
that is said in docs/structured.md. What cannot be is refused.

Every set of schemas that hold for one value becomes alternatives (`alternatives`), and each of these one plain schema
for a type of value (`scalars`, `arrays`, `objects`). A schema made of simple keywords is only copied (`plain_schemas`).

Refuses to know: the compiler.
"""

from __future__ import annotations

import json
import math
from typing import Any

from quire.generation.grammar.json_schema.alternatives import Alternative, Alternatives
from quire.generation.grammar.json_schema.arrays import arrays
from quire.generation.grammar.json_schema.negation import NOT_IN, check_sayable
from quire.generation.grammar.json_schema.objects import objects
from quire.generation.grammar.json_schema.scalars import fits, numbers, strings
from quire.generation.grammar.json_schema.schema_document import Document, Node, SchemaRefusal
from quire.generation.grammar.json_schema.values import MAX_EXACT, TYPES, UNWRITABLE, json_type, same
from quire.types.grammar import CLOSED

MAX_DEFINITIONS = 2000
SHORT = 300  # characters of a schema that is repeated rather than referred to
ALL_BUT_NUMBERS = ("null", "boolean", "string", "array", "object")


def rewritten(schema: Any) -> Any:
    """The schema, in plain keywords."""
    document = Document(schema)
    try:
        return Rewriter(document).whole(schema)
    except RecursionError:
        raise SchemaRefusal("it is nested too deeply") from None
    except (TypeError, AttributeError) as error:
        raise SchemaRefusal(f"a keyword has a value of the wrong type ({error})") from None


class Rewriter:
    def __init__(self, document: Document):
        self._alternatives = Alternatives(document)
        self._names: dict[tuple[frozenset[int], bool], str] = {}
        self._done: dict[str, Any] = {}
        self._referred: set[str] = set()
        self._kept: list[Any] = []  # alive, since ids name them

    def whole(self, schema: Any) -> Any:
        found = self.emit([schema], False)
        if found is False:
            raise SchemaRefusal("no value fits it")
        definitions = {name: self._done[name] for name in sorted(self._referred)}
        if found is True:
            found = {}
        return found | {"$defs": definitions} if definitions else found

    def negated(self, schema: Any) -> Any:
        return self._alternatives.negated(schema)

    def emit(self, hold: list[Any], closed: bool) -> Any:
        """A schema for values that all of these hold for; a boolean where it is one."""
        if any(schema is False for schema in hold):
            return False
        hold = list({id(schema): schema for schema in hold if schema is not True and schema != {}}.values())
        if not hold:
            return True
        self._kept.append(hold)
        key = frozenset(map(id, hold)), closed
        if key in self._names:
            name = self._names[key]
            known = self._done.get(name)  # None: it is part of itself
            if isinstance(known, bool) or (known is not None and len(json.dumps(known)) < SHORT):
                return known
            self._referred.add(name)
            return {"$ref": f"#/$defs/{name}"}
        if len(self._names) > MAX_DEFINITIONS:
            raise SchemaRefusal("it has too many schemas in it")
        name = self._names[key] = f"s{len(self._names)}"
        found = self._union(self._alternatives.of(hold), closed)
        self._done[name] = found
        if name in self._referred and not isinstance(found, bool):
            return {"$ref": f"#/$defs/{name}"}
        return found

    def _union(self, alternatives: list[Alternative], closed: bool) -> Any:
        free: set[str] = set()  # types without any condition
        options: list[Any] = []
        for alternative in alternatives:
            marks = [schema[CLOSED] for schema, _ in alternative.schemas if CLOSED in schema]
            types, found = self._typed(alternative, marks[-1] if marks else closed)
            free |= types
            options += [one for one in found if one not in options]
        options = [one for one in options if one.get("type") not in free]
        if free == TYPES:
            return True
        names = sorted((free - {"integer", "fraction"}) | ({"number"} if "fraction" in free else free & {"integer"}))
        if names:
            options.append({"type": names if len(names) > 1 else names[0]})
        return False if not options else options[0] if len(options) == 1 else {"anyOf": options}

    def _typed(self, alternative: Alternative, closed: bool) -> tuple[set[str], list[Node]]:
        """Types of values that are free in it, and schemas for those that are not."""
        schemas = alternative.schemas
        nodes = [node for node, _ in schemas]
        values = self.values(alternative)
        if values is not None:
            return set(), self._constants(values, schemas, closed)
        free: set[str] = set()
        found: list[Node] = []
        out = [value for node in nodes for value in node.get(NOT_IN, ())]
        for type in ALL_BUT_NUMBERS:
            if type not in alternative.types:
                continue
            check_sayable(nodes)
            if type == "null":
                made: list[Node] = [] if None in out else [{"type": "null"}]
            elif type == "boolean":
                left = [value for value in (True, False) if not any(same(value, one) for one in out)]
                made = [{"type": "boolean"}] if len(left) == 2 else [{"const": value} for value in left]
            elif type == "string":
                made = strings(nodes)
            else:
                made = (arrays if type == "array" else objects)(schemas, self, closed)
            if made == [{"type": type}]:
                free.add(type)
            else:
                found += made
        if number := alternative.types & {"integer", "fraction"}:
            check_sayable(nodes)
            made = numbers(nodes, integer="integer" in number, fraction="fraction" in number)
            if made in ([{"type": "number"}], [{"type": "integer"}]):
                free |= number if made[0]["type"] == "number" else {"integer"}
            else:
                found += made
        return free, found

    def values(self, alternative: Alternative) -> list[Any] | None:
        """Those that are left where a constant or a list of values is given."""
        lists = [
            [node["const"]] if "const" in node else node["enum"]
            for node, _ in alternative.schemas
            if "const" in node or "enum" in node
        ]
        if not lists:
            return None
        for one in lists:
            if not isinstance(one, list):
                raise SchemaRefusal("enum must be a list")
        nodes = [node for node, _ in alternative.schemas]
        out = [value for node in nodes for value in node.get(NOT_IN, ())]
        left: list[Any] = []
        for value in lists[0]:
            listed = all(any(same(value, other) for other in one) for one in lists[1:])
            left_out = any(same(value, one) for one in [*out, *left])
            if json_type(value) not in alternative.types or not listed or left_out:
                continue
            if isinstance(value, list | dict) or fits(value, nodes):
                left.append(value)
        return left

    def _constants(self, values: list[Any], schemas: list[Any], closed: bool) -> list[Node]:
        for value in values:
            _check_exact(value)
        plain = [value for value in values if not isinstance(value, list | dict)]
        plain = [int(v) if isinstance(v, float) and v.is_integer() else v for v in plain]
        found: list[Node] = [{"enum": plain} if len(plain) > 1 else {"const": plain[0]}] if plain else []
        for kind, type, make in ((list, "array", arrays), (dict, "object", objects)):
            some = [value for value in values if isinstance(value, kind)]
            if some:
                check_sayable([node for node, _ in schemas])
            others = make(schemas, self, closed) if some else []
            if some and others != [{"type": type}]:
                found += [{"allOf": [{"const": value}, {"anyOf": others}]} for value in some if others]
            else:
                found += [{"const": value} for value in some]
        return found

    def finite(self, hold: list[Any]) -> list[Any] | None:
        """All values that these hold for, where they are few."""
        found: list[Any] = []
        for alternative in self._alternatives.of(hold):
            values = self.values(alternative)
            if values is None and alternative.types <= {"null", "boolean"}:
                values = [v for v in (None, True, False) if json_type(v) in alternative.types]
            if values is None or any(isinstance(value, list | dict) for value in values):
                return None
            found += [value for value in values if not any(same(value, one) for one in found)]
        return found

    def types(self, hold: list[Any]) -> frozenset[str]:
        return frozenset().union(*(alternative.types for alternative in self._alternatives.of(hold)))

    # ---- names of properties --------------------------------------------------------------------------------

    def _name_schemas(self, hold: list[Any]) -> list[Alternative]:
        return [one for one in self._alternatives.of(hold) if "string" in one.types]

    def name_fits(self, name: str, hold: list[Any]) -> bool:
        for alternative in self._name_schemas(hold):
            values = self.values(alternative)
            out = [v for node, _ in alternative.schemas for v in node.get(NOT_IN, ())]
            nodes = [node for node, _ in alternative.schemas]
            if (values is None and fits(name, nodes) and name not in out) or (values is not None and name in values):
                return True
        return False

    def names(self, hold: list[Any]) -> tuple[list[str] | None, str | None]:
        """Which names there may be: a list of them, or a pattern; both None: any."""
        alternatives = self._name_schemas(hold)
        if not alternatives:
            return [], None
        lists = [self.values(one) for one in alternatives]
        if all(one is not None for one in lists):
            return [name for one in lists for name in one or () if isinstance(name, str)], None
        if len(alternatives) > 1:
            raise SchemaRefusal("propertyNames with alternatives cannot be kept to")
        nodes = [node for node, _ in alternatives[0].schemas]
        check_sayable(nodes)
        found = strings(nodes)
        if not found:
            return [], None
        (made,) = found
        if made == {"type": "string"}:
            return None, None
        low, high = made.get("minLength", 0), made.get("maxLength", "")
        if "pattern" in made and not low and high == "":
            return None, made["pattern"]
        if made.keys() <= {"type", "minLength", "maxLength"}:
            return None, f"^(?s:.{{{low},{high}}})$"
        raise SchemaRefusal("propertyNames with several conditions cannot be kept to")


def _check_exact(value: Any) -> None:
    if isinstance(value, dict):
        for inner in value.values():
            _check_exact(inner)
    elif isinstance(value, list):
        for inner in value:
            _check_exact(inner)
    elif isinstance(value, int) and abs(value) > MAX_EXACT:
        raise SchemaRefusal(f"the number {value} is beyond 2^53, and cannot be said exactly")
    elif isinstance(value, float) and not math.isfinite(value):
        raise SchemaRefusal(f"{value} is no number of JSON")
    elif isinstance(value, str) and UNWRITABLE.search(value):
        raise SchemaRefusal(f"the string {value!r} has a control character that is never written")
