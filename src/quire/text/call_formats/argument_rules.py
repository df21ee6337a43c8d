"""Rules for the arguments of a call, one by one, for formats that do not write them as one JSON object.

Declared arguments come in the order of the schema. A string is text up to what closes it, any other value is JSON.
Refuses to know: formats.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from quire.text.call_formats.argument_values import resolved, types_of
from quire.text.call_formats.call_format import ANY_TEXT, RuleWriter, embedded
from quire.text.tool_spec import Tool
from quire.types.errors import InputError

# What a schema of arguments may say beside its properties: the rest would hold for several of them together.
_SAYABLE = {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "title", "description"}
_SAYABLE |= {"$schema", "$id", "examples", "default", "x-quire-closed"}


class Argument(NamedTuple):
    name: str | None  # None: any other argument, any number of times
    schema: Any
    required: bool = False


def arguments_of(tool: Tool) -> Iterator[Argument]:
    """What a call of the tool may be given, in order."""
    schema = parameters_of(tool)
    if unsayable := sorted(schema.keys() - _SAYABLE):
        raise InputError(
            f"the parameters of {tool.name} have {unsayable[0]!r}, which calls in this model's format cannot keep to",
            param="tools",
            code="invalid_grammar",
        )
    properties = schema.get("properties")
    declared = properties if isinstance(properties, Mapping) else {}
    required = schema.get("required") or ()
    for name, one in declared.items():
        yield Argument(name, one, name in required)
    open_by_default = not tool.closed or properties is None
    if schema.get("additionalProperties", open_by_default):
        yield Argument(None, True)


def parameters_of(tool: Tool) -> dict[str, Any]:
    return (tool.parameters or {"type": "object", "properties": {}}) if tool.bound else {"type": "object"}


def is_text(schema: Any, tool: Tool) -> bool:
    """Whether an argument is written as text: it may be a string, or anything."""
    types = types_of(schema, parameters_of(tool))
    return not types or "string" in types


def json_value(schema: Any, tool: Tool, number: int, write: RuleWriter) -> str:
    """An argument as JSON."""
    made = _moved_into(schema, number) if isinstance(schema, Mapping) else {}
    return write.json(embedded(tool, number, made))


def text_value(schema: Any, tool: Tool, write: RuleWriter, close: str) -> str:
    """An argument as its own text, and what closes it."""
    while isinstance(schema, Mapping) and isinstance(reference := schema.get("$ref"), str):
        schema = resolved(reference, parameters_of(tool))
    schema = schema if isinstance(schema, Mapping) else {}
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list) and values and all(isinstance(value, str) for value in values):
        return f"({' | '.join(write.text(value) for value in values)}) {write.text(close)}"
    return write.until(close, _string_terminal(schema))


def _moved_into(schema: Any, number: int) -> Any:
    """A part of a tool's schema whose references are to lie in the definition of that tool."""
    if isinstance(schema, dict):
        moved = {key: _moved_into(value, number) for key, value in schema.items()}
        if isinstance(reference := schema.get("$ref"), str) and reference.startswith("#"):
            moved["$ref"] = f"#/$defs/tool{number}{reference[1:]}"
        return moved
    return [_moved_into(item, number) for item in schema] if isinstance(schema, list) else schema


def _string_terminal(schema: Mapping[str, Any]) -> str:
    """A terminal for the characters of a string that a schema describes."""
    text = ANY_TEXT
    low, high = schema.get("minLength", 0), schema.get("maxLength")
    if low or high is not None:
        text = rf"/(.|\n){{{low},{'' if high is None else high}}}/"
    if isinstance(pattern := schema.get("pattern"), str):
        text = f"{text} & {_pattern(pattern)}"
    return text


def _pattern(pattern: str) -> str:
    """A pattern of JSON Schema, which may match anywhere, as one for the whole text."""
    begin = "" if pattern.startswith("^") else r"(.|\n)*"
    end = "" if re.search(r"(?<!\\)(\\\\)*\$$", pattern) else r"(.|\n)*"
    body = pattern.removeprefix("^")
    body = body[:-1] if not end else body
    return "/" + begin + "(" + re.sub(r"(?<!\\)/", r"\/", body) + ")" + end + "/"
