"""What OpenAI's chat, completions, models and embeddings APIs answer, as structs. Refuses to know: where it is from."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from quire.serve.core.generation import Generation
from quire.serve.core.token_logprobs import ChatTokenLogprob
from quire.serve.openai.chat_parts import CustomToolCall, ToolCall


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int = 0
    blended_tokens: int | UnsetType = UNSET  # of chunks, copied from another place


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int = 0
    accepted_prediction_tokens: int = 0  # drafted by the engine and accepted
    rejected_prediction_tokens: int = 0  # drafted and rejected: not part of the answer
    forced_tokens: int = 0  # Quire's own: the schema left no choice, so they took no step of the model


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails
    evicted_tokens: int | UnsetType = UNSET  # with kv_budget: tokens whose KV was dropped


def usage_of(generation: Generation, thought_tokens: int = 0) -> Usage:
    used = generation.usage()
    return Usage(
        used.prompt_tokens,
        used.completion_tokens,
        used.total_tokens,
        PromptTokensDetails(used.cached_tokens, UNSET if used.blended_tokens is None else used.blended_tokens),
        CompletionTokensDetails(
            thought_tokens, used.accepted_tokens, used.drafted_tokens - used.accepted_tokens, used.forced_tokens
        ),
        UNSET if used.evicted_tokens is None else used.evicted_tokens,
    )


class ChatLogprobs(msgspec.Struct):
    content: list[ChatTokenLogprob]
    refusal: None = None


class PromptLogprob(msgspec.Struct):
    logprob: float
    rank: int | None
    decoded_token: str


# Per prompt position: token id → its logprob; null where nothing predicts the token (the first).
PromptLogprobs = list[dict[int, PromptLogprob] | None]


class ChatAnswer(msgspec.Struct):
    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall | CustomToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatAnswer
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    service_tier: str | UnsetType = UNSET
    choices: list[ChatChoice]
    usage: Usage
    metadata: dict[str, str] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionLogprobs(msgspec.Struct):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class Covered(msgspec.Struct):
    """The first so many token ids are exactly the first so many characters of the answer."""

    tokens: int
    characters: int


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str
    stop_reason: str | int | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    covered: Covered | UnsetType = UNSET


class Completion(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage


class ModelPermission(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["model_permission"] = "model_permission"
    created: int
    allow_create_engine: bool = False
    allow_sampling: bool = True
    allow_logprobs: bool = True
    allow_search_indices: bool = False
    allow_view: bool = True
    allow_fine_tuning: bool = False
    organization: str = "*"
    group: str | None = None
    is_blocking: bool = False


class ModelCard(msgspec.Struct, kw_only=True):
    """One card for two APIs: `type`, `display_name` and `created_at` are what Anthropic's clients read."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "quire"
    root: str  # the model that a name stands for
    parent: str | None = None
    permission: list[ModelPermission]
    max_model_len: int
    type: Literal["model"] = "model"
    display_name: str
    created_at: str
    loaded: bool | UnsetType = UNSET  # of several models, which are loaded when they are asked for


class ModelList(msgspec.Struct, kw_only=True):
    data: list[ModelCard]
    object: Literal["list"] = "list"
    has_more: bool = False
    first_id: str
    last_id: str


class Embedding(msgspec.Struct):
    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class EmbeddingUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(msgspec.Struct):
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
    object: Literal["list"] = "list"
