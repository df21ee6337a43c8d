"""The product of patterns that must all match one text, bounded before a compiler is asked.

To tell whether patterns leave anything to say, the compiler multiplies the ways each of them may go on at a byte; at
once, or in the middle of an answer, when the text comes to where they differ. How many that are is at most the product
of how many kinds of characters each pattern tells apart. So that is what is counted: for JSON schemas over all that may
apply to one value (`allOf`, `$ref`, the same property or item in several of them, one option of each `anyOf`), for Lark
grammars over `&` between terminals.

Refuses to know: the compiler, how it is told.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Container, Iterable, Iterator
from typing import Any
from urllib.parse import unquote

ATOM = re.compile(r"\\[pP](?:\{[^}]*\}|.)|\\.|\[(?:\\.|[^\]\\])*|\.", re.DOTALL)
KINDS = re.compile(r"\[|\.|\\[pPdDsSwW]")  # how atoms begin that are more than one character
FLAGS = re.compile(r"\(\?[a-zA-Z-]+[:)]")  # the same atom may then mean something else
FORMAT_WEIGHT = 12
MAX_SCHEMA_SETS = 20_000  # that are looked at
LARK = re.compile(r'(?:#|//)[^\n]*|"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\])+/\w*|<[^<>\s]+>|[\w-]+|[^\S\n]+|.', re.DOTALL)
DEFINED = re.compile(r"\s*[!?]*([A-Za-z_][\w-]*)")  # a line with a colon that begins so
All = frozenset[Any]  # what applies to one value: ids of schemas, and alternatives, each a frozenset of All


class Unbounded(Exception):
    """With the reason why nothing can be said."""


def weight(pattern: str) -> int:
    """How many kinds of characters it tells apart: those it names, single ones, and any."""
    atoms = [atom for atom in ATOM.findall(pattern) if KINDS.match(atom)]
    return 2 + len(atoms if FLAGS.search(pattern) else set(atoms))


def lark_product(source: str) -> int:
    """Of the terminal of a Lark grammar that has the most."""
    bodies = _definitions(source)
    known: dict[str, int] = {}

    def ways(pieces: list[list[str]]) -> int:
        return math.prod(max(1, sum(map(atom, piece))) for piece in pieces)

    def atom(token: str) -> int:
        if token in bodies and token not in known:
            known[token] = 1  # should it contain itself, the compiler says so
            known[token] = sum(map(ways, bodies[token]))
        if token in known:
            return known[token]
        if token[0] == "/":
            return weight(token if token[-1] == "/" else f"(?i:{token})")
        return 1 if token[0] in '"<' else 2 * token[0].isalpha()

    try:
        return max((ways(pieces) for found in bodies.values() for pieces in found if len(pieces) > 1), default=1)
    except RecursionError:
        raise Unbounded("its terminals are nested too deeply for one with &") from None


def _definitions(source: str) -> dict[str, list[list[list[str]]]]:
    """By name, of all that have it: the tokens between its `&`."""
    bodies: dict[str, list[list[list[str]]]] = {}
    current: list[list[str]] = [[]]
    line = ""
    for token in LARK.findall(source):
        if token == ":" and (name := DEFINED.match(line)):
            current = [[]]
            bodies.setdefault(name[1], []).append(current)
        elif token == "&":
            current.append([])
        elif not token.startswith(("#", "//")):
            current[-1].append(token)
        line = "" if token == "\n" else line + token
    return bodies


class SchemaProduct:
    """Of a JSON schema."""

    def __init__(self, root: Any):
        self._root = root
        self._nodes: dict[int, dict[str, Any]] = {}
        self._own: dict[All, int] = {}
        self._known: dict[All, tuple[list[dict[str, Any]], list[frozenset[All]]]] = {}

    def largest(self, limit: int) -> int:
        """Of the value that has the most; the search ends at the first above the limit."""
        nodes = list(dicts(self._root))  # all: a reference may point anywhere
        names = sorted(weight(name) for node in nodes for name in _dict(node.get("patternProperties")))
        most = math.prod(names[-2:])  # the compiler looks which two of them may be the same name
        if math.prod(map(_weight, nodes)) <= limit:
            return most  # even if they all applied to one value
        if any(isinstance(node.get(key), str) for node in nodes if node is not self._root for key in ("$id", "id")):
            raise Unbounded("beside so many patterns, no schema in it may have an $id of its own")
        left, seen = [self._all(self._root)], set[All]()
        try:
            while left and most <= limit:
                value = left.pop()
                most = max(most, self._product(value))
                for child in {self._child(value, key) for key in self._keys(value)} - seen:
                    seen.add(child)
                    left.append(child)
                if len(seen) > MAX_SCHEMA_SETS:
                    raise Unbounded("its schemas combine in too many ways")
        except RecursionError:
            raise Unbounded("its schemas are nested too deeply for so many patterns") from None
        return most

    def _product(self, value: All) -> int:
        if value not in self._own:
            self._own[value] = 1  # a choice that contains itself
            nodes, choices = self._flat(value)
            options = (max(map(self._product, choice), default=1) for choice in choices)
            self._own[value] = math.prod(map(_weight, nodes)) * math.prod(options)
        return self._own[value]

    def _all(self, *schemas: Any) -> All:
        found = [schema for schema in schemas if isinstance(schema, dict)]
        self._nodes.update((id(schema), schema) for schema in found)
        return frozenset(map(id, found))

    def _flat(self, value: All) -> tuple[list[dict[str, Any]], list[frozenset[All]]]:
        """The schemas that apply to a value in any case, and the alternatives of which one does each time."""
        if value in self._known:
            return self._known[value]
        nodes, choices, left, seen = list[dict[str, Any]](), list[frozenset[All]](), list(value), set(value)
        while left:
            member = left.pop()
            if isinstance(member, frozenset):
                choices.append(member)
                continue
            node = self._nodes[member]
            nodes.append(node)
            new = set(self._all(*_list(node.get("allOf"))))
            if isinstance(node.get("$ref"), str):
                new |= self._all(self._target(node["$ref"]))
            for key in ("anyOf", "oneOf"):
                new |= _either(map(self._all, _list(node.get(key))))
            left += new - seen
            seen |= new
        self._known[value] = nodes, choices
        return nodes, choices

    def _target(self, reference: str) -> Any:
        found = self._root
        whole, mark, path = unquote(reference).partition("#")
        if whole or not mark or (path and path[0] != "/"):
            raise Unbounded("beside so many patterns, only references like #/$defs/name are taken")
        for part in path.split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list):
                found = found[int(part)] if part.isdecimal() and int(part) < len(found) else None
            else:
                found = _dict(found).get(part)
        return found  # nothing: the compiler says so

    def _keys(self, value: All) -> set[str | int | None]:
        """Names of properties and numbers of items that have a schema of their own; None and -1 for the others."""
        nodes, choices = self._flat(value)
        keys = set[str | int | None]()
        for option in itertools.chain(*choices):
            keys |= self._keys(option)
        for node in nodes:
            keys |= _dict(node.get("properties")).keys() | set(range(len(_prefix(node))))
            keys |= {None} if node.keys() & {"additionalProperties", "patternProperties"} else set()
            keys |= {-1} if node.keys() & {"items", "additionalItems"} else set()
        return keys

    def _child(self, value: All, key: str | int | None) -> All:
        """What applies to a property or an item."""
        nodes, choices = self._flat(value)
        found = set[Any]()
        for node in nodes:
            if isinstance(key, int):
                prefix, items = _prefix(node), node.get("items")
                rest = node.get("additionalItems") if isinstance(items, list) else items
                found |= self._all(prefix[key] if 0 <= key < len(prefix) else rest)
            else:
                found |= self._all(_dict(node.get("properties")).get(key, node.get("additionalProperties")))
                found |= _either(map(self._all, _dict(node.get("patternProperties")).values()))
        for choice in choices:
            found |= _either(self._child(option, key) for option in choice)
        return frozenset(found)


def _either(options: Iterable[All]) -> All:
    """One of these applies. An option that is a choice itself adds its own; what is left of a single one applies."""
    flat = set[All]()
    for option in options:
        (inner,) = option if len(option) == 1 else (None,)
        flat |= inner if isinstance(inner, frozenset) else {option}
    return frozenset({frozenset(flat)}) if len(flat) > 1 else flat.pop() if flat else frozenset()


def _weight(node: dict[str, Any]) -> int:
    pattern, format = node.get("pattern"), node.get("format")
    return (weight(pattern) if isinstance(pattern, str) else 1) * (FORMAT_WEIGHT if isinstance(format, str) else 1)


def dicts(value: Any, without: Container[str] = ()) -> Iterator[dict[str, Any]]:
    """All there are in it, but for what is under some names."""
    left = [value]
    while left:
        node = left.pop()
        if isinstance(node, dict):
            yield node
            left += [inside for key, inside in node.items() if key not in without]
        elif isinstance(node, list):
            left += node


def _prefix(node: dict[str, Any]) -> list[Any]:
    return _list(node.get("prefixItems")) or _list(node.get("items"))


def _dict(value: Any) -> dict[Any, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
