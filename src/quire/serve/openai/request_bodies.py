"""The request bodies of OpenAI's chat and completions APIs, as strict structs.

Refuses to know: how a request is carried out.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from quire.serve.core.fields import (
    MAX_TOOLS,
    BlendField,
    Count,
    Int,
    JsonSchema,
    Metadata,
    Name,
    Penalty,
    SessionId,
    SessionTtl,
    Slo,
    Temperature,
    TopP,
    extension,
    noted,
    refused,
    unused,
)
from quire.serve.openai.chat_parts import (
    AllowedTools,
    CustomTool,
    FunctionTool,
    Message,
    NamedCustom,
    NamedTool,
    ResponseFormat,
    TextPart,
)
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

Truncation = Annotated[int, extension("keep the prompt's last so many tokens; -1: as many as fit", ge=-1, le=1 << 30)]
Eviction = Literal["sinks", "snapkv", "h2o"]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Verbosity = Literal["low", "medium", "high"]


def tier_used(tier: str | None, info: EngineInfo) -> str | None:
    """The tier that a request is served in: where the scheduler knows no priorities, there is the default one only."""
    return tier if tier is None or info.priorities or not TIERS[tier] else "default"


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool = False
    continuous_usage_stats: Annotated[bool, extension("usage so far in every chunk, as in vLLM")] = False
    include_obfuscation: Literal[False] | None = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """One constraint on the whole answer."""

    json: JsonSchema | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: Annotated[str, Meta(description="In Lark's notation, or in GBNF.")] | None = None
    structural_tag: dict[str, Any] | str | None = None
    whitespace_pattern: Annotated[str, Meta(description="White space in JSON, as a pattern.")] | None = None
    disable_additional_properties: Annotated[bool, Meta(description="False opens objects.")] | None = None
    disable_any_whitespace: Annotated[bool, Meta(description="There is one way to write JSON.")] | None = None
    disable_fallback: Annotated[bool, Meta(description="There is no other backend.")] | None = None


Bias = Annotated[float, Meta(ge=-100, le=100)]


class SamplingFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What chat, completions and responses may ask of the sampler. Where null or absent, the server's default."""

    temperature: Temperature | None = None
    top_p: TopP | None = None
    presence_penalty: Annotated[float, extension("as in chat", ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, extension("as in chat", ge=-2, le=2)] | None = None
    logit_bias: Annotated[dict[Int, Bias], extension("as in chat")] | None = None
    seed: Annotated[Int, extension("makes sampling repeatable")] | None = None
    stop: Annotated[str | list[str], extension("as in chat")] | None = None
    top_k: (
        Annotated[int, extension("sample among the k likeliest tokens; 0 and -1 are off", ge=-1, le=1 << 30)] | None
    ) = None
    min_p: Annotated[float, extension("least share of the likeliest token's probability", ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, extension("above 1 discourages repeats", gt=0, le=100)] | None = None
    min_tokens: Annotated[int, extension("no stop, by token or string, before so many", ge=0, le=1 << 30)] | None = None
    ignore_eos: Annotated[bool, extension("generate on past the end token")] | None = None
    stop_token_ids: Annotated[list[Int], extension("tokens that end the output")] | None = None
    include_stop_str_in_output: Annotated[bool, extension("the stop string or token is part of the text")] | None = None
    allowed_token_ids: Annotated[list[Int], extension("no other tokens are drawn", min_length=1)] | None = None
    bad_words: Annotated[list[str], extension("words that must not appear")] | None = None
    skip_special_tokens: Annotated[bool, extension("leave special tokens out of the text (default)")] | None = None
    truncate_prompt_tokens: Truncation | None = None
    priority: Annotated[Priority, extension("lower runs earlier (`--scheduler priority`)")] | None = None
    deadline_ms: Deadline | None = None
    cache_salt: Annotated[str, extension("prefixes are shared only within a salt")] | None = None
    slo: Slo | None = None
    session_id: SessionId | None = None
    session_ttl: SessionTtl | None = None
    kv_budget: Annotated[int, extension("tokens whose KV is kept; others are lost", ge=1, le=1 << 30)] | None = None
    kv_eviction: Annotated[Eviction, extension("which are: sinks (the default), snapkv or h2o")] | None = None
    sparse_pages: (
        Annotated[int, extension("KV pages that decoding reads of each KV head; 0: all", ge=0, le=1 << 30)] | None
    ) = None
    structured_outputs: Annotated[StructuredOutputs, extension("a constraint, as in vLLM")] | None = None
    guided_json: Annotated[dict[str, Any] | str, extension("the answer keeps to a JSON schema")] | None = None
    guided_regex: Annotated[str, extension("the answer matches a regular expression")] | None = None
    guided_choice: Annotated[list[str], extension("the answer is one of these")] | None = None
    guided_grammar: Annotated[str, extension("the answer keeps to a grammar in Lark or GBNF")] | None = None
    guided_whitespace_pattern: Annotated[str, extension("white space in the JSON of guided_json")] | None = None


class GenerationRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """Fields common to chat and completions."""

    model: Annotated[Name, noted("may be left out")] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[Int, Bias] | None = None
    seed: Int | None = None
    stop: str | list[str] | None = None
    max_tokens: Annotated[int, Meta(ge=0, le=1 << 30)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Annotated[str, unused()] | None = None

    best_of: Annotated[Int, extension("draw so many, return the n likeliest; not with stream")] | None = None
    use_beam_search: Annotated[bool, extension("the n best answers of n (best_of) beams")] | None = None
    length_penalty: Annotated[float, extension("of beam search: above 0 favours long answers")] | None = None
    early_stopping: (
        Annotated[bool | Literal["never"], extension("beam search ends as soon as there are enough answers")] | None
    ) = None
    prompt_logprobs: Annotated[int, extension("logprobs of the prompt's tokens", ge=0, le=MAX_LOGPROBS)] | None = None
    return_tokens_as_token_ids: Annotated[bool, extension("logprobs name tokens as token_id:N")] | None = None
    return_token_ids: Annotated[bool, extension("token ids of prompt and answer beside the text")] | None = None
    blend: BlendField | None = None


class Prediction(msgspec.Struct, forbid_unknown_fields=True):
    """What most of the answer is expected to be."""

    content: str | list[TextPart]
    type: Literal["content"]


class RouterReasoning(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    effort: Effort | None = None
    enabled: bool | None = None
    exclude: bool | None = None
    max_tokens: Annotated[Count, noted("of the thought: its end is forced there")] | None = None
    summary: Annotated[str, unused()] | None = None


class Thinking(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[Count, noted("of the thought: its end is forced there")] | None = None


class ChatRequest(GenerationRequest, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Annotated[list[FunctionTool | CustomTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | NamedCustom | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    prediction: Annotated[Prediction, noted("drafts are taken from it; see speculation.md")] | None = None
    verbosity: Annotated[Verbosity, noted("handed to the chat template")] | None = None
    store: Annotated[bool, noted("keep the completion for GET /v1/chat/completions/{id}")] | None = None
    reasoning_effort: Annotated[Effort, noted("handed to the chat template; none: no thinking")] | None = None
    service_tier: Tier | None = None
    add_generation_prompt: Annotated[bool, extension("begin the assistant's turn (default)")] | None = None
    continue_final_message: Annotated[bool, extension("go on from the last message, an assistant's")] | None = None
    chat_template_kwargs: Annotated[dict[str, Any], extension("variables for the chat template")] | None = None
    documents: Annotated[list[dict[str, Any]], extension("for chat templates that know documents")] | None = None
    include_reasoning: Annotated[bool, extension("false leaves thoughts out of the answer")] | None = None
    reasoning: Annotated[RouterReasoning, extension("effort, enabled, max_tokens and exclude")] | None = None
    thinking: Annotated[Thinking, extension("whether to think and how long, as in LiteLLM")] | None = None
    enable_thinking: Annotated[bool, extension("whether to think")] | None = None
    thinking_budget: Annotated[Count, extension("tokens of the thought, at which its end is forced")] | None = None

    metadata: Annotated[Metadata, noted("kept with a stored completion")] | None = None
    safety_identifier: Annotated[str, unused()] | None = None
    prompt_cache_key: Annotated[str, unused("equal prefixes are found without it")] | None = None
    prompt_cache_options: Annotated[dict[str, Any], unused("equal prefixes are found without it")] | None = None
    prompt_cache_retention: Annotated[str, unused("pages stay while there is room")] | None = None

    audio: Annotated[Any, refused()] = None
    function_call: Annotated[Any, refused("none", "auto", why="use tool_choice")] = None
    functions: Annotated[Any, refused([], why="use tools")] = None
    modalities: Annotated[Any, refused(["text"])] = None
    moderation: Annotated[Any, refused()] = None
    web_search_options: Annotated[Any, refused()] = None


class CompletionRequest(GenerationRequest, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/completions. `prompt` is text, token ids, or a list of either."""

    prompt: str | list[str | Int | list[Int]]
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    best_of: Annotated[Int, noted("not with stream")] | None = None
    max_tokens: Annotated[int, noted("0: the prompt alone, for its logprobs", ge=0, le=1 << 30)] | None = None
    suffix: Annotated[str, noted("for models with fill-in-the-middle tokens")] | None = None
    response_format: Annotated[ResponseFormat, extension("as in chat")] | None = None
    add_special_tokens: Annotated[bool, extension("false: no BOS before a prompt of text")] | None = None
