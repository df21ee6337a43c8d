"""Calls as JSON, read as they come: one object with the name and the arguments, or a name and the arguments alone.

Refuses to know: what stands around a call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Mapping
from typing import Any

from quire.text.call_formats.call_format import CallReader, RuleWriter, Schemas, ToolFormat, embedded, quoted
from quire.text.segments import CallArguments, CallBegun, Segment
from quire.text.tool_spec import Tool

MAX_HEAD = 256  # characters before the arguments
_NAMES = ("name", "tool_name")
_ARGUMENTS = ("arguments", "parameters")


class JsonCall:
    """One JSON object that should be a call, as it comes. With `name` given it is the arguments alone."""

    def __init__(self, index: int, names: Container[str], name: str = ""):
        self.raw = ""
        self.done = self.failed = False
        self.begun = bool(name)
        self.index = index
        self._names = names
        self._alone = bool(name)
        self._key = _ARGUMENTS[0] if name else ""
        self._depth = 0
        self._quoted = self._escaped = False
        self._start = 0  # in raw, of the key or value being read
        self._sent = 0  # characters of the arguments that are out
        self._early = ""  # arguments that came before the name

    def push(self, text: str) -> tuple[list[Segment], str]:
        """(what is new, what of `text` lies behind the end of the object)."""
        out: list[Segment] = []
        before = len(self.raw)
        self.raw += text
        for at in range(before, len(self.raw)):
            self._read(self.raw[at], at, out)
            if self.done or self.failed:
                rest, self.raw = self.raw[at + 1 :], self.raw[: at + 1]
                return out, rest
        self._stream(len(self.raw), out)
        return out, ""

    def _read(self, character: str, at: int, out: list[Segment]) -> None:
        if self._quoted:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._quoted = False
        elif character == '"':
            self._quoted = True
        elif character in "{[":
            self._depth += 1
            if self._depth == 1 and not self._alone:
                self._start = at + 1
        elif character in "}]":
            self._depth -= 1
            if self._depth == 0:
                self._close(at, out)
        elif self._depth == 1 and not self._alone and character in ":,":
            if character == ":":
                self._key = str(_loaded(self.raw[self._start : at]))
            else:
                self._value(at, out)
                self._key = ""
            self._start = at + 1

    def _close(self, at: int, out: list[Segment]) -> None:
        if self._alone:
            self._stream(at + 1, out)
        elif self._key:
            self._value(at, out)
        self.done, self.failed = self.begun, not self.begun
        if self.done and not self._sent:
            out.append(CallArguments(self.index, "{}"))

    def _value(self, at: int, out: list[Segment]) -> None:
        """The value of the current key ends before `at`."""
        if self._key in _NAMES and not self.begun:
            name = _loaded(self.raw[self._start : at])
            self.failed = not isinstance(name, str) or name not in self._names
            self.begun = not self.failed
            if self.begun:
                out.append(CallBegun(self.index, str(name)))
                self._send(self._early, out)
        elif self._key in _ARGUMENTS and not self._sent:
            part = self.raw[self._start : at].strip()
            if part.startswith('"'):  # JSON within a string
                part = str(_loaded(part))
            if self.begun:
                self._send(part, out)
            else:
                self._early = part
        else:
            self._stream(at, out)

    def _stream(self, end: int, out: list[Segment]) -> None:
        """Let out what is new of arguments under way. A string is understood only when complete."""
        if not self.begun or self._key not in _ARGUMENTS:
            return
        while self._start < end and self.raw[self._start].isspace():
            self._start += 1
        if self.raw[self._start : self._start + 1] != '"':
            self._send(self.raw[self._start + self._sent : end].rstrip(), out)

    def _send(self, text: str, out: list[Segment]) -> None:
        if text:
            out.append(CallArguments(self.index, text))
            self._sent += len(text)


class HeadedCall:
    """A call whose head (`head` has groups `name` and, maybe, `id`) stands before its arguments, which are JSON."""

    def __init__(self, index: int, names: Container[str], head: re.Pattern[str]):
        self.index = index
        self._names = names
        self._head = head
        self._read = ""
        self._arguments: JsonCall | None = None
        self._failed = False

    @property
    def raw(self) -> str:
        return self._read + (self._arguments.raw if self._arguments else "")

    @property
    def begun(self) -> bool:
        return self._arguments is not None

    @property
    def done(self) -> bool:
        return self._arguments is not None and self._arguments.done

    @property
    def failed(self) -> bool:
        return self._failed

    def push(self, text: str) -> tuple[list[Segment], str]:
        if self._arguments is not None:
            return self._arguments.push(text)
        self._read += text
        match = self._head.match(self._read[:MAX_HEAD])
        if match is None:
            self._failed = "{" in self._read or len(self._read) > MAX_HEAD
            return [], ""
        name, rest = match["name"], self._read[match.end() :]
        self._read = self._read[: match.end()]
        if name not in self._names:
            self._failed = True
            return [], rest
        self._arguments = JsonCall(self.index, self._names, name)
        segments, rest = self._arguments.push(rest)
        id = match.groupdict().get("id") or ""
        return [CallBegun(self.index, name, id), *segments], rest


class JsonFormat(ToolFormat):
    """Calls as `{"name": ..., "arguments": {...}}`, or with other words for these."""

    name_key = "name"
    key = "arguments"

    def call(self, index: int, tools: Schemas, text: str) -> CallReader | None:
        return JsonCall(index, tools) if text[0] == "{" else None

    def spell(self, name: str, arguments: Mapping[str, Any]) -> str:
        return json.dumps({self.name_key: name, self.key: arguments}, ensure_ascii=False)

    def rule(self, tool: Tool, number: int, write: RuleWriter) -> str:
        schema = {
            "type": "object",
            "properties": {self.name_key: {"const": tool.name}, self.key: {"$ref": f"#/$defs/tool{number}"}},
            "required": [self.name_key, self.key],
            "additionalProperties": False,
        }
        return write.json(embedded(tool, number, schema))


class HeadedFormat(ToolFormat):
    """A head with the name, then the arguments as JSON, then a foot."""

    before_name = ""
    after_name = ""
    foot = ""
    head: re.Pattern[str]

    def call(self, index: int, tools: Schemas, text: str) -> CallReader | None:
        return HeadedCall(index, tools, self.head)

    def spell(self, name: str, arguments: Mapping[str, Any]) -> str:
        return f"{self.before_name}{name}{self.after_name}{json.dumps(arguments, ensure_ascii=False)}{self.foot}"

    def rule(self, tool: Tool, number: int, write: RuleWriter) -> str:
        head = write.text(self.before_name + tool.name + self.after_name)
        foot = f" {quoted(self.foot)}" if self.foot else ""
        return f"{head} {write.json(embedded(tool, number))}{foot}"


def _loaded(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return None
