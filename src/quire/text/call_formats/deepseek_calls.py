"""DeepSeek: calls in a section, whose marks are special tokens (here <cb>, <c>, <sep>, </c>, </cb>).

<cb><c>function<sep>NAME\n```json\n{...}\n```</c>\n<c>...</c></cb>                                   V3, R1
<cb><c>NAME<sep>{...}</c><c>...</c></cb>                                                            V3.1
<DSMLfunction_calls>\n<DSMLinvoke name="NAME">\n<DSMLparameter name="KEY" string="true">VALUE</...>     V3.2
"""

from __future__ import annotations

import re

from quire.text.call_formats.json_call import HeadedFormat
from quire.text.call_formats.tagged_call import TaggedFormat, Tags

_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END, _SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_DSML = "｜DSML｜"


class DeepSeekV3Format(HeadedFormat):
    name = "deepseek_v3"
    aliases = ("deepseekv3",)
    open = _CALLS + _CALL
    separator = f"{_CALL_END}\n{_CALL}"
    close = _CALL_END + _CALLS_END
    marks = (_CALLS, _CALL)
    inner = (_CALL,)
    ends = ("```", _CALL_END, _CALLS_END)
    special = (_SEP,)
    before_name = f"function{_SEP}"
    after_name = "\n```json\n"
    foot = "\n```"
    head = re.compile(rf"\s*function{_SEP}\s*(?P<name>[\w.-]{{1,128}})\s*```json\s*(?={{)")

    def suits(self, template: str) -> bool:
        return _CALLS in template and "```json" in template


class DeepSeekV31Format(HeadedFormat):
    name = "deepseek_v31"
    aliases = ("deepseekv31",)
    open = _CALLS + _CALL
    separator = _CALL_END + _CALL
    close = _CALL_END + _CALLS_END
    marks = (_CALLS, _CALL)
    inner = (_CALL,)
    ends = (_CALL_END, _CALLS_END)
    special = (_SEP,)
    after_name = _SEP
    head = re.compile(rf"\s*(?P<name>[\w.-]{{1,128}})\s*{_SEP}\s*(?={{)")


class DeepSeekV32Format(TaggedFormat):
    name = "deepseek_v32"
    aliases = ("deepseekv32",)
    open = f"<{_DSML}function_calls>\n"
    separator = "\n"
    close = f"\n</{_DSML}function_calls>"
    marks = (f"<{_DSML}function_calls>", f"<{_DSML}invoke")
    kept = (f"<{_DSML}invoke",)
    ends = (f"</{_DSML}function_calls>",)
    special = (_DSML,)
    tags = Tags(
        head=re.compile(rf'\s*<{_DSML}invoke name="(?P<name>[^"\n]{{1,128}})">'),
        head_begin=f'<{_DSML}invoke name="',
        key=re.compile(rf'<{_DSML}parameter name="(?P<key>[^"\n]{{1,128}})" string="(?P<string>true|false)">'),
        key_begin=f'<{_DSML}parameter name="',
        value_end=f"</{_DSML}parameter>",
        end=f"</{_DSML}invoke>",
    )
    head_text = f'<{_DSML}invoke name="{{name}}">\n'
    key_text = f'<{_DSML}parameter name="{{key}}" string="{{string}}">'
    value_end = f"</{_DSML}parameter>\n"
    end_text = f"</{_DSML}invoke>"

    def suits(self, template: str) -> bool:
        return _DSML in template


DEEPSEEK_V3 = DeepSeekV3Format()
DEEPSEEK_V31 = DeepSeekV31Format()
DEEPSEEK_V32 = DeepSeekV32Format()
