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

from quire.serve.answers import Embedding, EmbeddingList, EmbeddingUsage
from quire.serve.completions import prompts_of
from quire.serve.events import json
from quire.serve.fields import Int, Name, extension, noted, unused
from quire.serve.generation import Serving, off_loop
from quire.serve.openapi import answers
from quire.serve.wire import decode, read_body, until_gone
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
        Annotated[Literal["last", "mean"], extension("the last token's state (default) or all tokens' mean")] | None
    ) = None
    normalize: Annotated[bool, extension("scale vectors to length 1 (default)")] | None = None


_DECODER = msgspec.json.Decoder(EmbeddingRequest)


async def embed(
    serving: Serving,
    prompts: list[str | list[int]],
    *,
    pooling: str = "last",
    dimensions: int | None = None,
    normalize: bool = True,
) -> tuple[list[list[float]], int]:
    """(a vector for each prompt, tokens of all prompts)."""
    encode = serving.frontend.text.tokenizer.encode

    def work() -> list[list[int]]:
        return [encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]

    gate = asyncio.Semaphore(AT_ONCE)

    async def one(prompt: list[int]) -> tuple[list[float], int]:
        async with gate:
            return await serving.frontend.embed(prompt, pooling)

    inputs = await off_loop(sum(map(len, prompts)), work)
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(prompt)) for prompt in inputs]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    found = [task.result() for task in tasks]
    return [_shaped(vector, dimensions, normalize) for vector, _ in found], sum(count for _, count in found)


def _shaped(vector: list[float], dimensions: int | None, normalize: bool) -> list[float]:
    if dimensions is not None:
        if dimensions > len(vector):
            message = f"dimensions is {dimensions} but this model has {len(vector)}"
            raise InputError(message, param="dimensions")
        vector = vector[:dimensions]
    length = math.sqrt(sum(value * value for value in vector)) if normalize else 1.0
    return [value / length for value in vector] if length else vector


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
        pooling=body.pooling or "last",
        dimensions=body.dimensions,
        normalize=body.normalize is not False,
    )
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
