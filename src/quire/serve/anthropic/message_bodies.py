"""Bodies of Anthropic's messages API, as strict structs. Refuses to know: how a request is carried out."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from quire.serve.core.fields import (
    MAX_TOOLS,
    Count,
    JsonSchema,
    Name,
    SessionId,
    SessionTtl,
    ToolName,
    TopP,
    noted,
    refused,
    unused,
)
from quire.serve.core.turns import plain_call
from quire.text import Tool


class CacheControl(msgspec.Struct, forbid_unknown_fields=True):
    """Accepted everywhere without effect: equal prefixes are found without it."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class _Block(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    cache_control: CacheControl | None = None


class TextBlock(_Block, tag="text"):
    text: str
    citations: Annotated[list[Any], Meta(max_length=0)] | None = None


class ToolUseBlock(_Block, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(_Block, tag="tool_result"):
    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None


class ThinkingBlock(_Block, tag="thinking"):
    thinking: str
    signature: str = ""


class RedactedThinkingBlock(_Block, tag="redacted_thinking"):
    data: str


def text_of(content: str | list[TextBlock] | None) -> str:
    return "\n".join(block.text for block in content) if isinstance(content, list) else content or ""


class AnthropicSystem(msgspec.Struct, forbid_unknown_fields=True, tag_field="role", tag="system"):
    content: str | list[TextBlock]

    def plain(self) -> list[dict[str, Any]]:
        return [{"role": "system", "content": text_of(self.content)}]


class AnthropicUser(msgspec.Struct, forbid_unknown_fields=True, tag_field="role", tag="user"):
    content: str | list[TextBlock | ToolResultBlock]

    def plain(self) -> list[dict[str, Any]]:
        """What tools returned comes first, each a message of its own."""
        if isinstance(self.content, str):
            return [{"role": "user", "content": self.content}]
        results = [block for block in self.content if isinstance(block, ToolResultBlock)]
        texts = [block for block in self.content if isinstance(block, TextBlock)]
        out = [
            {"role": "tool", "content": text_of(block.content), "tool_call_id": block.tool_use_id} for block in results
        ]
        return out + ([{"role": "user", "content": text_of(texts)}] if texts or not out else [])


class AnthropicAssistant(msgspec.Struct, forbid_unknown_fields=True, tag_field="role", tag="assistant"):
    content: str | list[TextBlock | ToolUseBlock | ThinkingBlock | RedactedThinkingBlock]

    def plain(self) -> list[dict[str, Any]]:
        if isinstance(self.content, str):
            return [{"role": "assistant", "content": self.content}]
        texts = [block for block in self.content if isinstance(block, TextBlock)]
        message: dict[str, Any] = {"role": "assistant", "content": text_of(texts)}
        if thoughts := [block.thinking for block in self.content if isinstance(block, ThinkingBlock)]:
            message["reasoning_content"] = "\n".join(thoughts)
        if calls := [block for block in self.content if isinstance(block, ToolUseBlock)]:
            message["tool_calls"] = [plain_call(call.id, call.name, call.input) for call in calls]
        return [message]


class AnthropicTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: ToolName
    input_schema: JsonSchema
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None
    input_examples: Annotated[list[Any], Meta(max_length=0)] | None = None
    eager_input_streaming: bool | None = None  # arguments are streamed as they come in any case

    def tool(self) -> Tool:
        return Tool(
            name=self.name, description=self.description or "", parameters=self.input_schema, strict=bool(self.strict)
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
    budget_tokens: Annotated[int, Meta(ge=1, le=1 << 30, description="Counted in max_tokens, not enforced by itself.")]
    display: Literal["summarized", "omitted"] | None = None


class ThinkingAdaptive(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="adaptive"):
    display: Literal["summarized", "omitted"] | None = None


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


class CountTokensRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/messages/count_tokens."""

    model: Name
    messages: Annotated[list[AnthropicUser | AnthropicAssistant | AnthropicSystem], Meta(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: Annotated[list[AnthropicTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ChoiceAuto | ChoiceAny | ChoiceTool | ChoiceNone | None = None
    thinking: (
        Annotated[
            ThinkingEnabled | ThinkingAdaptive | ThinkingDisabled,
            noted("where the model thinks; a budget counts within max_tokens and is not enforced by itself"),
        ]
        | None
    ) = None
    output_config: Annotated[OutputConfig, noted("format, and effort as a variable of the chat template")] | None = None
    cache_control: Annotated[CacheControl, unused("equal prefixes are found without it")] | None = None
    speed: Annotated[Any, refused("standard")] = None
    user_profile_id: Annotated[Any, refused()] = None
    workspace_id: Annotated[Any, refused()] = None


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
    container: Annotated[Any, refused()] = None
    diagnostics: Annotated[Any, refused()] = None
    inference_geo: Annotated[Any, refused()] = None


# ---- answers ------------------------------------------------------------------------------------------------


class AnthropicUsage(msgspec.Struct, kw_only=True):
    """`input_tokens` are those that were not found in the cache."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0


class ContentText(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class ContentThinking(msgspec.Struct, tag_field="type", tag="thinking"):
    thinking: str
    signature: str = ""


class ContentToolUse(msgspec.Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class AnthropicMessage(msgspec.Struct, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[ContentText | ContentThinking | ContentToolUse]
    stop_reason: str | None
    stop_sequence: str | None
    usage: AnthropicUsage


class TokenCount(msgspec.Struct):
    input_tokens: int


class AnthropicErrorDetail(msgspec.Struct):
    type: str
    message: str


class AnthropicError(msgspec.Struct):
    """Errors of /v1/messages."""

    error: AnthropicErrorDetail
    type: Literal["error"] = "error"
