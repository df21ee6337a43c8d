"""What Ollama's API tells of models, and its embeddings: /api/tags, /api/ps, /api/show, /api/version, /api/embed.

Refuses to know: other models than the one that is served; answers (ollama).
"""

from __future__ import annotations

import time
from datetime import UTC, datetime

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire import __version__
from quire.serve.core.embedding import embed, prompts_of
from quire.serve.core.generation import Serving, off_loop
from quire.serve.http.http_io import decode, json, read_body, until_gone
from quire.serve.http.openapi import answers
from quire.serve.ollama.generate import check, check_model
from quire.serve.ollama.ollama_bodies import (
    OllamaDetails,
    OllamaEmbedAnswer,
    OllamaEmbeddingsAnswer,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaError,
    OllamaModel,
    OllamaModels,
    OllamaShowAnswer,
    OllamaShowRequest,
    OllamaVersion,
)
from quire.text import Tokenizer

_EMBED = msgspec.json.Decoder(OllamaEmbedRequest)
_EMBEDDINGS = msgspec.json.Decoder(OllamaEmbeddingsRequest)
_SHOW = msgspec.json.Decoder(OllamaShowRequest)


def details(serving: Serving) -> OllamaDetails:
    info = serving.frontend.client.info
    return OllamaDetails(family=info.model, families=[info.model], quantization_level=info.dtype)


def listed(serving: Serving) -> OllamaModel:
    name = serving.frontend.model_name
    return OllamaModel(
        name=name, model=name, modified_at=started(serving), digest=serving.fingerprint, details=details(serving)
    )


def running(serving: Serving) -> OllamaModel:
    model = listed(serving)
    model.expires_at = "9999-12-31T23:59:59Z"  # it stays as long as the server does
    model.size_vram = 0
    model.context_length = serving.frontend.client.info.max_model_len
    return model


def started(serving: Serving) -> str:
    return datetime.fromtimestamp(serving.created, UTC).isoformat().replace("+00:00", "Z")


def shown(serving: Serving) -> OllamaShowAnswer:
    info, text = serving.frontend.client.info, serving.frontend.text
    return OllamaShowAnswer(
        template=text.template,
        details=details(serving),
        model_info={
            "general.name": info.model,
            "general.context_length": info.max_model_len,
            "general.vocabulary_size": info.vocab_size,
        },
        capabilities=["completion", "embedding", "tools", *(["thinking"] if text.reasons else [])],
        modified_at=started(serving),
    )


async def embedded(serving: Serving, body: OllamaEmbedRequest) -> OllamaEmbedAnswer:
    begun = time.perf_counter()
    inputs = prompts_of(body.input, "input")  # type: ignore[arg-type]
    room = serving.frontend.client.info.max_model_len - 1

    def work() -> list[str | list[int]]:
        tokenizer = serving.frontend.text.tokenizer.up_to(8 * room)
        return [_beginning(tokenizer, text, room) for text in inputs if isinstance(text, str)]

    prompts = inputs if body.truncate is False else await off_loop(sum(map(len, inputs)), work)
    vectors, tokens = await embed(serving, prompts, dimensions=body.dimensions)
    return OllamaEmbedAnswer(
        model=serving.frontend.model_name,
        embeddings=vectors,
        total_duration=int((time.perf_counter() - begun) * 1e9),
        prompt_eval_count=tokens,
    )


def _beginning(tokenizer: Tokenizer, text: str, count: int) -> list[int]:
    """The first so many tokens of a text, which may be much longer."""
    characters = 4 * count
    while True:
        tokens = tokenizer.encode(text[:characters])
        if len(tokens) > count + 16 or characters >= len(text):  # beyond the cut they may not be the whole text's
            return tokens[:count]
        characters *= 2


def router(serving: Serving) -> APIRouter:
    routes = APIRouter(tags=["Ollama"])

    def reply(answer: msgspec.Struct) -> Response:
        return Response(json(answer), media_type="application/json")

    @routes.get("/api/tags", summary="List models", openapi_extra=answers(OllamaModels, error=OllamaError))
    async def tags() -> Response:
        return reply(OllamaModels([listed(serving)]))

    @routes.get("/api/ps", summary="List loaded models", openapi_extra=answers(OllamaModels, error=OllamaError))
    async def ps() -> Response:
        return reply(OllamaModels([running(serving)]))

    @routes.get(
        "/api/version", summary="This server's version", openapi_extra=answers(OllamaVersion, error=OllamaError)
    )
    async def version() -> Response:
        return reply(OllamaVersion(__version__))

    @routes.post(
        "/api/show",
        summary="Describe a model",
        openapi_extra=answers(OllamaShowAnswer, takes=OllamaShowRequest, error=OllamaError),
    )
    async def show(request: Request) -> Response:
        check_model(serving, decode(_SHOW, await read_body(request, serving.max_body)).model)
        return reply(shown(serving))

    @routes.post(
        "/api/embed",
        summary="Embed texts",
        openapi_extra=answers(OllamaEmbedAnswer, takes=OllamaEmbedRequest, error=OllamaError),
    )
    async def embed_route(request: Request) -> Response:
        body = decode(_EMBED, await read_body(request, serving.max_body))
        check(serving, body)
        return reply(await until_gone(request.receive, embedded(serving, body)))

    @routes.post(
        "/api/embeddings",
        summary="Embed one text",
        openapi_extra=answers(OllamaEmbeddingsAnswer, takes=OllamaEmbeddingsRequest, error=OllamaError),
    )
    async def embeddings(request: Request) -> Response:
        body = decode(_EMBEDDINGS, await read_body(request, serving.max_body))
        check(serving, body)
        vectors, _ = await until_gone(request.receive, embed(serving, [body.prompt]))
        return reply(OllamaEmbeddingsAnswer(vectors[0]))

    return routes
