"""Every field the published APIs have is known here, and docs/api.md says what becomes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_type_hints

import ollama._types as ollama_types
import pytest
from anthropic.types.beta import message_count_tokens_params, message_create_params
from openai.types import (
    batch_create_params,
    completion_create_params,
    embedding_create_params,
    upload_complete_params,
    upload_create_params,
)
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from quire.serve.core.fields import fields_of
from quire.serve.http import field_tables as coverage

PAGE = Path(__file__).parents[2] / "docs" / "api.md"

HEADERS = {"betas"}  # which the client sends as one

PUBLISHED: dict[str, set[str]] = {
    "POST /v1/chat/completions": set(get_type_hints(chat_create_params.CompletionCreateParamsStreaming)),
    "POST /v1/completions": set(get_type_hints(completion_create_params.CompletionCreateParamsStreaming)),
    "POST /v1/responses": set(get_type_hints(response_create_params.ResponseCreateParamsStreaming)),
    "POST /v1/embeddings": set(get_type_hints(embedding_create_params.EmbeddingCreateParams)),
    "POST /v1/batches": set(get_type_hints(batch_create_params.BatchCreateParams)),
    "POST /v1/uploads": set(get_type_hints(upload_create_params.UploadCreateParams)),
    "POST /v1/uploads/{id}/complete": set(get_type_hints(upload_complete_params.UploadCompleteParams)),
    "POST /v1/messages": set(get_type_hints(message_create_params.MessageCreateParamsStreaming)) - HEADERS,
    "POST /v1/messages/count_tokens": set(get_type_hints(message_count_tokens_params.MessageCountTokensParams))
    - HEADERS,
    "POST /api/chat": set(ollama_types.ChatRequest.model_fields),
    "POST /api/generate": set(ollama_types.GenerateRequest.model_fields),
    "POST /api/embed": set(ollama_types.EmbedRequest.model_fields),
    "POST /api/embeddings": set(ollama_types.EmbeddingsRequest.model_fields),
    "POST /api/show": set(ollama_types.ShowRequest.model_fields),
    "options of /api/chat and /api/generate": set(ollama_types.Options.model_fields),
}


@pytest.mark.parametrize("title", PUBLISHED)
def test_every_published_field_is_known(title: str) -> None:
    assert PUBLISHED[title] <= {field.name for field in fields_of(coverage.BODIES[title])}


@pytest.mark.parametrize("title", PUBLISHED)
def test_what_is_not_published_is_called_an_extension(title: str) -> None:
    known: set[Any] = PUBLISHED[title] | {"min_p", "verbose", "temperature", "top_k", "top_p"}
    for field in fields_of(coverage.BODIES[title]):
        # A field of a newer client may be refused before this one has heard of it.
        assert field.name in known or field.kind in ("extension", "refused"), field.name


def test_the_page_is_true() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert coverage.rewritten(page) == page, "run: python -m quire.serve.http.field_tables docs/api.md"
