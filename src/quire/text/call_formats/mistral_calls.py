"""Mistral: a list of calls behind [TOOL_CALLS], and in newer models the name before its arguments.

[TOOL_CALLS][{"name": ..., "arguments": {...}}]               [TOOL_CALLS]name[ARGS]{...}[TOOL_CALLS]name[ARGS]{...}
"""

from __future__ import annotations

import re
import secrets
import string

from quire.text.call_formats.call_format import CallReader, Schemas
from quire.text.call_formats.json_call import HeadedCall, HeadedFormat, JsonCall, JsonFormat

_HEAD = re.compile(r"\s*(?P<name>[\w.-]{1,128})\s*(?:\[CALL_ID\]\s*(?P<id>\w{1,64})\s*)?(?:\[ARGS\]\s*)?(?={)")
_ID_LENGTH = 9  # templates refuse others


def _call_id() -> str:
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(_ID_LENGTH))


class MistralFormat(JsonFormat):
    name = "mistral"
    open = "[TOOL_CALLS]["
    separator = ", "
    close = "]"
    marks = ("[TOOL_CALLS]",)
    lists = True

    def call_id(self, name: str, index: int) -> str:
        return _call_id()

    def call(self, index: int, tools: Schemas, text: str) -> CallReader | None:
        return JsonCall(index, tools) if text[0] == "{" else HeadedCall(index, tools, _HEAD)


class MistralArgsFormat(HeadedFormat):
    name = "mistral_args"
    open = separator = "[TOOL_CALLS]"
    marks = ("[TOOL_CALLS]",)
    special = ("[ARGS]", "[CALL_ID]")
    lists = True
    after_name = "[ARGS]"

    def suits(self, template: str) -> bool:
        return "[TOOL_CALLS]" in template and "[ARGS]" in template

    call_id = MistralFormat.call_id
    call = MistralFormat.call


MISTRAL = MistralFormat()
MISTRAL_ARGS = MistralArgsFormat()
