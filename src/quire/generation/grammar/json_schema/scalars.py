"""Numbers and strings that several schemas hold for, as one schema each; and which of given values fit them.

Refuses to know: arrays, objects, references.
"""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise
from typing import Any

from quire.generation.grammar.json_schema.formats import KNOWN_FORMATS
from quire.generation.grammar.json_schema.lookaheads import without_lookaheads
from quire.generation.grammar.json_schema.negation import NOT_FITTING, NOT_IN, check_sayable
from quire.generation.grammar.json_schema.schema_document import Node, SchemaRefusal
from quire.generation.grammar.json_schema.values import (
    MAX_EXACT,
    exact_number,
    json_type,
    loose_edge,
    matches,
    none_of,
)

DIGITS_BEHIND = 6  # the smallest numbers beside an open end, as a part of the range
MAX_EXCLUDED = 64  # values that a `not` leaves out
Bound = tuple[int | float, bool]  # and whether it is left out itself


def bounds(schemas: list[Node]) -> tuple[Bound | None, Bound | None]:
    """The narrowest of all."""
    low: list[Bound] = []
    high: list[Bound] = []
    for schema in schemas:
        for found, key, strict in ((low, "minimum", "exclusiveMinimum"), (high, "maximum", "exclusiveMaximum")):
            edge = schema.get(strict)
            if key in schema:
                found.append((exact_number(schema[key], key), edge is True))
            if edge is not None and not isinstance(edge, bool):
                found.append((exact_number(edge, strict), True))
    return max(low, default=None), min(high, key=lambda bound: (bound[0], not bound[1]), default=None)


def common_multiple(schemas: list[Node]) -> Fraction | None:
    found: Fraction | None = None
    for schema in schemas:
        if "multipleOf" in schema:
            value = exact_number(schema["multipleOf"], "multipleOf")
            if value <= 0:
                raise SchemaRefusal("multipleOf must be above 0")
            other = Fraction(repr(value))
            found = (
                other
                if found is None
                else Fraction(
                    math.lcm(found.numerator, other.numerator), math.gcd(found.denominator, other.denominator)
                )
            )
    return found


def numbers(schemas: list[Node], *, integer: bool, fraction: bool) -> list[Node]:
    """Alternatives: one range, or several between values that are left out. Without integers, without fractions."""
    low, high = bounds(schemas)
    multiple = common_multiple(schemas)
    if not integer:
        return []  # as if there were none: a grammar cannot tell 1.50 from 1.00
    if fraction and multiple is not None and multiple.denominator == 1:
        fraction = False  # and an integer is then written as one
    out = sorted({v for schema in schemas for v in schema.get(NOT_IN, ()) if json_type(v) in ("integer", "fraction")})
    out = [v for v in out if (low is None or v >= low[0]) and (high is None or v <= high[0])]
    if len(out) > MAX_EXCLUDED:
        raise SchemaRefusal("too many numbers are left out")
    cuts = [low, *((exact_number(value, "not"), True) for value in out), high]
    base: Node = {"type": "number" if fraction else "integer"}
    if multiple is not None and not (multiple == 1 and not fraction):
        base["multipleOf"] = _plain(multiple)
    ranges = []
    for begin, end in pairwise(cuts):
        if begin and end and (begin[0] > end[0] or (begin[0] == end[0] and (begin[1] or end[1]))):
            continue
        if fraction:
            begin, end = _tightened(begin, end)
        ranges.append(
            base
            | _edge(begin, "minimum", "exclusiveMinimum", up=True)
            | _edge(end, "maximum", "exclusiveMaximum", up=False)
        )
    return [found for found in ranges if not _empty(found)]


def _tightened(low: Bound | None, high: Bound | None) -> tuple[Bound | None, Bound | None]:
    """The same range, or one that leaves out a little more at an end that the compiler would let in."""
    if low is None or high is None or (edge := loose_edge(low[0], high[0])) is None:
        return low, high
    little = 10.0 ** (math.floor(math.log10(high[0] - low[0])) - DIGITS_BEHIND)
    if edge + little == edge:
        raise SchemaRefusal(f"the range between {low[0]} and {high[0]} is too narrow")
    if edge == low[0]:
        return ((edge + little, True) if low[1] else low), high
    return low, ((edge - little, True) if high[1] else high)


def _edge(bound: Bound | None, key: str, strict: str, *, up: bool) -> Node:
    """A bound that the compiler can say, or one within it: beyond 2^53 not every integer is a float."""
    if bound is None:
        return {}
    value, out = bound
    if abs(value) > MAX_EXACT:
        if (value > 0) is up:
            raise SchemaRefusal(f"{key} {value} is beyond 2^53, and cannot be said exactly")
        value, out = (-MAX_EXACT if up else MAX_EXACT), False
    return {strict if out else key: value}


def _empty(schema: Node) -> bool:
    if schema["type"] != "integer":
        return False
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    high = schema.get("maximum", schema.get("exclusiveMaximum"))
    if low is None or high is None:
        return False
    first = math.floor(low) + 1 if "exclusiveMinimum" in schema else math.ceil(low)
    last = math.ceil(high) - 1 if "exclusiveMaximum" in schema else math.floor(high)
    step = schema.get("multipleOf", 1)
    return first > last or (isinstance(step, int) and -(-first // step) * step > last)


def _plain(number: Fraction) -> int | float:
    return number.numerator if number.denominator == 1 else float(number)


def strings(schemas: list[Node]) -> list[Node]:
    low = max((count(schema, "minLength") for schema in schemas if "minLength" in schema), default=0)
    high = min((count(schema, "maxLength") for schema in schemas if "maxLength" in schema), default=None)
    if high is not None and low > high:
        return []
    patterns = list(dict.fromkeys(schema["pattern"] for schema in schemas if "pattern" in schema))
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise SchemaRefusal("a pattern must be a string")
    patterns = [part for pattern in patterns for part in without_lookaheads(pattern)]
    formats = {schema["format"] for schema in schemas if schema.get("format") in KNOWN_FORMATS}
    out = {value for schema in schemas for value in schema.get(NOT_IN, ()) if isinstance(value, str)}
    if len(out) > MAX_EXCLUDED:
        raise SchemaRefusal("too many strings are left out")
    if out:
        patterns.append(none_of(sorted(out)))
    base: Node = {"type": "string"}
    if low:
        base["minLength"] = low
    if high is not None:
        base["maxLength"] = high
    parts = [{"type": "string", "pattern": pattern} for pattern in patterns]
    parts += [{"type": "string", "format": format} for format in sorted(formats)]
    if len(parts) == 1:
        return [base | parts[0]]
    return [base | {"allOf": parts} if parts else base]


def count(schema: Node, key: str) -> int:
    """A keyword that counts something."""
    value = schema[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value != int(value):
        raise SchemaRefusal(f"{key} must be an integer that is not negative, not {value!r}")
    return int(value)


def fits(value: Any, schemas: list[Node]) -> bool:
    """Whether a value that is no array or object keeps to what schemas say of its kind."""
    check_sayable([schema for schema in schemas if NOT_FITTING not in schema])
    if any(fits(value, [schema[NOT_FITTING]]) for schema in schemas if NOT_FITTING in schema):
        return False
    if isinstance(value, str):
        texts = [schema for schema in schemas if not schema.get("pattern") or matches(schema["pattern"], value)]
        low = max((count(schema, "minLength") for schema in schemas if "minLength" in schema), default=0)
        high = min((count(schema, "maxLength") for schema in schemas if "maxLength" in schema), default=math.inf)
        return len(texts) == len(schemas) and low <= len(value) <= high
    if isinstance(value, bool) or value is None:
        return True
    low_edge, high_edge = bounds(schemas)
    multiple = common_multiple(schemas)
    if low_edge and (value < low_edge[0] or (value == low_edge[0] and low_edge[1])):
        return False
    if high_edge and (value > high_edge[0] or (value == high_edge[0] and high_edge[1])):
        return False
    return multiple is None or (Fraction(repr(value)) / multiple).denominator == 1
