"""Tools offered to a model: how it is told of them, and grammars that make it call them.

Refuses to know: how answers are read (tool_reader), who offers the tools.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from quire.text.tool_formats import ToolFormat
from quire.types.errors import InputError
from quire.types.grammar import CLOSED, GrammarSpec

MAX_CALLS = 16  # in one answer whose calls are required

# A forced answer is nothing but JSON: one call or a list of them.
FORCED = ToolFormat("forced", "", bare=True)


class Tool(msgspec.Struct, kw_only=True):
    """A function the model may ask its caller to run."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = {}
    strict: bool = False
    takes_text: bool = False  # its one argument is a text (text_inputs.py)
    grammar: GrammarSpec | None = None  # ... which keeps to this, where the tool must be called and no other may be
    closed: bool = True  # bound by its schema wherever calls are, and no other arguments than those declared
    bound: bool = True  # whether its schema can be kept to

    def described(self) -> dict[str, Any]:
        """As chat templates expect it."""
        parameters = self.parameters or {"type": "object", "properties": {}}
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": parameters},
        }


def forced_grammar(tools: Sequence[Tool], format: ToolFormat, *, parallel: bool) -> GrammarSpec:
    """One call of one of the tools, or with `parallel` a list of calls, as JSON."""
    calls = [_call_schema(tool, format.key, number) for number, tool in enumerate(tools)]
    one: dict[str, Any] = calls[0] if len(calls) == 1 else {"anyOf": calls}
    root = {"type": "array", "items": one, "minItems": 1, "maxItems": MAX_CALLS} if parallel else dict(one)
    root["$defs"] = {f"tool{number}": _parameters(tool, number) for number, tool in enumerate(tools)}
    return GrammarSpec("json_schema", json.dumps(root))


def strict_grammar(
    tools: Sequence[Tool], format: ToolFormat, marker_id: int | None = None, answer: GrammarSpec | None = None
) -> GrammarSpec:
    """Free text (or `answer`), or calls in the model's own format, their arguments bound by the tools'
    schemas. `marker_id` is that of the format's marker where it is a special token, which no text spells."""
    rules = []
    for number, tool in enumerate(tools):
        schema = _call_schema(tool, format.key, number)
        schema["$defs"] = {f"tool{number}": _parameters(tool, number)}
        rules.append(f"call{number}: %json {json.dumps(schema)}")
    one = f"({' | '.join(f'call{number}' for number in range(len(tools)))})"
    calls = f'"[" {one} (", " {one})* "]"' if format.headed else f"SPACE {one} SPACE {json.dumps(format.close)}"
    rules += [f"calls: {one if format.bare else calls}", r"SPACE: /[ \n]{0,2}/"]
    marker = "".join("\\" + c if c in "[]|/" else c for c in format.marker)
    # Of a format without a marker, an answer that begins as JSON is a call.
    text = r"([^{\[\s](.|\n)*)?" if format.bare else r"(.|\n)*"
    if answer is not None:
        if answer.kind not in ("json_object", "json_schema"):
            raise InputError(f"tools and a constraint of kind {answer.kind} cannot be combined", param="tools")
        rules.append("answer: %json " + (answer.source or '{"type": "object"}'))
        mark = json.dumps(format.marker) if marker_id is None else f"<[{marker_id}]>"
        rules.append(f"start: answer | {'' if format.bare else mark + ' '}calls")
    elif marker_id is None:
        rules += ["opened: before calls", f"before[lazy]: /{text}{marker}/"]
    else:
        rules.append(f"opened: TEXT? <[{marker_id}]> calls")
    if answer is None:
        rules.append("start: calls | opened | TEXT" if format.bare else "start: opened* TEXT?")
        rules.append(rf"TEXT: /{text}/ & ~/(.|\n)*{marker}(.|\n)*/")
    return GrammarSpec("lark", "\n".join(rules))


def parameters_grammar(tool: Tool) -> GrammarSpec:
    """The arguments of a call alone."""
    return GrammarSpec("json_schema", json.dumps({"$ref": "#/$defs/tool0", "$defs": {"tool0": _parameters(tool, 0)}}))


def _call_schema(tool: Tool, key: str, number: int) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": tool.name}, key: {"$ref": f"#/$defs/tool{number}"}},
        "required": ["name", key],
        "additionalProperties": False,
    }


def _parameters(tool: Tool, number: int) -> Any:
    if not tool.bound:
        return {"type": "object"}
    schema = {CLOSED: tool.closed} | (tool.parameters or {"type": "object", "properties": {}})
    alone = {key: value for key, value in schema.items() if key not in ("$id", "$schema")}  # it is part of another now
    return _moved(alone, f"#/$defs/tool{number}", 64)


def _moved(schema: Any, base: str, depth: int) -> Any:
    """The schema with its references to itself pointing to where it now lies."""
    if depth == 0:
        raise InputError("a tool's parameters are nested too deeply", param="tools")
    if isinstance(schema, dict):
        moved = {key: _moved(value, base, depth - 1) for key, value in schema.items()}
        if isinstance(reference := schema.get("$ref"), str) and reference.startswith("#"):
            moved["$ref"] = base + reference[1:]
        return moved
    return [_moved(item, base, depth - 1) for item in schema] if isinstance(schema, list) else schema


def spell_out(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], format: ToolFormat
) -> list[dict[str, Any]]:
    """The conversation for a template that knows no tools: they are described in the system message, calls are
    written as the model is asked to write them, and results come from the user."""
    out: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            out.append({"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"})
            continue
        plain = {key: value for key, value in message.items() if key != "tool_calls"}
        for call in message.get("tool_calls") or ():
            spelled = format.spelled(call["function"]["name"], call["function"]["arguments"])
            plain["content"] = f"{plain['content']}\n{spelled}" if plain["content"] else spelled
        out.append(plain)
    if tools:
        system = _introduction(tools, format)
        if out and out[0]["role"] == "system":
            out[0]["content"] = f"{out[0]['content']}\n\n{system}"
        else:
            out.insert(0, {"role": "system", "content": system})
    return out


def _introduction(tools: Sequence[Mapping[str, Any]], format: ToolFormat) -> str:
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    example = format.spelled("the function's name", {"parameter": "value"})
    return (
        f"You can call these functions, each described by its name and the JSON schema of its parameters:\n{lines}\n\n"
        f"To call a function, answer with\n{example}\nand nothing else. What it returns follows between "
        "<tool_response> and </tool_response>. If no function helps, answer in plain words."
    )
