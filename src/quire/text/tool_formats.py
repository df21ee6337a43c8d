"""How models write calls of tools, as data, and which way a chat template suggests.

    hermes   <tool_call>{"name": ..., "arguments": {...}}</tool_call>          Hermes, Qwen, and models without a way
    llama3   {"name": ..., "parameters": {...}}, also after <|python_tag|>     Llama 3; name.call(key="value") too
    mistral  [TOOL_CALLS][{"name": ..., "arguments": {...}}]                   Mistral; name[ARGS]{...} in newer ones

Refuses to know: how the text is read (tool_reader) and what the tools do.
"""

from __future__ import annotations

import json
import secrets
import string
from typing import Any, NamedTuple

from quire.types.errors import ConfigError


class ToolFormat(NamedTuple):
    name: str
    marker: str  # begins a call, or a list of them
    close: str = ""  # ends what the marker began
    bare: bool = False  # JSON at the beginning of an answer is a call without a marker
    headed: bool = False  # the name may stand before its arguments
    python: bool = False  # name.call(key="value") may follow the marker
    key: str = "arguments"
    id_length: int = 0  # templates of some models refuse ids of another length

    def call_id(self) -> str:
        if self.id_length:
            return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(self.id_length))
        return f"call_{secrets.token_hex(12)}"

    def spelled(self, name: str, arguments: Any) -> str:
        """A call as the model would write it."""
        call = json.dumps({"name": name, self.key: arguments}, ensure_ascii=False)
        if self.bare:
            return call
        return f"{self.marker}[{call}]" if self.headed else f"{self.marker}\n{call}\n{self.close}"


HERMES = ToolFormat("hermes", "<tool_call>", "</tool_call>")
LLAMA3 = ToolFormat("llama3", "<|python_tag|>", bare=True, python=True, key="parameters")
MISTRAL = ToolFormat("mistral", "[TOOL_CALLS]", headed=True, id_length=9)
FORMATS = {format.name: format for format in (HERMES, LLAMA3, MISTRAL)}


def choose_format(name: str, template: str) -> ToolFormat:
    """The format called `name`; `auto`: the one whose marks the template knows, else hermes."""
    if name in FORMATS:
        return FORMATS[name]
    if name != "auto":
        raise ConfigError(f"no tool parser {name!r}; there are auto, {', '.join(FORMATS)}")
    by_mark = {"<tool_call>": HERMES, "[TOOL_CALLS]": MISTRAL, "<|python_tag|>": LLAMA3, '"parameters": ': LLAMA3}
    return next((format for mark, format in by_mark.items() if mark in template), HERMES)
