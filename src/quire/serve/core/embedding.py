"""Prompts in their four forms, and the pooled hidden states or scores of classes of several. Refuses to know: any API's
names for things."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

from msgspec.structs import replace

from quire.serve.core.context import current
from quire.serve.core.generation import Serving, kept_tail, off_loop
from quire.types.errors import InputError
from quire.types.request import Request
from quire.types.sampling_params import SamplingParams

MAX_PROMPTS = 2048  # prompts in one body, as with OpenAI
AT_ONCE = 64  # inputs of one request in the engine together


def prompts_of(given: str | list[str | int | list[int]], param: str = "prompt") -> list[str | list[int]]:
    """The four forms of a prompt as a list of prompts."""
    prompts: list[str | list[int]]
    if isinstance(given, str):
        prompts = [given]
    elif given and all(isinstance(item, int) for item in given):
        prompts = [cast("list[int]", given)]
    elif all(isinstance(item, str) for item in given) or all(isinstance(item, list) for item in given):
        prompts = cast("list[str | list[int]]", given)
    else:
        raise InputError(f"{param} mixes text and token ids; send one kind per request", param=param)
    if not prompts or not all(prompts):
        raise InputError(f"{param} is empty; give at least one character or token id", param=param)
    if len(prompts) > MAX_PROMPTS:
        raise InputError(f"{param} takes at most {MAX_PROMPTS} prompts, got {len(prompts)}", param=param)
    return prompts


async def embed(
    serving: Serving,
    prompts: list[str | list[int]],
    *,
    pooling: str | None = None,
    normalize: bool | None = None,
    dimensions: int | None = None,
    most: int | None = None,
) -> tuple[list[list[float]], int]:
    """(a vector for each prompt, tokens of all prompts). Pooled, and scaled to length 1, as the model's files say if
    nothing else is said. `most`: tokens to keep of each, as `tokens_of`."""
    inputs = await off_loop(sum(map(len, prompts)), lambda: [tokens_of(serving, prompt, most) for prompt in prompts])

    async def one(index: int, **where: Any) -> list[float]:
        vector, _ = await serving.frontend.embed(inputs[index], pooling, normalize, **where)
        return vector if dimensions is None else shortened(vector, dimensions)

    return await pooled(serving, [len(tokens) for tokens in inputs], one)


async def classify(
    serving: Serving, texts: Sequence[tuple[str | list[int], str | None]], most: int | None = None
) -> tuple[list[list[float]], int]:
    """(probabilities of the model's classes for each text or pair of texts, tokens of all). `most`: tokens to keep; -1:
    as many as the model takes."""
    frontend, pooling = serving.frontend, serving.frontend.client.info.pooling

    def work() -> list[Request]:
        return [frontend.prepare_classes(one, other, most=most) for one, other in texts]

    requests = await off_loop(sum(len(one) + len(other or "") for one, other in texts), work)

    async def one(index: int, **where: Any) -> list[float]:
        scores, _ = await frontend.pooled(replace(requests[index], **where))
        return pooling.probabilities(scores)

    return await pooled(serving, [len(request.prompt) for request in requests], one)


def tokens_of(serving: Serving, prompt: str | list[int], most: int | None) -> list[int]:
    """Of a prompt that is pooled. Of more than `most` (-1: as many as fit) a decoder reads the last, an encoder the
    first, and what it wants around them."""
    frontend, info = serving.frontend, serving.frontend.client.info
    if info.pooling.encoder:
        return frontend.pooled_tokens(prompt, most)
    tokens = frontend.text.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    return kept_tail(tokens, most, SamplingParams(max_tokens=1), info)


async def pooled(
    serving: Serving, lengths: list[int], one: Callable[..., Awaitable[list[float]]]
) -> tuple[list[list[float]], int]:
    """What `one` gives for each index of inputs of so many tokens, some at once, charged to the caller; and tokens of
    all."""
    context = current()
    tokens = sum(lengths)
    if context.permit is not None:
        serving.admission.charge(context.permit, tokens)
        serving.admission.start(context.permit)
        context.permit.used += tokens

    vectors: list[list[float]] = [[] for _ in lengths]
    left = iter(range(len(lengths)))

    async def some() -> None:
        for index in left:
            vectors[index] = await one(index, salt=context.salted(""), tenant=context.key.name, lora=context.lora)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(AT_ONCE, len(lengths))):
                group.create_task(some())
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return vectors, tokens


def shortened(vector: list[float], dimensions: int) -> list[float]:
    if dimensions > len(vector):
        raise InputError(f"dimensions is {dimensions} but this model has {len(vector)}", param="dimensions")
    length = math.sqrt(sum(value * value for value in vector[:dimensions])) or 1.0
    return [value / length for value in vector[:dimensions]]
