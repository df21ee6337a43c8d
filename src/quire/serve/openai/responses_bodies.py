"""Bodies of OpenAI's responses API, as strict structs. Refuses to know: how a request is carried out."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from quire.serve.core.fields import (
    MAX_TOOLS,
    BlendField,
    Count,
    JsonSchema,
    Metadata,
    Name,
    ToolName,
    noted,
    refused,
    unused,
)
from quire.serve.core.turns import plain_call
from quire.serve.openai.chat_parts import JsonObjectFormat, TextFormat
from quire.serve.openai.custom_tools import custom_tool
from quire.serve.openai.request_bodies import Effort, SamplingFields, Tier, Verbosity
from quire.text import Tool
from quire.text.text_inputs import INPUT
from quire.types.errors import InputError
from quire.types.sampling_params import MAX_LOGPROBS

Status = Literal["in_progress", "completed", "incomplete"]
LOGPROBS, ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"
# What else OpenAI may be asked to include is of tools and media that are not here.
Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]


class Part(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """A piece of text in a message, a thought, or what a tool returned."""

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal"]
    text: str = ""
    refusal: str = ""
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


def text_of(content: str | list[Part] | None) -> str:
    return "\n".join(part.text or part.refusal for part in content) if isinstance(content, list) else content or ""


class InputItem(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One item of `input`: a message (also without `type`), a call the model made, what it returned, a thought, or a
    reference to an item that is kept here."""

    type: (
        Literal[
            "message",
            "function_call",
            "function_call_output",
            "custom_tool_call",
            "custom_tool_call_output",
            "reasoning",
            "item_reference",
        ]
        | None
    ) = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[Part] | None = None
    id: str | None = None
    status: Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | list[Part] | None = None
    summary: list[Part] | None = None
    encrypted_content: str | None = None

    @property
    def kind(self) -> str:
        """Without a type: an id alone is a reference, everything else a message."""
        return self.type or ("item_reference" if self.id and self.role is None else "message")

    def plain(self, number: int) -> dict[str, Any]:
        """As chat templates want it."""
        kind = self.kind
        for name in _NEEDED.get(kind, ()):
            if getattr(self, name) is None:
                param = f"input[{number}].{name}"
                raise InputError(f"{param}: a {kind} needs it", param=param, code="missing_required_parameter")
        if kind == "message":
            return {"role": "system" if self.role == "developer" else self.role, "content": text_of(self.content)}
        if kind in ("function_call", "custom_tool_call"):
            arguments = self.arguments or "" if kind == "function_call" else {INPUT: self.input}
            call = plain_call(self.call_id or "", self.name or "", arguments)
            return {"role": "assistant", "content": "", "tool_calls": [call]}
        if kind == "reasoning":
            thought = text_of(self.content) or text_of(self.summary)
            return {"role": "assistant", "content": "", "reasoning_content": thought}
        return {"role": "tool", "content": text_of(self.output), "tool_call_id": self.call_id}


_NEEDED = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "custom_tool_call": ("call_id", "name", "input"),
    "custom_tool_call_output": ("call_id", "output"),
    "item_reference": ("id",),
}


