"""Bodies of Anthropic's messages API, as strict structs. Refuses to know: how a request is carried out."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from quire.serve.anthropic.context_edits import AppliedEdit, ContextManagement
from quire.serve.anthropic.message_blocks import CacheControl, Messages, SearchOutcome, TextBlock
from quire.serve.anthropic.message_tools import Tools
from quire.serve.core.fields import (
    BlendField,
    Count,
    JsonSchema,
    Name,
    SessionId,
    SessionTtl,
    TopP,
    extension,
    left_out,
    noted,
    unused,
)


class _Choice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    disable_parallel_tool_use: bool = False


class ChoiceAuto(_Choice, tag="auto"):
    pass


class ChoiceAny(_Choice, tag="any"):
    pass


class ChoiceTool(_Choice, tag="tool"):
    name: str


class ChoiceNone(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="none"):
    pass


class ThinkingEnabled(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="enabled"):
    budget_tokens: Annotated[int, Meta(ge=1, le=1 << 30, description="Of the thought: its end is forced there.")]
    display: Literal["summarized", "omitted", "updates"] | None = None


class ThinkingAdaptive(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="adaptive"):
    display: Literal["summarized", "omitted", "updates"] | None = None


class ThinkingBetweenTools(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="between_tools"):
    pass


class ThinkingDisabled(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="disabled"):
    pass


class UserMetadata(msgspec.Struct, forbid_unknown_fields=True):
    user_id: str | None = None


class OutputSchema(msgspec.Struct, forbid_unknown_fields=True):
    schema: JsonSchema
    type: Literal["json_schema"]


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True):
    format: OutputSchema | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    task_budget: Any = None


class CountTokensRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/messages/count_tokens."""

    model: Name
    messages: Messages
    system: str | list[TextBlock] | None = None
    tools: Tools | None = None
    tool_choice: ChoiceAuto | ChoiceAny | ChoiceTool | ChoiceNone | None = None
    thinking: (
        Annotated[
            ThinkingEnabled | ThinkingAdaptive | ThinkingBetweenTools | ThinkingDisabled,
            noted("where the model thinks; at its budget the end of the thought is forced"),
        ]
        | None
    ) = None
    output_config: Annotated[OutputConfig, noted("format, and effort as a variable of the chat template")] | None = None
    cache_control: Annotated[CacheControl, unused("equal prefixes are found without it")] | None = None
    context_management: (
        Annotated[ContextManagement, noted("old tool results and thoughts are cleared; compact_20260112 does nothing")]
        | None
    ) = None
    output_format: Annotated[OutputSchema, extension("an older name of output_config.format")] | None = None
    blend: BlendField | None = None
    mcp_servers: Annotated[Any, left_out([], why="this server contacts no others; give their tools as your own")] = None
    compaction: Annotated[Any, left_out()] = None
    speed: Annotated[Any, left_out("standard", why="there is one")] = None
    user_profile_id: Annotated[Any, left_out()] = None
    workspace_id: Annotated[Any, left_out()] = None
    billing_policy: Annotated[Any, left_out(why="nothing is billed here")] = None


class MessagesRequest(CountTokensRequest, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/messages."""

    max_tokens: Count
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=1 << 30)] | None = None
    top_p: TopP | None = None
    metadata: Annotated[UserMetadata, unused()] | None = None
    service_tier: Annotated[Literal["auto", "standard_only"], unused("there is one tier")] | None = None
    session_id: SessionId | None = None
    session_ttl: SessionTtl | None = None
    container: Annotated[Any, left_out(why="no code is run here")] = None
    diagnostics: Annotated[Any, left_out()] = None
    inference_geo: Annotated[Any, left_out(why="it is where it is")] = None
    fallbacks: Annotated[Any, left_out([])] = None
    fallback_credit_token: Annotated[Any, left_out()] = None
    thread: Annotated[Any, left_out(why="send the whole conversation")] = None


# ---- answers ------------------------------------------------------------------------------------------------


class AnthropicUsage(msgspec.Struct, kw_only=True):
    """`input_tokens` are those that were not found in the cache."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0
    service_tier: str = "standard"


class ContentText(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class ContentThinking(msgspec.Struct, tag_field="type", tag="thinking"):
    thinking: str
    signature: str = ""


class ContentServerTool(msgspec.Struct, tag_field="type", tag="server_tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class ContentSearchResult(msgspec.Struct, tag_field="type", tag="tool_search_tool_result"):
    tool_use_id: str
    content: SearchOutcome


class ContentToolUse(msgspec.Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


Content = ContentText | ContentThinking | ContentToolUse | ContentServerTool | ContentSearchResult


class AppliedEdits(msgspec.Struct):
    applied_edits: list[AppliedEdit]


class AnthropicMessage(msgspec.Struct, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Content]
    stop_reason: str | None
    stop_sequence: str | None
    usage: AnthropicUsage
    context_management: AppliedEdits | UnsetType = UNSET


class OriginalTokens(msgspec.Struct):
    original_input_tokens: int


class TokenCount(msgspec.Struct):
    input_tokens: int
    context_management: OriginalTokens | UnsetType = UNSET


class AnthropicErrorDetail(msgspec.Struct):
    type: str
    message: str


class AnthropicError(msgspec.Struct):
    """Errors of /v1/messages."""

    error: AnthropicErrorDetail
    type: Literal["error"] = "error"
