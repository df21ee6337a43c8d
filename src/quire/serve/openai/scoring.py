"""POST /v1/score, /v1/rerank and /classify (and the other paths they have), in the shapes of vLLM, Jina and Cohere.
Refuses to know: how texts are scored."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Coroutine
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter
from msgspec import UNSET, Meta, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from quire.serve.core.embedding import MAX_PROMPTS, classify, embed, prompts_of
from quire.serve.core.fields import Int, Name, noted, unused
from quire.serve.core.generation import Serving
from quire.serve.http.http_io import decode, json, read_body, until_gone
from quire.serve.http.openapi import answers
from quire.text.pair_scores import cosine, ranked, scores_pairs, text_pairs
from quire.types.errors import InputError

Texts = str | Annotated[list[str], Meta(min_length=1, max_length=MAX_PROMPTS)]
Truncation = Annotated[int, noted("keep so many tokens; -1: as many as the model takes", ge=-1, le=1 << 30)]


class ScoreRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/score: one text and others, or as many on each side."""

    text_1: Texts
    text_2: Texts
    model: Annotated[Name, noted("may be left out")] | None = None
    truncate_prompt_tokens: Truncation | None = None
    user: Annotated[str, unused()] | None = None


class Document(msgspec.Struct):
    text: str


class RerankRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/rerank."""

    query: str
    documents: Annotated[list[str | Document], Meta(min_length=1, max_length=MAX_PROMPTS)]
    model: Annotated[Name, noted("may be left out")] | None = None
    top_n: Annotated[int, noted("only the best so many; 0: all", ge=0, le=1 << 30)] | None = None
    return_documents: Annotated[bool, noted("default true")] | None = None
    truncate_prompt_tokens: Truncation | None = None
    max_tokens_per_doc: Annotated[int, noted("Cohere's name for it", ge=1, le=1 << 30)] | None = None
    user: Annotated[str, unused()] | None = None


class ClassifyRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /classify. `input` is text, token ids, or a list of either."""

    input: str | list[str | Int | list[Int]]
    model: Annotated[Name, noted("may be left out")] | None = None
    truncate_prompt_tokens: Truncation | None = None
    user: Annotated[str, unused()] | None = None


class ScoringUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0


class Score(msgspec.Struct):
    index: int
    score: float
    object: Literal["score"] = "score"


class ScoreList(msgspec.Struct):
    id: str
    created: int
    model: str
    data: list[Score]
    usage: ScoringUsage
    object: Literal["list"] = "list"


class RerankResult(msgspec.Struct):
    index: int
    relevance_score: float
    document: Document | UnsetType = UNSET


class RerankList(msgspec.Struct):
    id: str
    model: str
    usage: ScoringUsage
    results: list[RerankResult]


class Classification(msgspec.Struct):
    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassificationList(msgspec.Struct):
    id: str
    created: int
    model: str
    data: list[Classification]
    usage: ScoringUsage
    object: Literal["list"] = "list"


_SCORE = msgspec.json.Decoder(ScoreRequest)
_RERANK = msgspec.json.Decoder(RerankRequest)
_CLASSIFY = msgspec.json.Decoder(ClassifyRequest)


async def pair_scores(
    serving: Serving, pairs: list[tuple[str, str]], most: int | None
) -> tuple[list[float], ScoringUsage]:
    """By a cross-encoder's head if the model has one, else the cosine of embeddings, each text embedded once."""
    if len(pairs) > MAX_PROMPTS:
        raise InputError(f"a request scores at most {MAX_PROMPTS} pairs, got {len(pairs)}")
    if scores_pairs(serving.frontend.client.info.pooling):
        probabilities, tokens = await classify(serving, [(one, other) for one, other in pairs], most)
        return [each[0] for each in probabilities], ScoringUsage(tokens, tokens)
    texts = list(dict.fromkeys(text for pair in pairs for text in pair))
    vectors, tokens = await embed(serving, prompts_of([*texts], "text"), normalize=True, most=most)
    by_text = dict(zip(texts, vectors, strict=True))
    return [cosine(by_text[one], by_text[other]) for one, other in pairs], ScoringUsage(tokens, tokens)


async def score(serving: Serving, raw: bytes) -> ScoreList:
    body = decode(_SCORE, raw)
    await serving.use_model(body.model)
    pairs = text_pairs(body.text_1, body.text_2)
    scores, usage = await pair_scores(serving, pairs, body.truncate_prompt_tokens)
    data = [Score(index, value) for index, value in enumerate(scores)]
    return ScoreList(f"score-{secrets.token_hex(12)}", int(time.time()), serving.frontend.model_name, data, usage)


async def rerank(serving: Serving, raw: bytes) -> RerankList:
    body = decode(_RERANK, raw)
    await serving.use_model(body.model)
    documents = [each if isinstance(each, str) else each.text for each in body.documents]
    most = body.max_tokens_per_doc if body.truncate_prompt_tokens is None else body.truncate_prompt_tokens
    scores, usage = await pair_scores(serving, text_pairs(body.query, documents), most)
    shown = body.return_documents is not False
    results = [
        RerankResult(index, value, Document(documents[index]) if shown else UNSET)
        for index, value in ranked(scores, body.top_n or 0)
    ]
    return RerankList(f"rerank-{secrets.token_hex(12)}", serving.frontend.model_name, usage, results)


async def classes(serving: Serving, raw: bytes) -> ClassificationList:
    body = decode(_CLASSIFY, raw)
    await serving.use_model(body.model)
    prompts = prompts_of(body.input, "input")
    found, tokens = await classify(serving, [(prompt, None) for prompt in prompts], body.truncate_prompt_tokens)
    labels = serving.frontend.client.info.pooling.labels
    data = [
        Classification(index, labels[probs.index(max(probs))], probs, len(probs)) for index, probs in enumerate(found)
    ]
    name, usage = serving.frontend.model_name, ScoringUsage(tokens, tokens)
    return ClassificationList(f"classify-{secrets.token_hex(12)}", int(time.time()), name, data, usage)


Answer = Callable[[Serving, bytes], Coroutine[Any, Any, msgspec.Struct]]
Body = type[msgspec.Struct]


def router(serving: Serving) -> APIRouter:
    routes = APIRouter(tags=["scores"])

    def route(path: str, answer: Answer, summary: str, takes: Body, gives: Body) -> None:
        async def handle(request: Request) -> Response:
            raw = await read_body(request, serving.max_body)
            found = await until_gone(request.receive, answer(serving, raw))
            return Response(json(found), media_type="application/json")

        routes.post(path, summary=summary, openapi_extra=answers(gives, takes=takes), name=path.strip("/"))(handle)

    for path in ("/v1/score", "/score"):
        route(path, score, "Score pairs of texts", ScoreRequest, ScoreList)
    for path in ("/v1/rerank", "/rerank", "/v2/rerank"):
        route(path, rerank, "Order documents by a query", RerankRequest, RerankList)
    route("/classify", classes, "Classify texts", ClassifyRequest, ClassificationList)
    return routes
