"""POST /v1/embeddings: the pooled hidden state of any decoder. Refuses to know: how it is computed."""

from __future__ import annotations

import array
import asyncio
import base64
import math
import sys
from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.serve.core.context import current
from quire.serve.core.fields import Int, Name, extension, noted, unused
from quire.serve.core.generation import Serving, off_loop
from quire.serve.http.http_io import decode, read_body, until_gone
from quire.serve.http.openapi import answers
from quire.serve.openai.completions import prompts_of
from quire.serve.openai.response_bodies import Embedding, EmbeddingList, EmbeddingUsage
from quire.serve.openai.sse import json
from quire.types.errors import InputError

AT_ONCE = 64  # inputs of one request in the engine together


class EmbeddingRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/embeddings. `input` is text, token ids, or a list of either."""

    model: Name
    input: str | list[str | Int | list[Int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, noted("the first so many, scaled to length 1 again", ge=1, le=1 << 20)] | None = None
    user: Annotated[str, unused()] | None = None
    pooling: (
        Annotated[Literal["mean", "last"], extension("all tokens' mean (default) or the last one's state")] | None
    ) = None


_DECODER = msgspec.json.Decoder(EmbeddingRequest)


async def embed(
    serving: Serving, prompts: list[str | list[int]], *, pooling: str = "mean", dimensions: int | None = None
) -> tuple[list[list[float]], int]:
    """(a vector of length 1 for each prompt, tokens of all prompts)."""
    encode = serving.frontend.text.tokenizer.encode

    def work() -> list[list[int]]:
        return [encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]

    inputs = await off_loop(sum(map(len, prompts)), work)
    context = current()
    tokens = sum(map(len, inputs))
    if context.permit is not None:
        serving.admission.charge(context.permit, tokens)
        serving.admission.start(context.permit)
        context.permit.used += tokens

    vectors: list[list[float]] = [[] for _ in inputs]
    left = iter(enumerate(inputs))

    async def some() -> None:
        for index, prompt in left:
            vector, _ = await serving.frontend.embed(prompt, pooling, salt=context.salted(""))
            vectors[index] = vector if dimensions is None else shortened(vector, dimensions)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(AT_ONCE, len(inputs))):
                group.create_task(some())
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return vectors, tokens


def shortened(vector: list[float], dimensions: int) -> list[float]:
    if dimensions > len(vector):
        raise InputError(f"dimensions is {dimensions} but this model has {len(vector)}", param="dimensions")
    length = math.sqrt(sum(value * value for value in vector[:dimensions])) or 1.0
    return [value / length for value in vector[:dimensions]]


def encoded(vector: list[float]) -> str:
    """Little-endian 32-bit floats in base64, as OpenAI's client reads them."""
    numbers = array.array("f", vector)
    if sys.byteorder == "big":
        numbers.byteswap()
    return base64.b64encode(numbers.tobytes()).decode()


async def answer(serving: Serving, body: EmbeddingRequest) -> bytes:
    prompts = prompts_of(body.input, "input")
    vectors, tokens = await embed(serving, prompts, pooling=body.pooling or "mean", dimensions=body.dimensions)
    in_base64 = body.encoding_format == "base64"
    data = [Embedding(index, encoded(vector) if in_base64 else vector) for index, vector in enumerate(vectors)]
    return json(EmbeddingList(data, serving.frontend.model_name, EmbeddingUsage(tokens, tokens)))


def parse(serving: Serving, raw: bytes) -> EmbeddingRequest:
    body = decode(_DECODER, raw)
    serving.check_model(body.model)
    return body


async def whole(serving: Serving, raw: bytes) -> bytes:
    """A body to its answer, without HTTP: what batches use."""
    return await answer(serving, parse(serving, raw))


def router(serving: Serving) -> APIRouter:
    routes = APIRouter(tags=["OpenAI"])

    @routes.post(
        "/v1/embeddings",
        summary="Embed texts",
        openapi_extra=answers(EmbeddingList, takes=EmbeddingRequest),
    )
    async def embeddings(request: Request) -> Response:
        body = parse(serving, await read_body(request, serving.max_body))
        return Response(await until_gone(request.receive, answer(serving, body)), media_type="application/json")

    return routes
