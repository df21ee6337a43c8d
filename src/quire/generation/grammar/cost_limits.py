"""What is counted in a grammar before a compiler is asked: whatever costs more than its length.

The compiler takes time with the square of an object's optional properties, with more than that of its patterns for
names, with the size of a divisor, and with a power of how many patterns hold at once; and no call to it can be taken
back. So these have limits of their own, far above what grammars in use need, and one beyond them is refused by
counting.

Refuses to know: the compiler, what a schema means.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from quire.generation.grammar.pattern_product import SchemaProduct, Unbounded, dicts, lark_product
from quire.types.grammar import GrammarSpec

MAX_OPTIONAL_PROPERTIES = 480  # optional properties of one object: about four ways to go on for each, of 2,000
MAX_OPTIONAL_SQUARED = 500_000  # over all objects
MAX_PATTERN_PROPERTIES = 50  # patternProperties of one object
MAX_DIVISOR = 20_000  # the least common multiple of all multipleOf, without its point
MAX_PRODUCT = 20_000  # of patterns that must all match (`pattern_product`)
EMBEDDED_SCHEMA, DECODER = re.compile(r"%json\s*"), json.JSONDecoder()  # schemas in a Lark grammar
DATA_KEYWORDS = {"const", "default", "enum", "examples"}  # what they hold is no schema


def cost_excess(spec: GrammarSpec) -> str:
    """Why a grammar is too large to be compiled; nothing if it is not, or is no grammar at all."""
    if spec.kind == "lark" and spec.source.lstrip().startswith("{"):
        return "it must be in Lark's notation"  # the compiler would take its own, too
    try:
        schemas = list(_schemas(spec))
        nodes = list(dicts(schemas, without=DATA_KEYWORDS))
    except (ValueError, RecursionError):
        return ""  # the compiler says it better
    return _size_excess(nodes) or _product_excess(spec, schemas)


def _size_excess(nodes: list[dict[str, Any]]) -> str:
    squares, multiple = 0, Fraction(0)
    for node in nodes:
        optional = _optional(node)
        if optional > MAX_OPTIONAL_PROPERTIES:
            most = MAX_OPTIONAL_PROPERTIES
            return f"an object has {optional} optional properties, at most {most} are taken; require more of them"
        squares += optional**2
        if squares > MAX_OPTIONAL_SQUARED:
            return "its objects have too many optional properties together; require more of them, or split it"
        patterns = node.get("patternProperties")
        if isinstance(patterns, dict) and len(patterns) > MAX_PATTERN_PROPERTIES:
            return f"an object has {len(patterns)} patternProperties, at most {MAX_PATTERN_PROPERTIES} are taken"
        multiple = _common(multiple, node.get("multipleOf"))
        if _digits(multiple) > MAX_DIVISOR:
            return f"its multipleOf come to a divisor above {MAX_DIVISOR}; take smaller ones"
    return ""


def _product_excess(spec: GrammarSpec, schemas: list[Any]) -> str:
    try:
        most = max((SchemaProduct(schema).largest(MAX_PRODUCT) for schema in schemas), default=1)
        if spec.kind == "lark":
            most = max(most, lark_product(spec.source))
    except Unbounded as error:
        return str(error)
    return "too many patterns must hold for the same text; take fewer or simpler ones" if most > MAX_PRODUCT else ""


def _schemas(spec: GrammarSpec) -> Iterator[Any]:
    if spec.kind == "json_schema":
        yield json.loads(spec.source)
    elif spec.kind == "lark":
        for found in EMBEDDED_SCHEMA.finditer(spec.source):
            yield DECODER.raw_decode(spec.source, found.end())[0]


def _optional(node: dict[str, Any]) -> int:
    properties, required = node.get("properties"), node.get("required")
    if not isinstance(properties, dict):
        return 0
    names = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
    return len(properties.keys() - names)


def _common(multiple: Fraction, divisor: Any) -> Fraction:
    """The least common multiple of both."""
    if isinstance(divisor, bool) or not isinstance(divisor, int | float) or not 0 < divisor < math.inf:
        return multiple
    other = Fraction(repr(divisor))
    if not multiple:
        return other
    return Fraction(math.lcm(multiple.numerator, other.numerator), math.gcd(multiple.denominator, other.denominator))


def _digits(number: Fraction) -> int:
    """A decimal fraction without its point: 2.5 → 25."""
    while number.denominator > 1:
        number *= 10
    return number.numerator
