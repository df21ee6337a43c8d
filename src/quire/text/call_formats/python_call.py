"""Calls as Python writes them: `name(key="value", other=[1, 2])`, of constants only.

An argument is let out when it is complete. Refuses to know: what stands around a call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Mapping
from typing import Any

from quire.text.call_formats.argument_rules import arguments_of, json_value, parameters_of
from quire.text.call_formats.argument_values import literal, types_of
from quire.text.call_formats.call_format import ANY_NAME, RuleWriter, Schemas, ToolFormat, quoted
from quire.text.segments import CallArguments, CallBegun, Segment
from quire.text.tool_spec import Tool

_HEAD = re.compile(r"\s*(?P<name>[A-Za-z_][\w.-]{0,127})\(")
_FIRST = re.compile(r"\s*(\)|[A-Za-z_]\w{0,127}\s*=(?!=))")
_KEY = re.compile(r"\s*(?P<key>[A-Za-z_]\w{0,127})\s*=\s*")
_BEGINNING = re.compile(r"\s*[A-Za-z_][\w.-]{0,127}(\(\s*([A-Za-z_]\w{0,127}\s*)?)?\Z|\s*\Z")


class PythonCall:
    def __init__(self, index: int, names: Container[str]):
        self.index = index
        self.raw = ""
        self.begun = self.done = self.failed = False
        self._names = names
        self._at = 0  # in raw: what is read
        self._start = 0  # ... where the argument under way begins
        self._depth = 0
        self._quote = ""
        self._escaped = False
        self._count = 0

    def push(self, text: str) -> tuple[list[Segment], str]:
        self.raw += text
        out: list[Segment] = []
        if not self.begun and not self._begin(out):
            return out, ""
        while self._at < len(self.raw) and not self.done and not self.failed:
            self._read(self.raw[self._at], out)
            self._at += 1
        if self.done:
            rest, self.raw = self.raw[self._at :], self.raw[: self._at]
            return out, rest
        return out, ""

    def _begin(self, out: list[Segment]) -> bool:
        head = _HEAD.match(self.raw)
        if head is None or _FIRST.match(self.raw, head.end()) is None:
            self.failed = _BEGINNING.match(self.raw) is None
            return False
        name = head["name"] if head["name"] in self._names else head["name"].removesuffix(".call")
        self.failed, self.begun = name not in self._names, name in self._names
        if self.begun:
            out.append(CallBegun(self.index, name))
        self._at = self._start = head.end()
        return self.begun

    def _read(self, character: str, out: list[Segment]) -> None:
        if self._quote:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == self._quote:
                self._quote = ""
        elif character in "\"'":
            self._quote = character
        elif character in "([{":
            self._depth += 1
        elif character in ")]}" and self._depth:
            self._depth -= 1
        elif character in ",)" and not self._depth:
            self._argument(self.raw[self._start : self._at], out)
            self._start = self._at + 1
            if character == ")":
                out.append(CallArguments(self.index, "}" if self._count else "{}"))
                self.done = True

    def _argument(self, source: str, out: list[Segment]) -> None:
        """One that is complete; what is no constant is a text."""
        if not source.strip():
            return
        match = _KEY.match(source)
        key, value = (match["key"], source[match.end() :]) if match else (f"argument_{self._count}", source)
        try:
            found = literal(value.strip())
        except (ValueError, RecursionError):
            found = value.strip()
        lead = ", " if self._count else "{"
        written = f"{json.dumps(key)}: {json.dumps(found, ensure_ascii=False)}"
        out.append(CallArguments(self.index, lead + written))
        self._count += 1


class PythonFormat(ToolFormat):
    lists = True

    def call(self, index: int, tools: Schemas, text: str) -> PythonCall | None:
        return PythonCall(index, tools) if text[0].isalpha() or text[0] == "_" else None

    def spell(self, name: str, arguments: Mapping[str, Any]) -> str:
        return f"{name}({', '.join(f'{key}={python_literal(value)}' for key, value in arguments.items())})"

    def rule(self, tool: Tool, number: int, write: RuleWriter) -> str:
        """Arguments in the order of the schema."""
        found = []
        for one in arguments_of(tool):
            if one.name is None:
                found.append((f'{write.rule(ANY_NAME, terminal=True)} "=" {write.json({})}', False))
            else:
                found.append((f"{quoted(one.name + '=')} {self._value(one.schema, tool, number, write)}", one.required))
        return write.rule(f"{quoted(tool.name + '(')} {write.listed(found, ', ')} {quoted(')')}")

    def _value(self, schema: Any, tool: Tool, number: int, write: RuleWriter) -> str:
        words = {"boolean": '"True" | "False"', "null": '"None"'}
        types = types_of(schema, parameters_of(tool))
        if types and types <= words.keys() and schema.keys().isdisjoint(("enum", "const")):
            return f"({' | '.join(words[one] for one in sorted(types))})"
        return json_value(schema, tool, number, write)


def python_literal(value: Any) -> str:
    """A JSON value as Python writes it, strings in JSON's quotes."""
    if isinstance(value, dict):
        return (
            "{" + ", ".join(f"{json.dumps(k, ensure_ascii=False)}: {python_literal(v)}" for k, v in value.items()) + "}"
        )
    if isinstance(value, list):
        return "[" + ", ".join(map(python_literal, value)) + "]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
