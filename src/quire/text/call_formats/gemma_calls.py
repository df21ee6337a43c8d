"""Gemma's own calls, strings between quote tokens, as they are, keys without quotes:

    <|tool_call>call:NAME{city:<|"|>Paris<|"|>,days:[1,2]}<tool_call|>                                    Gemma 4
    <start_function_call>call:NAME{city:<escape>Paris<escape>}<end_function_call>                        FunctionGemma

Gemma 3 has no marks of its own: it writes Python (`python_calls`) or JSON, as it is told to.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Mapping
from typing import Any

from quire.text.call_formats.argument_rules import arguments_of, json_value, parameters_of, text_value
from quire.text.call_formats.argument_values import types_of
from quire.text.call_formats.call_format import ANY_NAME, RuleWriter, Schemas, ToolFormat
from quire.text.segments import CallArguments, CallBegun, Segment, overlap
from quire.text.tool_spec import Tool

_HEAD = re.compile(r"\s*call:\s*(?P<name>[\w.-]{1,128})\s*\{")
_BEGINNING = re.compile(r"\s*(c|ca|cal|call|call:\s*[\w.-]{0,128}\s*)?\Z")
_SCALAR = frozenset({"integer", "number", "boolean", "null"})


class GemmaCall:
    def __init__(self, index: int, names: Container[str], quote: str):
        self.index = index
        self.raw = ""
        self.begun = self.done = self.failed = False
        self._names = names
        self._quote = quote
        self._at = self._start = 0
        self._depth = 0
        self._quoted = False
        self._count = 0

    def push(self, text: str) -> tuple[list[Segment], str]:
        self.raw += text
        out: list[Segment] = []
        if not self.begun:
            head = _HEAD.match(self.raw)
            if head is None or head["name"] not in self._names:
                self.failed = head is not None or _BEGINNING.match(self.raw) is None
                return out, ""
            self.begun = True
            out.append(CallBegun(self.index, head["name"]))
            self._at = self._start = head.end()
        while not self.done and self._at < len(self.raw) and self._read(out):
            pass
        if self.done:
            rest, self.raw = self.raw[self._at :], self.raw[: self._at]
            return out, rest
        return out, ""

    def _read(self, out: list[Segment]) -> bool:
        """The next character or quote; False: it is not all there."""
        if self.raw.startswith(self._quote, self._at):
            self._quoted = not self._quoted
            self._at += len(self._quote)
            return True
        if overlap(self.raw, self._quote) >= len(self.raw) - self._at:
            return False
        character = self.raw[self._at]
        self._at += 1
        if self._quoted:
            return True
        if character in "{[":
            self._depth += 1
        elif character in "}]" and self._depth:
            self._depth -= 1
        elif character in ",}" and not self._depth:
            self._argument(self.raw[self._start : self._at - 1], out)
            self._start = self._at
            if character == "}":
                out.append(CallArguments(self.index, "}" if self._count else "{}"))
                self.done = True
        return True

    def _argument(self, source: str, out: list[Segment]) -> None:
        if not source.strip():
            return
        key, _, value = source.partition(":")
        found = json.dumps(value_of(value, self._quote), ensure_ascii=False)
        name = json.dumps(key.strip().removeprefix(self._quote).removesuffix(self._quote), ensure_ascii=False)
        out.append(CallArguments(self.index, f"{', ' if self._count else '{'}{name}: {found}"))
        self._count += 1


def value_of(text: str, quote: str) -> Any:
    """A value in Gemma's notation; what cannot be read is a text."""
    parts = text.split(quote)
    strings: list[str] = parts[1::2]
    # Everything between strings is JSON but for the quotes of keys.
    written = ""
    for at, part in enumerate(parts):
        written += f'"\0{at // 2}"' if at % 2 else re.sub(r"([{,]\s*)([A-Za-z_][\w.-]*)\s*:", r'\1"\2":', part)
    try:
        return _filled(json.loads(written, strict=False), strings)
    except (ValueError, RecursionError):
        return text


def _filled(value: Any, strings: list[str]) -> Any:
    if isinstance(value, dict):
        return {_filled(key, strings): _filled(one, strings) for key, one in value.items()}
    if isinstance(value, list):
        return [_filled(one, strings) for one in value]
    return strings[int(value[1:])] if isinstance(value, str) and value.startswith("\0") else value


class GemmaFormat(ToolFormat):
    def __init__(self, name: str, begin: str, end: str, quote: str):
        self.name = name
        self.open, self.separator, self.close = begin, end + begin, end
        self.marks, self.ends, self.special = (begin,), (end,), (quote,)
        self._quote = quote

    def call(self, index: int, tools: Schemas, text: str) -> GemmaCall | None:
        return GemmaCall(index, tools, self._quote)

    def spell(self, name: str, arguments: Mapping[str, Any]) -> str:
        return f"call:{name}{self._written(arguments)}"

    def _written(self, value: Any) -> str:
        if isinstance(value, Mapping):
            return "{" + ",".join(f"{key}:{self._written(value[key])}" for key in sorted(value)) + "}"
        if isinstance(value, list):
            return "[" + ",".join(map(self._written, value)) + "]"
        return f"{self._quote}{value}{self._quote}" if isinstance(value, str) else json.dumps(value)

    def rule(self, tool: Tool, number: int, write: RuleWriter) -> str:
        any_value = self._any(write)
        found = []
        for one in sorted(arguments_of(tool), key=lambda one: one.name or "~"):
            name = write.rule(ANY_NAME, terminal=True) if one.name is None else write.text(one.name)
            types = types_of(one.schema, parameters_of(tool))
            if types == {"string"}:
                value = f"{write.text(self._quote)} {text_value(one.schema, tool, write, self._quote)}"
            else:
                value = json_value(one.schema, tool, number, write) if types and types <= _SCALAR else any_value
            found.append((f'{name} ":" {value}', one.required))
        return write.rule(f"{write.text(f'call:{tool.name}{{')} {write.listed(found, ',')} " + write.text("}"))

    def _any(self, write: RuleWriter) -> str:
        """Any value, however nested."""
        name = f"r{len(write.rules)}"
        write.rules.append("")
        text = f"{write.text(self._quote)} {write.until(self._quote)}"
        pair = write.rule(f'{write.rule(ANY_NAME, terminal=True)} ":" {name}')
        scalar = write.json({"type": sorted(_SCALAR)})
        many = f'"[" ({name} ("," {name})*)? "]" | "{{" ({pair} ("," {pair})*)? "}}"'
        write.rules[int(name[1:])] = f"{name}: {text} | {scalar} | {many}"
        return name


GEMMA4 = GemmaFormat("gemma4", "<|tool_call>", "<tool_call|>", '<|"|>')
FUNCTION_GEMMA = GemmaFormat("functiongemma", "<start_function_call>", "<end_function_call>", "<escape>")
