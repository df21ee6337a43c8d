"""POST /v1/embeddings: the pooled hidden state of any model. Refuses to know: how it is computed."""

from __future__ import annotations

import array
import base64
import sys
from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.serve.core.embedding import embed, prompts_of
from quire.serve.core.fields import Int, Name, extension, noted, unused
from quire.serve.core.generation import Serving
from quire.serve.http.http_io import decode, json, read_body, until_gone
from quire.serve.http.openapi import answers
from quire.serve.openai.request_bodies import Truncation
from quire.serve.openai.response_bodies import Embedding, EmbeddingList, EmbeddingUsage


class EmbeddingRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/embeddings. `input` is text, token ids, or a list of either."""

    model: Annotated[Name, noted("may be left out")] | None = None
    input: str | list[str | Int | list[Int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, noted("the first so many, scaled to length 1 again", ge=1, le=1 << 20)] | None = None
    user: Annotated[str, unused()] | None = None
    truncate_prompt_tokens: Truncation | None = None
    normalize: Annotated[bool, extension("scale to length 1; default as the model's files say, or true")] | None = None
    pooling: (
        Annotated[
            Literal["mean", "last", "cls"],
            extension("all tokens' mean, the last one's state, of encoders the first's; default as files say, or mean"),
        ]
        | None
    ) = None


_DECODER = msgspec.json.Decoder(EmbeddingRequest)


def encoded(vector: list[float]) -> str:
    """Little-endian 32-bit floats in base64, as OpenAI's client reads them."""
    numbers = array.array("f", vector)
    if sys.byteorder == "big":
        numbers.byteswap()
    return base64.b64encode(numbers.tobytes()).decode()


async def answer(serving: Serving, body: EmbeddingRequest) -> bytes:
    prompts = prompts_of(body.input, "input")
    vectors, tokens = await embed(
        serving,
        prompts,
        pooling=body.pooling,
        normalize=body.normalize,
        dimensions=body.dimensions,
        most=body.truncate_prompt_tokens,
    )
    in_base64 = body.encoding_format == "base64"
    data = [Embedding(index, encoded(vector) if in_base64 else vector) for index, vector in enumerate(vectors)]
    return json(EmbeddingList(data, serving.model_name, EmbeddingUsage(tokens, tokens)))


async def parse(serving: Serving, raw: bytes) -> EmbeddingRequest:
    body = decode(_DECODER, raw)
    await serving.use_model(body.model)
    return body


async def whole(serving: Serving, raw: bytes) -> bytes:
    """A body to its answer, without HTTP: what batches use."""
    return await answer(serving, await parse(serving, raw))


def router(serving: Serving) -> APIRouter:
    routes = APIRouter(tags=["OpenAI"])

    @routes.post(
        "/v1/embeddings",
        summary="Embed texts",
        openapi_extra=answers(EmbeddingList, takes=EmbeddingRequest),
    )
    async def embeddings(request: Request) -> Response:
        body = await parse(serving, await read_body(request, serving.max_body))
        return Response(await until_gone(request.receive, answer(serving, body)), media_type="application/json")

    return routes
