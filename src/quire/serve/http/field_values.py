"""The values that a field of a body takes, where these are a few words: tags that tell objects apart, and literals.

Asked for when a body had another. Refuses to know: any particular API.
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Iterator
from functools import cache
from typing import Any

import msgspec


def values_of(struct: type[msgspec.Struct], path: str) -> tuple[str, ...]:
    """Of the field at a path such as `messages[0].role`; none where any will do, or where it depends on the rest."""
    *parents, name = re.sub(r"\[\w*\]", "", path).split(".")
    hints: list[Any] = [struct]
    for parent in parents:
        hints = [hint for one in hints for hint in _fields(one, parent)]
    found = {values for one in hints if (values := (*_tags(one, name), *_literals(one, name)))}
    return found.pop() if len(found) == 1 else ()


def _tags(hint: Any, name: str) -> list[str]:
    return [str(one.__struct_config__.tag) for one in _structs(hint) if one.__struct_config__.tag_field == name]


def _literals(hint: Any, name: str) -> list[str]:
    parts = (part for field in _fields(hint, name) for part in _parts(field))
    words = (word for part in parts if typing.get_origin(part) is typing.Literal for word in typing.get_args(part))
    return [word for word in words if isinstance(word, str)]


def _fields(hint: Any, name: str) -> Iterator[Any]:
    for struct in _structs(hint):
        if name in struct.__struct_encode_fields__:
            yield _hints(struct)[struct.__struct_fields__[struct.__struct_encode_fields__.index(name)]]


def _structs(hint: Any) -> Iterator[type[msgspec.Struct]]:
    return (part for part in _parts(hint) if isinstance(part, type) and issubclass(part, msgspec.Struct))


def _parts(hint: Any) -> Iterator[Any]:
    """What a value may be, and what the items of a list may."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        for argument in arguments:
            yield from _parts(argument)
    elif origin in (typing.Annotated, list):
        yield from _parts(arguments[0])
    else:
        yield hint


@cache
def _hints(struct: type[msgspec.Struct]) -> dict[str, Any]:
    return typing.get_type_hints(struct, include_extras=True)
