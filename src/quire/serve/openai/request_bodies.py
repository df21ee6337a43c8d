"""The request bodies of OpenAI's chat and completions APIs, as strict structs. Unknown fields are refused.

Refuses to know: how a request is carried out.
"""

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
    Penalty,
    SessionId,
    SessionTtl,
    Temperature,
    ToolName,
    TopP,
    extension,
    noted,
    refused,
    unused,
)
from quire.serve.core.turns import plain_call
from quire.text import Tool
from quire.types.blend import BlendParams
from quire.types.messages import EngineInfo
from quire.types.sampling_params import MAX_LOGPROBS, MAX_N

Priority = Annotated[int, Meta(ge=-(1 << 31), le=1 << 31)]
Deadline = Annotated[int, extension("cancelled if not finished after so many milliseconds", ge=1, le=1 << 40)]
# The tiers that OpenAI publishes, as priorities: lower runs earlier.
TIERS = {"auto": 0, "default": 0, "scale": 0, "priority": -10, "fast": -10, "flex": 10}
Tier = Annotated[
    Literal["auto", "default", "scale", "priority", "fast", "flex"],
    noted("priority and fast run earlier, flex later, where the scheduler is `priority`"),
]

Eviction = Literal["sinks", "snapkv", "h2o"]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


def tier_used(tier: str | None, info: EngineInfo) -> str | None:
    """The tier that a request is served in: where the scheduler knows no priorities, there is the default one only."""
    return tier if tier is None or info.priorities or not TIERS[tier] else "default"


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """One constraint on the whole answer."""

    json: JsonSchema | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: Annotated[str, Meta(description="In Lark's notation.")] | None = None


class GenerationRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields common to chat and completions. Where null or absent, the model server's default applies."""

    model: Name
    n: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[Int, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    seed: Int | None = None
    stop: str | list[str] | None = None
    max_tokens: Count | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Annotated[str, unused()] | None = None

    top_k: Annotated[int, extension("sample among the k likeliest tokens; 0 is off", ge=0, le=1 << 30)] | None = None
    min_p: Annotated[float, extension("least share of the likeliest token's probability", ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, extension("above 1 discourages repeats", gt=0, le=100)] | None = None
    min_tokens: Annotated[int, extension("no stop before this many tokens", ge=0, le=1 << 30)] | None = None
    ignore_eos: Annotated[bool, extension("generate on past the end token")] | None = None
    stop_token_ids: Annotated[list[Int], extension("tokens that end the output")] | None = None
    bad_words: Annotated[list[str], extension("words that must not appear")] | None = None
    skip_special_tokens: Annotated[bool, extension("leave special tokens out of the text (default)")] | None = None
    prompt_logprobs: Annotated[int, extension("logprobs of the prompt's tokens", ge=0, le=MAX_LOGPROBS)] | None = None
    priority: Annotated[Priority, extension("lower runs earlier (`--scheduler priority`)")] | None = None
    deadline_ms: Deadline | None = None
    cache_salt: Annotated[str, extension("prefixes are shared only within a salt")] | None = None
    session_id: SessionId | None = None
    session_ttl: SessionTtl | None = None
    blend: Annotated[BlendParams, extension("chunks (documents) whose KV may be reused at another place")] | None = None
    kv_budget: Annotated[int, extension("tokens whose KV is kept; others are lost", ge=1, le=1 << 30)] | None = None
    kv_eviction: Annotated[Eviction, extension("which are: sinks (the default), snapkv or h2o")] | None = None
    structured_outputs: Annotated[StructuredOutputs, extension("a constraint, as in vLLM")] | None = None
    guided_json: Annotated[dict[str, Any], extension("the answer keeps to a JSON schema")] | None = None
    guided_regex: Annotated[str, extension("the answer matches a regular expression")] | None = None
    guided_choice: Annotated[list[str], extension("the answer is one of these")] | None = None
    guided_grammar: Annotated[str, extension("the answer keeps to a Lark grammar")] | None = None


# ---- chat ---------------------------------------------------------------------------------------------------


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


class ToolCall(msgspec.Struct, forbid_unknown_fields=True):
    """A call, in a conversation that is sent back and in an answer."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class AssistantMessage(_Message, tag="assistant"):
    content: str | list[TextPart | RefusalPart] | None = None
    reasoning_content: Annotated[str, extension("thoughts, as answers bring them")] | None = None
    name: str | None = None
    refusal: str | None = None
    annotations: Annotated[list[Any], Meta(max_length=0)] | None = None
    audio: None = None
    tool_calls: list[ToolCall] | None = None
    function_call: None = None

    def plain(self) -> dict[str, Any]:
        message = super().plain()
        if self.refusal and not message["content"]:
            message["content"] = self.refusal
        if self.reasoning_content:
            message["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            message["tool_calls"] = [
                plain_call(call.id, call.function.name, call.function.arguments) for call in self.tool_calls
            ]
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
        )


class FunctionTool(msgspec.Struct, forbid_unknown_fields=True):
    function: FunctionSpec
    type: Literal["function"]


class FunctionName(msgspec.Struct, forbid_unknown_fields=True):
    name: str


class NamedTool(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="function"):
    function: FunctionName


class AllowedList(msgspec.Struct, forbid_unknown_fields=True):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Meta(min_length=1)]


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


class ChatRequest(GenerationRequest, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Annotated[list[FunctionTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    response_format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None = None
    reasoning_effort: Annotated[Effort, noted("handed to the chat template; none: no thinking")] | None = None
    service_tier: Tier | None = None
    add_generation_prompt: Annotated[bool, extension("begin the assistant's turn (default)")] | None = None
    continue_final_message: Annotated[bool, extension("go on from the last message, an assistant's")] | None = None
    chat_template_kwargs: Annotated[dict[str, Any], extension("variables for the chat template")] | None = None
    include_reasoning: Annotated[bool, extension("false leaves thoughts out of the answer")] | None = None

    metadata: Annotated[dict[str, str], unused()] | None = None
    safety_identifier: Annotated[str, unused()] | None = None
    prompt_cache_key: Annotated[str, unused("equal prefixes are found without it")] | None = None

    audio: Annotated[Any, refused()] = None
    function_call: Annotated[Any, refused("none", "auto", why="use tool_choice")] = None
    functions: Annotated[Any, refused([], why="use tools")] = None
    modalities: Annotated[Any, refused(["text"])] = None
    moderation: Annotated[Any, refused()] = None
    prediction: Annotated[Any, refused()] = None
    prompt_cache_options: Annotated[Any, refused({})] = None
    prompt_cache_retention: Annotated[Any, refused("in_memory", "in-memory")] = None
    store: Annotated[Any, refused(False)] = None
    verbosity: Annotated[Any, refused("medium")] = None
    web_search_options: Annotated[Any, refused()] = None


class CompletionRequest(GenerationRequest, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/completions. `prompt` is text, token ids, or a list of either."""

    prompt: str | list[str | Int | list[Int]]
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    best_of: Annotated[Int, noted("not with stream")] | None = None
    suffix: Annotated[Any, refused("")] = None
    return_token_ids: Annotated[bool, extension("token ids beside the text, to go on from them")] | None = None
