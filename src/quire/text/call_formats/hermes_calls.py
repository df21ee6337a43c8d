"""Hermes, Qwen 2.5 and 3, SmolLM3, Granite 4, and models without a way of their own:

<tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>
"""

from __future__ import annotations

from quire.text.call_formats.json_call import JsonFormat


class HermesFormat(JsonFormat):
    name = "hermes"
    aliases = ("qwen", "qwen25", "granite4")
    open = "<tool_call>\n"
    separator = "\n</tool_call>\n<tool_call>\n"
    close = "\n</tool_call>"
    marks = ("<tool_call>",)
    ends = ("</tool_call>",)


HERMES = HermesFormat()
