"""Calls whose arguments stand between tags, strings as they are (Qwen3-Coder, GLM-4.5, DeepSeek V3.2).

    <function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>

Strings are let out as they come; other values when they are complete. Refuses to know: what stands around a call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from quire.text.call_formats.argument_rules import arguments_of, is_text, json_value, text_value
from quire.text.call_formats.argument_values import property_of, typed, types_of
from quire.text.call_formats.call_format import ANY_NAME, RuleWriter, Schemas, ToolFormat
from quire.text.segments import CallArguments, CallBegun, Segment, overlap
from quire.text.tool_spec import Tool

MAX_HEAD = 256  # characters of a name with its tag
_STRING = frozenset({"string"})


class Tags(NamedTuple):
    head: re.Pattern[str]  # up to the first argument; has a group `name`
    head_begin: str  # what it begins with
    key: re.Pattern[str]  # up to a value; has a group `key`, maybe one `string`: whether the value is one
    key_begin: str
    value_end: str
    end: str
    trim: bool = False  # a line break on either side of a value is none of it
    end_kept: bool = False  # the end is not the call's own


class TaggedCall:
    def __init__(self, index: int, tools: Schemas, tags: Tags):
        self.index = index
        self.raw = ""
        self.begun = self.done = self.failed = False
        self._tools = tools
        self._tags = tags
        self._schema: Mapping[str, Any] = {}
        self._held = ""
        self._step = self._head
        self._count = 0  # arguments so far
        self._key, self._types = "", _STRING
        self._fresh = False  # the value has just begun

    def push(self, text: str) -> tuple[list[Segment], str]:
        out: list[str] = []
        segments: list[Segment] = []
        self._held += text
        begun = self.begun
        while not (self.done or self.failed) and self._step(out):
            pass
        if self.begun and not begun:
            segments.append(CallBegun(self.index, self._name))
        if out:
            segments.append(CallArguments(self.index, "".join(out)))
        rest = self._held if self.done else ""
        if not self.begun:
            self.raw = self._held
        return segments, rest

    def _head(self, out: list[str]) -> bool:
        match = self._tags.head.match(self._held[:MAX_HEAD])
        if match is None:
            begin = self._held.lstrip()[: len(self._tags.head_begin)]
            self.failed = not self._tags.head_begin.startswith(begin) or len(self._held) > MAX_HEAD
            return False
        self._name = match["name"].strip()
        if self._name not in self._tools:
            self.failed = True
            return False
        self._schema = self._tools[self._name]
        self.begun = True
        self._held, self._step = self._held[match.end() :], self._between
        return True

    def _between(self, out: list[str]) -> bool:
        """Behind the head or an argument."""
        tags, text = self._tags, self._held.lstrip()
        if text.startswith(tags.end):
            self._held = text if tags.end_kept else text[len(tags.end) :]
            out.append("}" if self._count else "{}")
            self.done = True
            return False
        if match := tags.key.match(text):
            self._held, self._step, self._fresh = text[match.end() :], self._value, True
            self._key = match["key"].strip()
            self._types = types_of(property_of(self._schema, self._key), self._schema)
            if (string := match.groupdict().get("string")) is not None:
                self._types = _STRING if string == "true" else self._types - _STRING
            out.append(("{" if not self._count else ", ") + json.dumps(self._key, ensure_ascii=False) + ": ")
            self._count += 1
            if self._types == _STRING:
                out.append('"')
            return True
        waits = any(mark.startswith(text) for mark in (tags.end, tags.key_begin))
        if waits or (text.startswith(tags.key_begin) and len(text) < MAX_HEAD):
            return False
        # Neither an argument nor the end: it is over, and what follows is text.
        out.append("}" if self._count else "{}")
        self.done = True
        return False

    def _value(self, out: list[str]) -> bool:
        trim, end = self._tags.trim, self._tags.value_end
        if trim and self._fresh:
            if not self._held:
                return False
            self._held = self._held.removeprefix("\n")
        self._fresh = False
        value, found, rest = self._held.partition(end)
        if found:
            if trim:
                value = value.removesuffix("\n")
            if self._types == _STRING:
                out.append(_escaped(value) + '"')
            else:
                out.append(json.dumps(typed(value, self._types), ensure_ascii=False))
            self._held, self._step = rest, self._between
            return True
        if self._types == _STRING:
            keep = overlap(value, end)
            if trim and value[: len(value) - keep].endswith("\n"):
                keep += 1
            out.append(_escaped(value[: len(value) - keep]))
            self._held = value[len(value) - keep :]
        return False


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


class TaggedFormat(ToolFormat):
    """`argument` and `call_text` are written with `{name}`, `{key}` and `{value}` filled in."""

    tags: Tags
    head_text = ""  # {name}
    key_text = ""  # {key}; {string} where the format tells strings
    value_end = ""  # with what follows a value
    end_text = ""

    def call(self, index: int, tools: Schemas, text: str) -> TaggedCall | None:
        return TaggedCall(index, tools, self.tags)

    def spell(self, name: str, arguments: Mapping[str, Any]) -> str:
        written = [self.head_text.replace("{name}", name)]
        for key, value in arguments.items():
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            written.append(self._key(key, isinstance(value, str)) + text + self.value_end)
        return "".join(written) + self.end_text

    def _key(self, key: str, string: bool) -> str:
        return self.key_text.replace("{key}", key).replace("{string}", "true" if string else "false")

    def rule(self, tool: Tool, number: int, write: RuleWriter) -> str:
        parts = [write.text(self.head_text.replace("{name}", tool.name))]
        for one in arguments_of(tool):
            text = is_text(one.schema, tool)
            if one.name is None:  # any argument
                head, tail = self._key("\0", True).split("\0")
                name = write.rule(ANY_NAME, terminal=True)
                part = f"({write.text(head)} {name} {write.text(tail)} {write.until(self.value_end)})*"
            elif text:
                part = f"{write.text(self._key(one.name, True))} {text_value(one.schema, tool, write, self.value_end)}"
            else:
                value = json_value(one.schema, tool, number, write)
                part = f"{write.text(self._key(one.name, False))} {value} {write.text(self.value_end)}"
            parts.append(part if one.required or one.name is None else f"({part})?")
        if self.end_text:
            parts.append(write.text(self.end_text))
        return write.rule(" ".join(parts))
