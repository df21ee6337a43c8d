"""Fields that a body's struct does not have: renamed, left out and told of, or refused as what they must have meant.

Bodies are parsed by strict structs; only one that fails for an unknown field comes here, is rid of what nobody needs,
object by object as the struct's types say, and is parsed again. Values are never read, only moved. Refuses to know: any
particular API.
"""

from __future__ import annotations

import difflib
import re
import types
import typing
from functools import cache
from typing import Any, NamedTuple

import msgspec

from quire.serve.core.fields import fields_of
from quire.serve.core.known_extensions import ALIASES, KNOWN, MEANT
from quire.types.errors import InputError

MAX_NAMED = 32  # fields that the header names
_ALIKE = 0.84  # how like a field's name another must be to be taken for it
_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ARRAY = msgspec.json.Decoder(list[msgspec.Raw])
_TAG = msgspec.json.Decoder(str)
_UNPRINTABLE = re.compile(r"[^\x21-\x7e]|,")


class Shape(NamedTuple):
    """Where structs are in a type: what an object may be, and what the items of a list may."""

    objects: tuple[type[msgspec.Struct], ...] = ()
    items: Shape | None = None

    def or_(self, other: Shape) -> Shape:
        return Shape(self.objects + other.objects, self.items or other.items)


def shape_of(hint: Any) -> Shape:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return Shape((hint,))
    if origin is typing.Annotated:
        return shape_of(arguments[0])
    if origin in (typing.Union, types.UnionType):
        shape = Shape()
        for argument in arguments:
            shape = shape.or_(shape_of(argument))
        return shape
    return Shape(items=shape_of(arguments[0])) if origin is list else Shape()


@cache
def _shapes(struct: type[msgspec.Struct]) -> dict[str, Shape]:
    """By the name of a field in JSON."""
    hints = typing.get_type_hints(struct, include_extras=True)
    names = zip(struct.__struct_encode_fields__, struct.__struct_fields__, strict=True)
    return {outer: shape_of(hints[inner]) for outer, inner in names}


def without_unknown(body: bytes, struct: type[msgspec.Struct]) -> tuple[bytes, list[str]]:
    """(the body as its struct takes it, the fields left out); InputError for one that looks misspelled."""
    ignored: dict[str, None] = {}
    return _pruned(body.strip(), Shape((struct,)), "", ignored), list(ignored)


def _pruned(raw: bytes, shape: Shape, path: str, ignored: dict[str, None]) -> bytes:
    if raw[:1] == b"[" and shape.items is not None:
        items = [_pruned(bytes(item), shape.items, f"{path}[]", ignored) for item in _ARRAY.decode(raw)]
        return b"[%b]" % b",".join(items)
    if raw[:1] != b"{" or not shape.objects:
        return raw
    fields = _OBJECT.decode(raw)
    struct = _chosen(shape.objects, fields)
    if struct is None or not struct.__struct_config__.forbid_unknown_fields:
        return raw
    shapes, out = _shapes(struct), dict[str, bytes]()
    tag = struct.__struct_config__.tag_field
    for name, value in fields.items():
        where = f"{path}.{name}" if path else name
        if name in shapes or name == tag:
            out[name] = _pruned(bytes(value), shapes.get(name, Shape()), where, ignored)
        elif (alias := _alias(name, struct, fields)) is not None:
            if bytes(value) not in alias[1]:
                out[alias[0]] = bytes(value)
        else:
            if name not in KNOWN and (near := meant(name, struct)):
                raise InputError(
                    f"unknown field {where[:200]!r}; did you mean {near!r}?", param=where[:64], code="unknown_parameter"
                )
            if len(ignored) < MAX_NAMED:
                ignored[_UNPRINTABLE.sub("?", where)[:64]] = None
    return b"{%b}" % b",".join(msgspec.json.encode(name) + b":" + value for name, value in out.items())


def _chosen(structs: tuple[type[msgspec.Struct], ...], fields: dict[str, msgspec.Raw]) -> type[msgspec.Struct] | None:
    if len(structs) == 1:
        return structs[0]
    for struct in structs:
        config = struct.__struct_config__
        given = bytes(fields.get(config.tag_field or "", b""))
        if given[:1] == b'"' and _TAG.decode(given) == config.tag:
            return struct
    return None


def _alias(
    name: str, struct: type[msgspec.Struct], fields: dict[str, msgspec.Raw]
) -> tuple[str, tuple[bytes, ...]] | None:
    """(the name that this struct has for a field, values to leave out), unless that is given too."""
    for alias in ALIASES.get(name, ()):
        if alias.name in struct.__struct_encode_fields__ and alias.name not in fields:
            return alias.name, (b"null", *map(msgspec.json.encode, alias.neutral))
    return None


@cache
def _telling(struct: type[msgspec.Struct]) -> dict[str, str]:
    """Fields that change an answer, by their names without marks."""
    kinds = ("honoured", "extension")
    return {_bare(field.name): field.name for field in fields_of(struct) if field.kind in kinds}


def meant(name: str, struct: type[msgspec.Struct]) -> str | None:
    """The field that an unknown one was meant to be, if it looks like one that would change the answer."""
    if (same := next((other for other in MEANT.get(name, ()) if other in struct.__struct_fields__), None)) is not None:
        return same
    telling, bare = _telling(struct), _bare(name[:64])
    if bare in telling:
        return telling[bare]
    near = difflib.get_close_matches(bare, telling, n=1, cutoff=_ALIKE) if len(bare) > 3 else []
    return telling[near[0]] if near else None


def _bare(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")