class InputFormat(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Of a custom tool's input."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


HOSTED = (
    *("web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11", "file_search"),
    *("code_interpreter", "image_generation", "computer", "computer_use_preview", "local_shell", "shell", "mcp"),
    *("apply_patch", "tool_search", "namespace"),
)


class ResponseTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A function, a custom tool, or one that OpenAI runs and this server does not: the model is not told of it."""

    type: Literal[("function", "custom", *HOSTED)]  # type: ignore[valid-type]
    name: ToolName | None = None
    description: str | None = None
    parameters: JsonSchema | None = None
    strict: bool | None = None
    format: InputFormat | UnsetType = UNSET

    def tool(self, number: int) -> Tool | None:
        if self.type in HOSTED:
            return None
        if self.name is None:
            param = f"tools[{number}].name"
            raise InputError(f"{param}: a tool needs it", param=param, code="missing_required_parameter")
        if self.type == "function":
            parameters = self.parameters or {}
            return Tool(
                name=self.name, description=self.description or "", parameters=parameters, strict=bool(self.strict)
            )
        grammar = None
        if self.format and self.format.type == "grammar":
            if self.format.syntax is None or self.format.definition is None:
                raise InputError("a grammar needs syntax and definition", param=f"tools[{number}].format")
            grammar = self.format.syntax, self.format.definition
        return custom_tool(self.name, self.description or "", grammar)


class NamedFunction(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="function"):
    name: str


class NamedCustomTool(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="custom"):
    name: str


class AllowedFunctions(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="allowed_tools"):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction | NamedCustomTool], Meta(min_length=1)]


class SchemaFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="json_schema"):
    name: str
    schema: JsonSchema
    description: str | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    format: TextFormat | JsonObjectFormat | SchemaFormat | None = None
    verbosity: Verbosity | None = None


Summary = Literal["auto", "concise", "detailed"]


class Reasoning(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    effort: Effort | None = None
    summary: Summary | None = None
    generate_summary: Summary | None = None
    context: Annotated[Literal["auto", "current_turn", "all_turns"], unused("the template decides")] | None = None
    mode: Annotated[str, unused()] | None = None


class ResponseStreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_obfuscation: Literal[False] | None = None


class ConversationId(msgspec.Struct, forbid_unknown_fields=True):
    id: str


class ResponseRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/responses, and of POST /v1/responses/input_tokens."""

    model: Annotated[Name, noted("may be left out")] | None = None
    input: str | list[InputItem] | None = None
    instructions: str | None = None
    tools: (
        Annotated[list[ResponseTool], noted("functions and custom tools; others are left out", max_length=MAX_TOOLS)]
        | None
    ) = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | NamedCustomTool | AllowedFunctions | None = None
    parallel_tool_calls: bool | None = None
    text: Annotated[TextConfig, noted("format, and verbosity for the chat template")] | None = None
    reasoning: (
        Annotated[Reasoning, noted("effort goes to the chat template; a summary is the thought itself")] | None
    ) = None
    previous_response_id: Annotated[str, noted("while it is in the server's bounded store")] | None = None
    conversation: Annotated[str | ConversationId, noted("not with previous_response_id")] | None = None
    truncation: (
        Annotated[Literal["auto", "disabled"], noted("auto: the oldest messages go until the rest fits")] | None
    ) = None
    max_output_tokens: Count | None = None
    top_logprobs: Annotated[int, noted("with include message.output_text.logprobs", ge=0, le=MAX_LOGPROBS)] | None = (
        None
    )
    include: Annotated[list[Includable], noted("logprobs and encrypted reasoning; others are empty")] | None = None
    background: Annotated[bool, noted("answer at once, work on; needs store")] | None = None
    store: Annotated[bool, noted("kept in a bounded store; true by default")] | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    service_tier: Tier | None = None
    blend: BlendField | None = None

    metadata: Annotated[Metadata, noted("returned as given")] | None = None
    user: Annotated[str, unused()] | None = None
    safety_identifier: Annotated[str, unused()] | None = None
    prompt_cache_key: Annotated[str, unused("equal prefixes are found without it")] | None = None
    prompt_cache_options: Annotated[dict[str, Any], unused("equal prefixes are found without it")] | None = None
    prompt_cache_retention: Annotated[str, unused("pages stay while there is room")] | None = None
    max_tool_calls: Annotated[Count, unused("there are no built-in tools")] | None = None
    context_management: Annotated[list[dict[str, Any]], unused("nothing is compacted")] | None = None

    access_programs: Annotated[Any, refused([], {})] = None
    image: Annotated[Any, refused()] = None
    moderation: Annotated[Any, refused()] = None
    prompt: Annotated[Any, refused()] = None
