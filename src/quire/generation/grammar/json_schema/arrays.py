"""Arrays that several schemas hold for, as alternatives of plain ones: items by position, the others, how many.

`contains` is unrolled: the items it is about are among the first few. Refuses to know: other types of values.
"""

from __future__ import annotations

from itertools import combinations, product
from math import comb, inf
from typing import Any, Protocol

from quire.generation.grammar.json_schema.negation import NOT_IN
from quire.generation.grammar.json_schema.scalars import count
from quire.generation.grammar.json_schema.schema_document import Node, SchemaRefusal

MAX_CONTAINS_REACH = 8  # the first items, among which those that `contains` asks for are
MAX_ARRAYS = 64  # alternatives
MAX_UNIQUE = 5  # values whose orders are written out
MAX_ROWS = 1280  # arrays that are
Origins = tuple[int, ...]
Layout = tuple[list[list[Any]], list[Any], int]  # what holds for each of the first items, for others; how many


class Emits(Protocol):
    def emit(self, hold: list[Any], closed: bool) -> Any: ...

    def negated(self, schema: Any) -> Any: ...

    def finite(self, hold: list[Any]) -> list[Any] | None: ...

    def types(self, hold: list[Any]) -> frozenset[str]: ...


def arrays(schemas: list[tuple[Node, Origins]], emits: Emits, closed: bool) -> list[Node]:
    nodes = [schema for schema, _ in schemas]
    low = max((count(n, "minItems") for n in nodes if "minItems" in n), default=0)
    high: float = min((count(n, "maxItems") for n in nodes if "maxItems" in n), default=inf)
    unique = any(node.get("uniqueItems") for node in nodes)
    out = [value for node in nodes for value in node.get(NOT_IN, ()) if isinstance(value, list)]
    if any(out):
        raise SchemaRefusal("an array that must not be a certain one cannot be told")
    if out:
        low = max(low, 1)
    length = max((len(_prefix(node)) for node in nodes), default=0)
    layouts: list[Layout] = [([item_of(schemas, i) for i in range(length)], item_of(schemas, length), low)]
    for node in nodes:
        if "contains" in node:
            layouts = [new for layout in layouts for new in _containing(layout, node, high, emits)]
            if len(layouts) > MAX_ARRAYS:
                raise SchemaRefusal("its arrays may contain what they must in too many ways")
    found = []
    for prefix, rest, least in layouts:
        if unique:
            found += _unique(prefix, rest, least, high, emits)
        elif (one := _plain(prefix, rest, least, high, emits, closed)) is not None:
            found.append(one)
    return found


def _prefix(node: Node) -> list[Any]:
    if isinstance(node.get("items"), list):
        return node["items"]
    return node["prefixItems"] if isinstance(node.get("prefixItems"), list) else []


def _rest(node: Node) -> Any:
    return node.get("additionalItems", True) if isinstance(node.get("items"), list) else node.get("items", True)


def item_of(schemas: list[tuple[Node, Origins]], i: int) -> list[Any]:
    """What holds for the item at a position; beyond all prefixes it is the same for all."""
    found = []
    for node, _ in schemas:
        prefix = _prefix(node)
        found.append(prefix[i] if i < len(prefix) else _rest(node))
        if "unevaluatedItems" in node:
            inner = [n for n, origins in schemas if n is node or id(node) in origins]
            if any("contains" in n for n in inner):
                raise SchemaRefusal("unevaluatedItems beside contains cannot be kept to")
            others = [n for n in inner if n is not node and "unevaluatedItems" in n]
            if others and not all(n["unevaluatedItems"] is node["unevaluatedItems"] for n in others):
                continue  # an inner one has looked at all there are
            if not any(
                i < len(_prefix(n))
                or ("items" in n and not isinstance(n["items"], list))
                or ("additionalItems" in n and isinstance(n.get("items"), list))
                for n in inner
            ):
                found.append(node["unevaluatedItems"])
    return found


