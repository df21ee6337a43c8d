"""What Ollama's API tells of models, and its embeddings: /api/tags, /api/ps, /api/show, /api/version, /api/embed.

Refuses to know: answers (generate), what is done to model files (model_admin).
"""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire import __version__, assets
from quire.engine.model_pool import ModelState
from quire.serve.core.embedding import embed, prompts_of
from quire.serve.core.generation import Serving, off_loop
from quire.serve.core.model_facts import ModelFacts, facts_of, text_of
from quire.serve.http.http_io import decode, json, read_body, until_gone
from quire.serve.http.openapi import answers
from quire.serve.ollama.generate import check, known_name, use_model
from quire.serve.ollama.model_files import Digests, parameter_size
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
from quire.text import TextModel, Tokenizer
from quire.types.messages import WeightsInfo

_EMBED = msgspec.json.Decoder(OllamaEmbedRequest)
_EMBEDDINGS = msgspec.json.Decoder(OllamaEmbeddingsRequest)
_SHOW = msgspec.json.Decoder(OllamaShowRequest)

NEVER = "9999-12-31T23:59:59Z"  # it stays as long as the server does


def details(weights: WeightsInfo) -> OllamaDetails:
    family = weights.architecture
    return OllamaDetails(
        format=weights.kind,
        family=family,
        families=[family] if family else [],
        parameter_size=parameter_size(weights.parameters),
        quantization_level=weights.quantisation,
    )


def listed(serving: Serving, facts: ModelFacts, digest: str) -> list[OllamaModel]:
    """A model that is served, and each of its adapters."""
    weights, when = facts.weights, modified(serving, facts)
    names = [facts.name, *serving.adapter_names(facts.name)]
    return [
        OllamaModel(
            name=name,
            model=name,
            modified_at=when,
            size=weights.bytes,
            digest=digest,
            details=details(weights),
        )
        for name in names
    ]


def cached(serving: Serving) -> list[tuple[str, OllamaModel]]:
    """Models of the cache that are not served, with their paths."""
    out = []
    for found in assets.list_models():
        model = OllamaModel(
            name=found.name,
            model=found.name,
            modified_at=_time(found.path.stat().st_mtime),
            size=found.size,
            digest="",
            details=details(found.weights()),
        )
        if found.name not in serving.models.names:
            out.append((str(found.path), model))
    return out


def running(serving: Serving, facts: ModelFacts, state: ModelState, digest: str) -> list[OllamaModel]:
    models = listed(serving, facts, digest)
    for model in models:
        model.expires_at = NEVER if state.expires_at is None else _time(state.expires_at)
        model.size_vram = model.size if facts.device.startswith("cuda") else 0
        model.context_length = facts.max_model_len
    return models


def modified(serving: Serving, facts: ModelFacts) -> str:
    """When the model's file was written; where there is none, when the server started."""
    path = facts.weights.path
    return _time(Path(path).stat().st_mtime if path and Path(path).exists() else serving.created)


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def shown(serving: Serving, facts: ModelFacts, text: TextModel) -> OllamaShowAnswer:
    weights, family, longest = facts.weights, facts.weights.architecture or "general", facts.max_model_len
    vocabulary = facts.vocab_size or text.tokenizer.vocab_size
    return OllamaShowAnswer(
        modelfile=f'FROM {facts.name}\nTEMPLATE """{text.template}"""\n',
        template=text.template,
        details=details(weights),
        model_info={
            "general.architecture": weights.architecture,
            "general.name": facts.model,
            "general.parameter_count": weights.parameters,
            "general.context_length": longest,
            "general.vocabulary_size": vocabulary,
            f"{family}.context_length": weights.context_length or longest,
            f"{family}.vocab_size": vocabulary,
        },
        capabilities=["completion", "embedding", "tools", *(["thinking"] if text.reasons else [])],
        modified_at=modified(serving, facts),
    )


async def embedded(serving: Serving, body: OllamaEmbedRequest) -> OllamaEmbedAnswer:
    begun = time.perf_counter()
    inputs = prompts_of(body.input, "input") if body.input else []  # type: ignore[arg-type]
    room = serving.frontend.client.info.max_model_len - 1

    def work() -> list[str | list[int]]:
        tokenizer = serving.frontend.text.tokenizer.up_to(8 * room)
        return [_beginning(tokenizer, text, room) for text in inputs if isinstance(text, str)]

    prompts = inputs if body.truncate is False else await off_loop(sum(map(len, inputs)), work)
    vectors, tokens = await embed(serving, prompts, dimensions=body.dimensions)
    return OllamaEmbedAnswer(
        model=serving.model_name,
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
    digests = Digests()

    def reply(answer: msgspec.Struct) -> Response:
        return Response(json(answer), media_type="application/json")

    @routes.head("/api/tags", include_in_schema=False)
    @routes.get("/api/tags", summary="List models", openapi_extra=answers(OllamaModels, error=OllamaError))
    async def tags() -> Response:
        models: list[OllamaModel] = []
        for name in serving.models.names:
            facts = await facts_of(serving, name)
            models += listed(serving, facts, await digests.of(facts.weights.path))
        if serving.options.model_management:
            for path, model in await asyncio.to_thread(cached, serving):
                model.digest = await digests.of(path)
                models.append(model)
        return reply(OllamaModels(models))

    @routes.get("/api/ps", summary="List loaded models", openapi_extra=answers(OllamaModels, error=OllamaError))
    async def ps() -> Response:
        models: list[OllamaModel] = []
        for state in serving.models.states():
            if state.state == "loaded":
                facts = await facts_of(serving, state.name)
                models += running(serving, facts, state, await digests.of(facts.weights.path))
        return reply(OllamaModels(models))

    @routes.head("/api/version", include_in_schema=False)
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
        name = known_name(serving, decode(_SHOW, await read_body(request, serving.max_body)).named())
        facts = await facts_of(serving, serving.find_model(name)[0])
        return reply(shown(serving, facts, await text_of(facts)))

    @routes.post(
        "/api/embed",
        summary="Embed texts",
        openapi_extra=answers(OllamaEmbedAnswer, takes=OllamaEmbedRequest, error=OllamaError),
    )
    async def embed_route(request: Request) -> Response:
        body = decode(_EMBED, await read_body(request, serving.max_body))
        await use_model(serving, body, check(serving, body))
        return reply(await until_gone(request.receive, embedded(serving, body)))

    @routes.post(
        "/api/embeddings",
        summary="Embed one text",
        openapi_extra=answers(OllamaEmbeddingsAnswer, takes=OllamaEmbeddingsRequest, error=OllamaError),
    )
    async def embeddings(request: Request) -> Response:
        body = decode(_EMBEDDINGS, await read_body(request, serving.max_body))
        await use_model(serving, body, check(serving, body))
        vectors, _ = await until_gone(request.receive, embed(serving, [body.prompt] if body.prompt else []))
        return reply(OllamaEmbeddingsAnswer(vectors[0] if vectors else []))

    return routes
