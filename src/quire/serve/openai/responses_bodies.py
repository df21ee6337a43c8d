"""Bodies of OpenAI's responses API, as strict structs. Refuses to know: how a request is carried out."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from quire.serve.core.fields import (
    MAX_TOOLS,
    Count,
    Int,
    JsonSchema,
    Name,
    SessionId,
    SessionTtl,
    Temperature,
    TopP,
    extension,
    noted,
    refused,
    unused,
)
from quire.serve.core.turns import plain_call
from quire.serve.openai.chat_parts import FunctionSpec, JsonObjectFormat, TextFormat
from quire.serve.openai.request_bodies import Deadline, Effort, Priority, Tier
from quire.serve.openai.response_bodies import ChatTokenLogprob
from quire.types.errors import InputError
from quire.types.sampling_params import MAX_LOGPROBS

Status = Literal["in_progress", "completed", "incomplete"]


class Part(msgspec.Struct, forbid_unknown_fields=True):
    """A piece of text in a message, a thought, or what a tool returned."""

    type: Literal["input_text", "output_text", "reasoning_text", "summary_text", "refusal"]
    text: str = ""
    refusal: str = ""
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


def text_of(content: str | list[Part] | None) -> str:
    return "\n".join(part.text or part.refusal for part in content) if isinstance(content, list) else content or ""


class InputItem(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One item of `input`: a message (also without `type`), a call the model made, what it returned, a thought."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[Part] | None = None
    id: str | None = None
    status: Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[Part] | None = None
    summary: list[Part] | None = None
    encrypted_content: None = None

    def plain(self, number: int) -> dict[str, Any]:
        """As chat templates want it."""
        needed = {
            "message": ("role", "content"),
            "function_call": ("call_id", "name", "arguments"),
            "function_call_output": ("call_id", "output"),
        }.get(self.type, ())
        for name in needed:
            if getattr(self, name) is None:
                param = f"input[{number}].{name}"
                raise InputError(f"{param}: a {self.type} needs it", param=param, code="missing_required_parameter")
        if self.type == "message":
            return {"role": "system" if self.role == "developer" else self.role, "content": text_of(self.content)}
        if self.type == "function_call":
            call = plain_call(self.call_id or "", self.name or "", self.arguments or "")
            return {"role": "assistant", "content": "", "tool_calls": [call]}
        if self.type == "reasoning":
            return {"role": "assistant", "content": "", "reasoning_content": text_of(self.content)}
        return {"role": "tool", "content": text_of(self.output), "tool_call_id": self.call_id}


class ResponseTool(FunctionSpec, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function"]


class NamedFunction(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="function"):
    name: str


class AllowedFunctions(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="allowed_tools"):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Meta(min_length=1)]


class SchemaFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="json_schema"):
    name: str
    schema: JsonSchema
    description: str | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    format: TextFormat | JsonObjectFormat | SchemaFormat | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    effort: Effort | None = None
    summary: None = None
    generate_summary: None = None


class ResponseStreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_obfuscation: Literal[False] | None = None


class ResponseRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/responses."""

    model: Name
    input: str | Annotated[list[InputItem], Meta(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_logprobs: Annotated[int, noted("with include message.output_text.logprobs", ge=0, le=MAX_LOGPROBS)] | None = (
        None
    )
    include: Annotated[list[Literal["message.output_text.logprobs"]], noted("only this one")] | None = None
    tools: Annotated[list[ResponseTool], noted("functions only", max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | AllowedFunctions | None = None
    parallel_tool_calls: bool | None = None
    text: Annotated[TextConfig, noted("format; verbosity only medium")] | None = None
    reasoning: Annotated[Reasoning, noted("effort, for the chat template; there are no summaries")] | None = None
    previous_response_id: Annotated[str, noted("while it is in the server's bounded store")] | None = None
    store: Annotated[bool, noted("kept in a bounded store in memory; true by default")] | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    service_tier: Tier | None = None
    truncation: Annotated[Literal["disabled"], noted("only disabled")] | None = None

    metadata: Annotated[dict[str, str], unused("returned as given")] | None = None
    user: Annotated[str, unused()] | None = None
    safety_identifier: Annotated[str, unused()] | None = None
    prompt_cache_key: Annotated[str, unused("equal prefixes are found without it")] | None = None

    access_programs: Annotated[Any, refused([])] = None
    background: Annotated[Any, refused(False)] = None
    context_management: Annotated[Any, refused([])] = None
    conversation: Annotated[Any, refused(why="use previous_response_id")] = None
    image: Annotated[Any, refused()] = None
    max_tool_calls: Annotated[Any, refused(why="there are no built-in tools")] = None
    moderation: Annotated[Any, refused()] = None
    prompt: Annotated[Any, refused()] = None
    prompt_cache_options: Annotated[Any, refused({})] = None
    prompt_cache_retention: Annotated[Any, refused("in_memory", "in-memory")] = None

    seed: Annotated[Int, extension("makes sampling repeatable")] | None = None
    top_k: Annotated[int, extension("sample among the k likeliest tokens; 0 is off", ge=0, le=1 << 30)] | None = None
    priority: Annotated[Priority, extension("lower runs earlier (`--scheduler priority`)")] | None = None
    deadline_ms: Deadline | None = None
    cache_salt: Annotated[str, extension("prefixes are shared only within a salt")] | None = None
    session_id: SessionId | None = None
    session_ttl: SessionTtl | None = None


# ---- answers ------------------------------------------------------------------------------------------------


class OutputText(msgspec.Struct, kw_only=True, tag_field="type", tag="output_text"):
    text: str = ""
    annotations: list[Any] = []
    logprobs: list[ChatTokenLogprob] = []


class ReasoningText(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning_text"):
    text: str = ""


class OutputMessage(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    id: str
    status: str = "in_progress"
    role: Literal["assistant"] = "assistant"
    content: list[OutputText] = []


class OutputReasoning(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    id: str
    status: str = "in_progress"
    summary: list[Any] = []
    content: list[ReasoningText] = []


class OutputCall(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str = ""
    status: str = "in_progress"


OutputItem = OutputMessage | OutputReasoning | OutputCall


class InputDetails(msgspec.Struct):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(msgspec.Struct):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseFailure(msgspec.Struct):
    code: str
    message: str


class Incomplete(msgspec.Struct):
    reason: str


class ResponseObject(msgspec.Struct, kw_only=True):
    """A response, whole or under way."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: str = "in_progress"
    model: str
    output: list[OutputItem] = []
    usage: ResponseUsage | None = None
    error: ResponseFailure | None = None
    incomplete_details: Incomplete | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] = {}
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    reasoning: Reasoning = msgspec.field(default_factory=Reasoning)
    service_tier: str = "default"
    store: bool = True
    background: bool = False
    temperature: float = 1.0
    text: TextConfig = msgspec.field(default_factory=lambda: TextConfig(format=TextFormat()))
    tool_choice: str | NamedFunction | AllowedFunctions = "auto"
    tools: list[ResponseTool] = []
    top_logprobs: int = 0
    top_p: float = 1.0
    truncation: str = "disabled"
    user: str | None = None


class ResponseDeleted(msgspec.Struct):
    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class InputItems(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool = False
