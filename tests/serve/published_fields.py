"""The fields of the APIs other servers publish, as their own clients declare them.

Clients are released every few days. So that a release does not fail the tests of a change that has nothing to do with
it, what they declare is kept in published_fields.json, and a slow test says when it is out of date. Then run:

    python tests/serve/published_fields.py
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_type_hints

import ollama._types as ollama_types
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

FILE = Path(__file__).with_suffix(".json")
CLIENTS = ("anthropic", "ollama", "openai")
HEADERS = {"betas"}  # which the client sends as one


def installed() -> dict[str, set[str]]:
    """What the installed clients declare: the names of the fields by the title of the body."""
    typed: dict[str, Any] = {
        "POST /v1/chat/completions": chat_create_params.CompletionCreateParamsStreaming,
        "POST /v1/completions": completion_create_params.CompletionCreateParamsStreaming,
        "POST /v1/responses": response_create_params.ResponseCreateParamsStreaming,
        "POST /v1/embeddings": embedding_create_params.EmbeddingCreateParams,
        "POST /v1/batches": batch_create_params.BatchCreateParams,
        "POST /v1/uploads": upload_create_params.UploadCreateParams,
        "POST /v1/uploads/{id}/complete": upload_complete_params.UploadCompleteParams,
        "POST /v1/messages": message_create_params.MessageCreateParamsStreaming,
        "POST /v1/messages/count_tokens": message_count_tokens_params.MessageCountTokensParams,
    }
    models: dict[str, Any] = {
        "POST /api/chat": ollama_types.ChatRequest,
        "POST /api/generate": ollama_types.GenerateRequest,
        "POST /api/embed": ollama_types.EmbedRequest,
        "POST /api/embeddings": ollama_types.EmbeddingsRequest,
        "POST /api/show": ollama_types.ShowRequest,
        "options of /api/chat and /api/generate": ollama_types.Options,
    }
    fields = {title: set(get_type_hints(body)) - HEADERS for title, body in typed.items()}
    return fields | {title: set(body.model_fields) for title, body in models.items()}


def kept() -> dict[str, set[str]]:
    return {title: set(names) for title, names in json.loads(FILE.read_text())["fields"].items()}


if __name__ == "__main__":
    known = {
        "clients": {name: version(name) for name in CLIENTS},
        "fields": {title: sorted(names) for title, names in installed().items()},
    }
    FILE.write_text(json.dumps(known, indent=1) + "\n")
