"""What chat bodies consist of: messages, tools and their choice, formats of answers. Refuses to know: the bodies."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from quire.serve.core.fields import JsonSchema, ToolName, extension
from quire.serve.core.turns import plain_call
from quire.serve.openai.custom_tools import custom_tool
from quire.text import Tool
from quire.text.text_inputs import INPUT


class TextPart(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="text"):
    text: str


class RefusalPart(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="refusal"):
    refusal: str


def joined(content: str | list[Any] | None) -> str:
    """Content as chat templates want it: one text."""
    if isinstance(content, list):
        return "\n".join(part.text if hasattr(part, "text") else part.refusal for part in content)
    return content or ""


class _Message(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="role"):
    def plain(self) -> dict[str, Any]:
        """As chat templates want it, with the role they know."""
        role = str(self.__struct_config__.tag)
        message = {"role": "system" if role == "developer" else role, "content": joined(getattr(self, "content", ""))}
        if name := getattr(self, "name", None):
            message["name"] = name
        return message


class SystemMessage(_Message, tag="system"):
    content: str | list[TextPart]
    name: str | None = None


class DeveloperMessage(SystemMessage, tag="developer"):
    pass


class UserMessage(SystemMessage, tag="user"):
    pass


class CalledFunction(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    arguments: str


class ToolCall(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="function"):
    """A call, in a conversation that is sent back and in an answer."""

    id: str
    function: CalledFunction

    def plain(self) -> dict[str, Any]:
        return plain_call(self.id, self.function.name, self.function.arguments)


class CalledCustom(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    input: str


class CustomToolCall(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="custom"):
    """... of a custom tool, whose input is plain text."""

    id: str
    custom: CalledCustom

    def plain(self) -> dict[str, Any]:
        return plain_call(self.id, self.custom.name, {INPUT: self.custom.input})


class AssistantMessage(_Message, tag="assistant"):
    content: str | list[TextPart | RefusalPart] | None = None
    reasoning_content: Annotated[str, extension("thoughts, as answers bring them")] | None = None
    reasoning: Annotated[str, extension("the same under its other name")] | None = None
    name: str | None = None
    refusal: str | None = None
    annotations: Annotated[list[Any], Meta(max_length=0)] | None = None
    audio: None = None
    tool_calls: list[ToolCall | CustomToolCall] | None = None
    function_call: None = None

    def plain(self) -> dict[str, Any]:
        message = super().plain()
        if self.refusal and not message["content"]:
            message["content"] = self.refusal
        if thought := self.reasoning_content or self.reasoning:
            message["reasoning_content"] = thought
        if self.tool_calls:
            message["tool_calls"] = [call.plain() for call in self.tool_calls]
        return message


class ToolMessage(_Message, tag="tool"):
    content: str | list[TextPart]
    tool_call_id: str
    name: str | None = None

    def plain(self) -> dict[str, Any]:
        return {**super().plain(), "tool_call_id": self.tool_call_id}


Message = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage


class FunctionSpec(msgspec.Struct, forbid_unknown_fields=True):
    name: ToolName
    description: str | None = None
    parameters: JsonSchema | None = None
    strict: bool | None = None

    def tool(self) -> Tool:
        return Tool(
            name=self.name,
            description=self.description or "",
            parameters=self.parameters or {},
            strict=bool(self.strict),
            closed=self.strict is not False,
        )


class FunctionTool(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="function"):
    function: FunctionSpec

    def tool(self) -> Tool:
        return self.function.tool()


class GrammarDefinition(msgspec.Struct, forbid_unknown_fields=True):
    definition: str
    syntax: Literal["lark", "regex"]


class CustomText(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="text"):
    pass


class CustomGrammar(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="grammar"):
    grammar: GrammarDefinition


class CustomSpec(msgspec.Struct, forbid_unknown_fields=True):
    name: ToolName
    description: str | None = None
    format: CustomText | CustomGrammar | None = None


class CustomTool(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="custom"):
    custom: CustomSpec

    def tool(self) -> Tool:
        spec, format = self.custom, self.custom.format
        grammar = (format.grammar.syntax, format.grammar.definition) if isinstance(format, CustomGrammar) else None
        return custom_tool(spec.name, spec.description or "", grammar)


class FunctionName(msgspec.Struct, forbid_unknown_fields=True):
    name: str


class NamedTool(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="function"):
    function: FunctionName

    @property
    def name(self) -> str:
        return self.function.name


class NamedCustom(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="custom"):
    custom: FunctionName

    @property
    def name(self) -> str:
        return self.custom.name


class AllowedList(msgspec.Struct, forbid_unknown_fields=True):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool | NamedCustom], Meta(min_length=1)]


class AllowedTools(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="allowed_tools"):
    allowed_tools: AllowedList


class TextFormat(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="text"):
    pass


class JsonObjectFormat(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="json_object"):
    pass


class NamedSchema(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    schema: JsonSchema | None = None
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="json_schema"):
    json_schema: NamedSchema


class StructuralTagFormat(msgspec.Struct, kw_only=True, tag_field="type", tag="structural_tag", omit_defaults=True):
    """Free text in which certain beginnings bind what follows; as in vLLM."""

    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None
    format: dict[str, Any] | None = None


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat
