"""GLM-4.5 and later:

<tool_call>NAME\n<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n</tool_call>              4.7: no line breaks
"""

from __future__ import annotations

import re

from quire.text.call_formats.tagged_call import TaggedFormat, Tags


class GlmFormat(TaggedFormat):
    name = "glm45"
    aliases: tuple[str, ...] = ("glm",)
    open = "<tool_call>"
    separator = "</tool_call>\n<tool_call>"
    close = "</tool_call>"
    marks = ("<tool_call>",)
    ends = ("</tool_call>",)
    special = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    tags = Tags(
        head=re.compile(r"\s*(?P<name>[\w.-]{1,128})\s*(?=<)"),
        head_begin="",
        key=re.compile(r"<arg_key>(?P<key>[^<]{1,128})</arg_key>\s*<arg_value>"),
        key_begin="<arg_key>",
        value_end="</arg_value>",
        end="</tool_call>",
        end_kept=True,
    )
    head_text = "{name}\n"
    key_text = "<arg_key>{key}</arg_key>\n<arg_value>"
    value_end = "</arg_value>\n"

    def suits(self, template: str) -> bool:
        return "<arg_key>" in template and "</arg_value>" in template


class Glm47Format(GlmFormat):
    name = "glm47"
    aliases = ()
    separator = "</tool_call><tool_call>"
    head_text = "{name}"
    key_text = "<arg_key>{key}</arg_key><arg_value>"
    value_end = "</arg_value>"

    def suits(self, template: str) -> bool:
        return super().suits(template) and "</arg_key><arg_value>" in template


GLM = GlmFormat()
GLM47 = Glm47Format()
