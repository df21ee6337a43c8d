"""Families that write calls as Python.

<|tool_call_start|>[name(key="value")]<|tool_call_end|>                                                LFM2
<function_calls>\nname(key="value")\n</function_calls>                                                  OLMo 3
[name(key="value"), other()]                                                     Llama 4, Llama 3.2, Gemma 3
```tool_code\nname(key="value")\n```                                                       Gemma 3, where so told
"""

from __future__ import annotations

from quire.text.call_formats.python_call import PythonFormat


class Lfm2Format(PythonFormat):
    name = "lfm2"
    open, separator, close = "<|tool_call_start|>[", ", ", "]<|tool_call_end|>"
    marks = ("<|tool_call_start|>",)
    ends = ("<|tool_call_end|>",)


class Olmo3Format(PythonFormat):
    name = "olmo3"
    open, separator, close = "<function_calls>", "\n", "</function_calls>"
    marks = ("<function_calls>",)
    repeats = True
    ends = ("</function_calls>",)

    def suits(self, template: str) -> bool:
        return "<function_calls>" in template


class PythonicFormat(PythonFormat):
    """An answer that is a list of calls, in a block of code or not."""

    name = "pythonic"
    aliases = ("llama4_pythonic", "gemma", "gemma3")
    open, separator, close = "[", ", ", "]"
    marks = ("```tool_code", "<|python_start|>")
    ends = ("```", "<|python_end|>")
    bare = "["

    def suits(self, template: str) -> bool:
        return "<|python_start|>" in template or "tool_code" in template


LFM2 = Lfm2Format()
OLMO3 = Olmo3Format()
PYTHONIC = PythonicFormat()
