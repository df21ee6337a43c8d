"""What OpenAI's responses API answers: responses, their items, listings. Refuses to know: how they come to be."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from quire.serve.core.token_logprobs import ChatTokenLogprob
from quire.serve.openai.chat_parts import TextFormat
from quire.serve.openai.responses_bodies import (
    AllowedFunctions,
    ConversationId,
    NamedCustomTool,
    NamedFunction,
    Reasoning,
    ResponseTool,
    TextConfig,
)


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


class SummaryText(msgspec.Struct, kw_only=True, tag_field="type", tag="summary_text"):
    text: str = ""


class OutputReasoning(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    id: str
    status: str = "in_progress"
    summary: list[SummaryText] = []
    content: list[ReasoningText] = []
    encrypted_content: str | UnsetType = UNSET


class OutputCall(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str = ""
    status: str = "in_progress"


class OutputTextCall(msgspec.Struct, kw_only=True, tag_field="type", tag="custom_tool_call"):
    """A call of a custom tool."""

    id: str
    call_id: str
    name: str
    input: str = ""
    status: str = "in_progress"


OutputItem = OutputMessage | OutputReasoning | OutputCall | OutputTextCall


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
    conversation: ConversationId | None = None
    temperature: float = 1.0
    text: TextConfig = msgspec.field(default_factory=lambda: TextConfig(format=TextFormat()))
    tool_choice: str | NamedFunction | NamedCustomTool | AllowedFunctions = "auto"
    tools: list[ResponseTool] = []
    top_logprobs: int = 0
    top_p: float = 1.0
    truncation: str = "disabled"
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class ResponseDeleted(msgspec.Struct):
    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class InputTokens(msgspec.Struct):
    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"
