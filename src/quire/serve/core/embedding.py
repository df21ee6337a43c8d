"""Prompts in their four forms, and the pooled hidden states of several. Refuses to know: any API's names for things."""

from __future__ import annotations

import asyncio
import math
from typing import cast

from quire.serve.core.context import current
from quire.serve.core.generation import Serving, kept_tail, off_loop
from quire.types.errors import InputError
from quire.types.sampling_params import SamplingParams

MAX_PROMPTS = 1024  # prompts in one body
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
    pooling: str = "mean",
    dimensions: int | None = None,
    most: int | None = None,
) -> tuple[list[list[float]], int]:
    """(a vector of length 1 for each prompt, tokens of all prompts). `most`: tokens to keep of each, as `kept_tail`."""
    encode, info = serving.frontend.text.tokenizer.encode, serving.frontend.client.info
    params = SamplingParams(max_tokens=1)

    def work() -> list[list[int]]:
        tokens = [encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
        return [kept_tail(prompt, most, params, info) for prompt in tokens]

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
            vector, _ = await serving.frontend.embed(
                prompt, pooling, salt=context.salted(""), tenant=context.key.name, lora=context.lora
            )
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
