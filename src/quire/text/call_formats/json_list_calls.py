"""Families that write a JSON list of calls between marks of their own.

<|tool_call|>[{"name": ..., "arguments": {...}}]<|/tool_call|>          Phi-4-mini; also functools[...]
<|tool_call|>[{"name": ..., "arguments": {...}}]                         Granite 3
<TOOLCALL>[{"name": ..., "arguments": {...}}]</TOOLCALL>                 Nemotron
<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": ..., "parameters": {...}}\n]<|END_ACTION|>     Command R7B, A
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from quire.text.call_formats.call_format import RuleWriter, embedded
from quire.text.call_formats.json_call import JsonFormat
from quire.text.tool_spec import Tool


class JsonListFormat(JsonFormat):
    separator = ", "
    lists = True

    def __init__(self, name: str, marks: tuple[str, ...], end: str = "", aliases: tuple[str, ...] = ()):
        self.name, self.marks, self.aliases = name, marks, aliases
        self.open, self.close = f"{marks[0]}[", f"]{end}"
        self.ends = (end,) if end else ()

    def suits(self, template: str) -> bool:
        return self.mark in template and all(end in template for end in self.ends)


class PhiFormat(JsonListFormat):
    def suits(self, template: str) -> bool:
        return "<|/tool|>" in template or super().suits(template)


class CohereFormat(JsonListFormat):
    """Calls are numbered, and what they return names the number."""

    name_key, key = "tool_name", "parameters"

    def __init__(self) -> None:
        super().__init__("cohere", ("<|START_ACTION|>",), "<|END_ACTION|>", ("command_r", "cohere_command3"))
        self.open, self.separator, self.close = "<|START_ACTION|>[\n    ", ",\n    ", "\n]<|END_ACTION|>"

    def spelled(self, *calls: tuple[str, Any]) -> str:
        numbered = [self._numbered(str(index), *call) for index, call in enumerate(calls)]
        return self.open + self.separator.join(numbered) + self.close

    def spell(self, name: str, arguments: Mapping[str, Any]) -> str:
        return self._numbered("0", name, arguments)

    def _numbered(self, id: str, name: str, arguments: Mapping[str, Any]) -> str:
        return json.dumps({"tool_call_id": id, "tool_name": name, "parameters": arguments}, ensure_ascii=False)

    def rule(self, tool: Tool, number: int, write: RuleWriter) -> str:
        properties = {
            "tool_call_id": {"type": "string", "pattern": "^[0-9]{1,3}$"},
            "tool_name": {"const": tool.name},
            "parameters": {"$ref": f"#/$defs/tool{number}"},
        }
        schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
        return write.json(embedded(tool, number, schema))


PHI4 = PhiFormat("phi4_mini_json", ("<|tool_call|>", "functools"), "<|/tool_call|>", ("phi4",))
GRANITE = JsonListFormat("granite", ("<|tool_call|>",))
NEMOTRON = JsonListFormat("nemotron_json", ("<TOOLCALL>",), "</TOOLCALL>")
COHERE = CohereFormat()
