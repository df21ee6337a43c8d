"""The request and response bodies of the OpenAI-compatible APIs, as strict structs.

A field of the published API that has no effect here is declared all the same and listed as UNSUPPORTED with the
values that ask for nothing; any other value is refused by name. Unknown fields are refused by the decoder.
Refuses to know: how a request is carried out.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from quire.types.errors import InputError

# Bounded here because Python's integers are not, and JSON's digits are free.
Int = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None


class GenerationRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields common to chat and completions. Where null or absent, the model server's default applies."""

    model: str
    n: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[Int, float] | None = None
    seed: Int | None = None
    stop: str | list[str] | None = None
    max_tokens: Int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Annotated[str, Meta(description="Accepted and not used.")] | None = None

    top_k: Annotated[Int, Meta(description="Extension: sample among the k likeliest tokens; 0 is off.")] | None = None
    min_p: Annotated[float, Meta(description="Extension: least share of the top probability.")] | None = None
    repetition_penalty: Annotated[float, Meta(description="Extension: above 1 discourages repeats.")] | None = None
    min_tokens: Annotated[Int, Meta(description="Extension: no stop before this many tokens.")] | None = None
    ignore_eos: Annotated[bool, Meta(description="Extension: generate on past the end token.")] | None = None
    stop_token_ids: Annotated[list[Int], Meta(description="Extension: tokens that end the output.")] | None = None
    bad_words: Annotated[list[str], Meta(description="Extension: words that must not appear.")] | None = None
    skip_special_tokens: Annotated[bool, Meta(description="Extension: leave them out of the text.")] | None = None
    prompt_logprobs: Annotated[Int, Meta(description="Extension: logprobs of the prompt's tokens.")] | None = None
    priority: Annotated[Int, Meta(description="Extension: lower runs earlier (priority scheduler).")] | None = None
    deadline_ms: (
        Annotated[int, Meta(ge=1, le=1 << 40, description="Extension: cancelled if not finished after so long.")] | None
    ) = None
    cache_salt: Annotated[str, Meta(description="Extension: prefixes are shared only within a salt.")] | None = None


class TextPart(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str


class Message(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None
    refusal: None = None
    annotations: Annotated[list[Any], Meta(max_length=0)] | None = None
    audio: None = None
    tool_calls: Annotated[list[Any], Meta(max_length=0)] | None = None
    function_call: None = None

    def plain(self) -> dict[str, str]:
        """As chat templates want it: one text, and the role they know."""
        content = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        message = {"role": "system" if self.role == "developer" else self.role, "content": content}
        if self.name is not None:
            message["name"] = self.name
        return message


class ChatRequest(GenerationRequest, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    add_generation_prompt: Annotated[bool, Meta(description="Extension: begin the assistant's turn.")] | None = None

    metadata: Annotated[dict[str, str], Meta(description="Accepted and not used.")] | None = None
    safety_identifier: Annotated[str, Meta(description="Accepted and not used.")] | None = None
    prompt_cache_key: Annotated[str, Meta(description="Accepted; equal prefixes are found without it.")] | None = None
    parallel_tool_calls: Annotated[bool, Meta(description="Accepted; there are no tools.")] | None = None

    audio: Any = None
    function_call: Any = None
    functions: Any = None
    modalities: Any = None
    moderation: Any = None
    prediction: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    reasoning_effort: Any = None
    response_format: Any = None
    service_tier: Any = None
    store: Any = None
    tool_choice: Any = None
    tools: Any = None
    verbosity: Any = None
    web_search_options: Any = None


class CompletionRequest(GenerationRequest, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/completions. `prompt` is text, token ids, or a list of either."""

    prompt: str | list[str | Int | list[Int]]
    logprobs: Int | None = None
    echo: bool | None = None
    best_of: Annotated[Int, Meta(description="Only equal to n.")] | None = None
    suffix: Any = None


# Field → values, besides null, that ask for nothing this server would have to do.
UNSUPPORTED: dict[type[GenerationRequest], dict[str, tuple[Any, ...]]] = {
    ChatRequest: {
        "audio": (),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "modalities": (["text"],),
        "moderation": (),
        "prediction": (),
        "prompt_cache_options": ({},),
        "prompt_cache_retention": ("in_memory", "in-memory"),
        "reasoning_effort": ("none",),
        "response_format": ({"type": "text"},),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
        "verbosity": ("medium",),
        "web_search_options": (),
    },
    CompletionRequest: {"suffix": ("",)},
}


def refuse_unsupported(body: GenerationRequest) -> None:
    for name, neutral in UNSUPPORTED[type(body)].items():
        value = getattr(body, name)
        if value is not None and value not in neutral:
            advice = (
                f"leave it out or set it to {msgspec.json.encode(neutral[0]).decode()}" if neutral else "leave it out"
            )
            message = f"{name} is not supported with this value by this server; {advice}"
            raise InputError(message, param=name, code="unsupported_parameter")


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int = 0


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatTokenLogprob]
    refusal: None = None


class PromptLogprob(msgspec.Struct):
    logprob: float
    rank: int | None
    decoded_token: str


# Per prompt position: token id → its logprob; null where nothing predicts the token (the first).
PromptLogprobs = list[dict[int, PromptLogprob] | None]


class AssistantMessage(msgspec.Struct):
    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str


class ChatCompletion(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


class CompletionLogprobs(msgspec.Struct):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


class Completion(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage


class ModelCard(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "quire"
    max_model_len: int


class ModelList(msgspec.Struct):
    data: list[ModelCard]
    object: Literal["list"] = "list"