def _containing(layout: Layout, node: Node, high: float, emits: Emits) -> list[Layout]:
    prefix, rest, low = layout
    wanted, unwanted = node["contains"], emits.negated(node["contains"])
    least = count(node, "minContains") if "minContains" in node else 1
    most = count(node, "maxContains") if "maxContains" in node else None
    if most is None and least == 0:
        return [layout]
    reach = int(min(high, max(MAX_CONTAINS_REACH if least < 2 else 6, least, len(prefix))))
    found: list[Layout] = []
    for matching in range(least, (least if most is None else most) + 1):
        for places in combinations(range(reach), matching):
            length = max([len(prefix), *(place + 1 for place in places)])
            items: list[list[Any]] = [[*(prefix[i] if i < len(prefix) else rest)] for i in range(length)]
            for i, item in enumerate(items):
                if i in places:
                    item.append(wanted)
                elif most is not None:
                    item.append(unwanted)
            others = rest if most is None else [*rest, unwanted]
            found.append((items, others, max(low, *(place + 1 for place in places), 0)))
            if len(found) > MAX_ARRAYS:
                raise SchemaRefusal("its arrays may contain what they must in too many ways")
    return found


def _plain(prefix: list[list[Any]], rest: list[Any], low: int, high: float, emits: Emits, closed: bool) -> Node | None:
    items: list[Any] = []
    for hold in prefix[: int(min(len(prefix), high))]:
        item = emits.emit(hold, closed)
        if item is False:
            high = min(high, len(items))
            break
        items.append(item)
    more = emits.emit(rest, closed) if high > len(items) else False
    if more is False:
        high = min(high, len(items))
    if low > high:
        return None
    found: Node = {"type": "array"}
    if items:
        found["prefixItems"] = items
    if more is not True:
        found["items"] = more
    if low:
        found["minItems"] = low
    if high < inf and (more is not False or high < len(items)):
        found["maxItems"] = int(high)
    return found


def _unique(prefix: list[list[Any]], rest: list[Any], low: int, high: float, emits: Emits) -> list[Node]:
    """No two items are equal: written out where few values are possible, or where their types tell them apart."""
    if emits.emit(rest, False) is False:
        high = min(high, len(prefix))
    if high <= 1:
        return [found for found in [_plain(prefix, rest, low, high, emits, False)] if found is not None]
    values = [emits.finite(hold) for hold in prefix]
    others = emits.finite(rest)
    if high <= len(prefix) and _all_apart(prefix[: int(high)], emits):
        return [found for found in [_plain(prefix, rest, low, high, emits, False)] if found is not None]
    if (others is None and high > len(prefix)) or any(value is None for value in values):
        raise SchemaRefusal("uniqueItems can be kept to only where items have few values (an enum), or maxItems is 1")
    pool = [value or [] for value in values]
    kinds = list({_name(value): value for value in others or []}.values())
    longest = int(min(high, len(prefix) + len(kinds)))
    if len(kinds) > MAX_UNIQUE and not prefix:
        return _in_order(kinds, low, longest)
    if len(kinds) > MAX_UNIQUE or longest > MAX_UNIQUE + len(prefix):
        raise SchemaRefusal(f"uniqueItems of more than {MAX_UNIQUE} values cannot be kept to")
    found = []
    for length in range(low, longest + 1):
        columns = [pool[i] if i < len(pool) else kinds for i in range(length)]
        for row in product(*columns):
            if len({_name(value) for value in row}) == length:
                found.append(list(row))
            if len(found) > MAX_ROWS:
                raise SchemaRefusal("uniqueItems of so many values cannot be kept to")
    return [{"const": row} for row in found]


def _in_order(values: list[Any], low: int, high: int) -> list[Node]:
    """More values than whose orders can be written out come in the order they are listed in."""
    if sum(comb(len(values), length) for length in range(low, high + 1)) > MAX_ROWS:
        raise SchemaRefusal(f"uniqueItems of {len(values)} values cannot be kept to; set a maxItems, or take fewer")
    return [{"const": list(row)} for length in range(low, high + 1) for row in combinations(values, length)]


def _all_apart(items: list[list[Any]], emits: Emits) -> bool:
    kinds = [emits.types(hold) for hold in items]
    return all(not a & b for a, b in combinations(kinds, 2))


def _name(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{key!r}:{_name(value[key])}" for key in sorted(value)) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_name, value)) + "]"
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return repr(value)
