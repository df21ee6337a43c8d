"""Kimi K2: calls in a section, each with the id that its answer is to name.

<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>
<|tool_calls_section_end|>
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from quire.text.call_formats.call_format import RuleWriter, embedded
from quire.text.call_formats.json_call import HeadedFormat
from quire.text.tool_spec import Tool

_CALL, _ARGUMENTS, _CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"


class KimiFormat(HeadedFormat):
    name = "kimi_k2"
    open = f"<|tool_calls_section_begin|>{_CALL}"
    separator = _CALL_END + _CALL
    close = f"{_CALL_END}<|tool_calls_section_end|>"
    marks = ("<|tool_calls_section_begin|>", _CALL)
    inner = (_CALL,)
    ends = (_CALL_END, "<|tool_calls_section_end|>")
    special = (_ARGUMENTS,)
    before_name = "functions."
    head = re.compile(
        rf"\s*(?P<id>(?:functions\.)?(?P<name>[\w.-]{{1,128}})(?::\d{{1,9}})?)\s*{re.escape(_ARGUMENTS)}\s*(?={{)"
    )

    def call_id(self, name: str, index: int) -> str:
        return f"functions.{name}:{index}"

    def spelled(self, *calls: tuple[str, Any]) -> str:
        numbered = [self._numbered(name, index, arguments) for index, (name, arguments) in enumerate(calls)]
        return self.open + self.separator.join(numbered) + self.close

    def spell(self, name: str, arguments: Mapping[str, Any]) -> str:
        return self._numbered(name, 0, arguments)

    def _numbered(self, name: str, index: int, arguments: Mapping[str, Any]) -> str:
        return super().spell(f"{name}:{index}{_ARGUMENTS}", arguments)

    def rule(self, tool: Tool, number: int, write: RuleWriter) -> str:
        count = write.rule("/[0-9]{1,3}/", terminal=True)
        head = f"{write.text(f'functions.{tool.name}:')} {count} {write.text(_ARGUMENTS)}"
        return f"{head} {write.json(embedded(tool, number))}"


KIMI = KimiFormat()
