"""Qwen3-Coder and Qwen3.5:

<tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n</tool_call>
"""

from __future__ import annotations

import re

from quire.text.call_formats.tagged_call import TaggedFormat, Tags


class QwenCoderFormat(TaggedFormat):
    name = "qwen3_coder"
    aliases = ("qwen3_xml",)
    open = "<tool_call>\n"
    separator = "\n</tool_call>\n<tool_call>\n"
    close = "\n</tool_call>"
    marks = ("<tool_call>", "<function=")
    kept = ("<function=",)
    ends = ("</tool_call>",)
    tags = Tags(
        head=re.compile(r"\s*<function=(?P<name>[^>\n]{1,128})>"),
        head_begin="<function=",
        key=re.compile(r"<parameter=(?P<key>[^>\n]{1,128})>"),
        key_begin="<parameter=",
        value_end="</parameter>",
        end="</function>",
        trim=True,
    )
    head_text = "<function={name}>\n"
    key_text = "<parameter={key}>\n"
    value_end = "\n</parameter>\n"
    end_text = "</function>"

    def suits(self, template: str) -> bool:
        return "<function=" in template and "<parameter=" in template


QWEN_CODER = QwenCoderFormat()
