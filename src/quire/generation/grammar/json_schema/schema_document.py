"""A schema document: its dialect, the schemas in it, and what references in it point to.

Knows: `$id`, `$anchor`, `$ref`, JSON pointers. Refuses to know: what other keywords mean, documents elsewhere.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

Node = dict[str, Any]

ONE = ("not", "if", "then", "else", "additionalProperties", "propertyNames", "contains", "additionalItems",
       "unevaluatedItems", "unevaluatedProperties")  # fmt: skip
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
MAPS = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
OLD_DRAFTS = ("draft-03", "draft-04", "draft-06", "draft-07")


class SchemaRefusal(Exception):
    """A schema that cannot be kept to, with the reason."""


def subschemas(node: Node) -> list[Any]:
    """Those directly in a schema, wherever a keyword has one."""
    found = [node[key] for key in ONE if key in node]
    for key in LISTS:
        found += node[key] if isinstance(node.get(key), list) else []
    for key in MAPS:
        found += node[key].values() if isinstance(node.get(key), dict) else []
    items = node.get("items")
    found += items if isinstance(items, list) else [items] if items is not None else []
    if isinstance(node.get("dependencies"), dict):
        found += [value for value in node["dependencies"].values() if not isinstance(value, list)]
    return found


class Document:
    def __init__(self, root: Any):
        self.root = root
        self.old = isinstance(root, dict) and any(draft in str(root.get("$schema", "")) for draft in OLD_DRAFTS)
        self.evaluates = False  # whether anything depends on what other schemas have looked at
        self._bases: dict[int, str] = {}  # of schemas
        self._resources: dict[str, Any] = {"": root}
        self._anchors: dict[tuple[str, str], Node] = {}
        self._dynamic: dict[str, list[Node]] = {}
        self._index(root, "")

    def _index(self, root: Any, base: str) -> None:
        left = [(root, base)]
        while left:
            node, base = left.pop()
            if not isinstance(node, dict) or id(node) in self._bases:
                continue
            base = self._enter(node, base)
            left += [(inner, base) for inner in subschemas(node)]

    def _enter(self, node: Node, base: str) -> str:
        name = node.get("$id", node.get("id") if self.old else None)
        if isinstance(name, str) and not (self.old and "$ref" in node):
            whole, fragment = (base, name[1:]) if name.startswith("#") else urldefrag(urljoin(base, name))
            if whole != base or not fragment:
                base = whole
                self._resources[base] = node
            if fragment:
                self._anchors[base, fragment] = node
        self._bases[id(node)] = base
        self.evaluates = self.evaluates or "unevaluatedItems" in node or "unevaluatedProperties" in node
        for key in ("$anchor", "$dynamicAnchor"):
            if isinstance(anchor := node.get(key), str):
                self._anchors[base, anchor] = node
                if key == "$dynamicAnchor":
                    self._dynamic.setdefault(anchor, []).append(node)
        return base

    def target(self, node: Node, reference: Any) -> Any:
        """What a `$ref` in a schema points to."""
        if not isinstance(reference, str):
            raise SchemaRefusal(f"$ref must be a string, not {reference!r}")
        base = self._bases.get(id(node), "")
        # Within the document: Python joins nothing to a name without a path (a URN).
        whole, fragment = (base, reference[1:]) if reference[:1] == "#" else urldefrag(urljoin(base, reference))
        fragment = unquote(fragment)
        if whole not in self._resources:
            raise SchemaRefusal(f"what {reference} points to is not in the schema, and nothing is retrieved")
        if fragment and not fragment.startswith("/"):
            if (whole, fragment) not in self._anchors:
                raise SchemaRefusal(f"there is no $anchor {fragment!r} in the schema")
            return self._anchors[whole, fragment]
        return self._pointed(self._resources[whole], fragment, whole, reference)

    def _pointed(self, found: Any, pointer: str, base: str, reference: str) -> Any:
        for part in pointer.split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and id(found) in self._bases:
                base = self._bases[id(found)]
            if isinstance(found, list) and part.isdecimal() and int(part) < len(found):
                found = found[int(part)]
            elif isinstance(found, dict) and part in found:
                found = found[part]
            else:
                raise SchemaRefusal(f"there is nothing at {reference} in the schema")
        if isinstance(found, dict) and id(found) not in self._bases:
            self._index(found, base)
        return found

    def dynamic_target(self, node: Node, reference: Any) -> Any:
        """What a `$dynamicRef` points to, where that does not depend on the way there."""
        anchor = str(reference).rpartition("#")[2]
        static = self.target(node, reference)
        if not isinstance(static, dict) or static.get("$dynamicAnchor") != anchor or len(self._dynamic[anchor]) == 1:
            return static
        raise SchemaRefusal(f"$dynamicRef {reference} may point to several schemas")
