"""Llama 3 (`{"name": ..., "parameters": {...}}`, also behind <|python_tag|>, there also `name.call(key="value")`)."""

from __future__ import annotations

from quire.text.call_formats.call_format import CallReader, Schemas
from quire.text.call_formats.json_call import JsonFormat
from quire.text.call_formats.python_call import PythonCall


class LlamaFormat(JsonFormat):
    name = "llama3"
    aliases = ("llama3_json", "llama4_json")
    separator = "; "
    marks = ("<|python_tag|>",)
    bare = "{["
    lists = True
    key = "parameters"

    def suits(self, template: str) -> bool:
        return "<|python_tag|>" in template or '"parameters": ' in template

    def call(self, index: int, tools: Schemas, text: str) -> CallReader | None:
        return super().call(index, tools, text) or PythonCall(index, tools)


LLAMA3 = LlamaFormat()
