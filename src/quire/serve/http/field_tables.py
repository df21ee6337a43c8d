"""What becomes of every request field, as tables for docs/api.md, from the declarations that parse them.

    python -m quire.serve.http.field_tables docs/api.md     writes them between the page's two marks

Refuses to know: anything the declarations do not say.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from quire.serve.anthropic.message_batches import MessageBatchRequest
from quire.serve.anthropic.message_bodies import CountTokensRequest, MessagesRequest
from quire.serve.core.fields import fields_of
from quire.serve.core.known_extensions import ALIASES, IGNORED
from quire.serve.ollama.ollama_bodies import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaOptions,
    OllamaShowRequest,
)
from quire.serve.openai.batch_bodies import BatchRequest
from quire.serve.openai.embeddings import EmbeddingRequest
from quire.serve.openai.request_bodies import ChatRequest, CompletionRequest
from quire.serve.openai.responses_bodies import ResponseRequest
from quire.serve.openai.scoring import ClassifyRequest, RerankRequest, ScoreRequest
from quire.serve.openai.tokenize import DetokenizeRequest, TokenizeRequest
from quire.serve.openai.upload_parts import CompleteRequest, UploadRequest

BEGIN, END = "<!-- fields: begin (python -m quire.serve.http.field_tables docs/api.md) -->", "<!-- fields: end -->"

BODIES: dict[str, type[msgspec.Struct]] = {
    "POST /v1/chat/completions": ChatRequest,
    "POST /v1/completions": CompletionRequest,
    "POST /v1/responses": ResponseRequest,
    "POST /v1/embeddings": EmbeddingRequest,
    "POST /v1/score": ScoreRequest,
    "POST /v1/rerank": RerankRequest,
    "POST /classify": ClassifyRequest,
    "POST /v1/batches": BatchRequest,
    "POST /v1/uploads": UploadRequest,
    "POST /v1/uploads/{id}/complete": CompleteRequest,
    "POST /v1/messages": MessagesRequest,
    "POST /v1/messages/count_tokens": CountTokensRequest,
    "POST /v1/messages/batches": MessageBatchRequest,
    "POST /api/chat": OllamaChatRequest,
    "POST /api/generate": OllamaGenerateRequest,
    "options of /api/chat and /api/generate": OllamaOptions,
    "POST /api/embed": OllamaEmbedRequest,
    "POST /api/embeddings": OllamaEmbeddingsRequest,
    "POST /api/show": OllamaShowRequest,
    "POST /tokenize": TokenizeRequest,
    "POST /detokenize": DetokenizeRequest,
}


def tables() -> str:
    parts = []
    for title, body in BODIES.items():
        rows = [f"| `{field.name}` | {field.kind} | {field.note} |" for field in fields_of(body)]
        parts.append("\n".join([f"#### {title}", "", "| field | | |", "| --- | --- | --- |", *rows]))
    return "\n\n".join([*parts, *_others()])


def _others() -> list[str]:
    """Fields that other servers have: what they are here, or that they are left out."""
    ours = [
        f"| `{name}` | {' or '.join(f'`{alias.name}`' for alias in aliases)} |" for name, aliases in ALIASES.items()
    ]
    ignored = [f"| {owner} | {', '.join(f'`{name}`' for name in names)} |" for owner, names in IGNORED.items()]
    return [
        "\n".join(["#### Other names of fields", "", "| field | is taken for |", "| --- | --- |", *ours]),
        "\n".join(["#### Extensions of others that are ignored", "", "| of | fields |", "| --- | --- |", *ignored]),
    ]


def rewritten(page: str) -> str:
    """The page with its tables as the code has them now."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{after}"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(rewritten(path.read_text(encoding="utf-8")), encoding="utf-8")
