"""POST /v1/completions.

Refuses to know: chat, templates, how tokens are made.
"""

from __future__ import annotations

import time
import uuid
from collections import defaultdict
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import cast

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.serve.core.constraints import grammar_of
from quire.serve.core.generation import (
    Collected,
    Generation,
    Serving,
    check,
    collect,
    naming,
    off_loop,
    preparing,
    sampling_params,
)
from quire.serve.http.http_io import EventStream, decode, read_body, until_gone
from quire.serve.http.openapi import generates
from quire.serve.openai.logprob_shapes import CompletionLogprobsBuilder, prompt_logprobs, scored_prompt
from quire.serve.openai.request_bodies import CompletionRequest
from quire.serve.openai.response_bodies import Completion, CompletionChoice, CompletionLogprobs, Covered, PromptLogprobs
from quire.serve.openai.sse import Chunks, json, worth_sending
from quire.types.errors import InputError
from quire.types.outputs import Delta
from quire.types.plan import TokenLogprobs
from quire.types.request import Request as EngineRequest
from quire.types.sampling_params import SamplingParams

MAX_PROMPTS = 1024  # prompts in one body

_DECODER = msgspec.json.Decoder(CompletionRequest)


def completion_params(body: CompletionRequest) -> SamplingParams:
    n = 1 if body.n is None else body.n
    if body.stream and body.best_of not in (None, n):
        raise InputError("which choice is best is known at the end: best_of cannot be streamed", param="best_of")
    best_of = body.best_of if body.best_of != n else None
    params = sampling_params(body, best_of=best_of, logprobs=body.logprobs, grammar=grammar_of(body)[1])
    if body.echo and body.logprobs is not None and params.prompt_logprobs is None:
        params.prompt_logprobs = body.logprobs
    return params


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


async def prepare(serving: Serving, body: CompletionRequest, id: str) -> list[EngineRequest]:
    prompts = prompts_of(body.prompt)
    params = completion_params(body)

    def work() -> list[EngineRequest]:
        return [
            serving.frontend.prepare(
                prompt,
                params,
                request_id=id if len(prompts) == 1 else f"{id}-{index}",
                priority=body.priority or 0,
                salt=body.cache_salt or "",
                blend=body.blend,
            )
            for index, prompt in enumerate(prompts)
        ]

    with naming(constraint=grammar_of(body)[0]):
        return await off_loop(preparing(sum(map(len, prompts)), params), work)


class Writer:
    """What choices of one request look like: echo, and logprobs whose offsets run through the whole text."""

    def __init__(self, serving: Serving, body: CompletionRequest, requests: list[EngineRequest]):
        self.tokenizer = serving.frontend.text.tokenizer
        self.body = body
        self.requests = requests
        self._builders: dict[int, CompletionLogprobsBuilder] = {}
        self._scores: dict[int, list[TokenLogprobs]] = {}  # logprobs of each prompt

    def note(self, choice: int, scores: list[TokenLogprobs] | None) -> None:
        """Keep a prompt's logprobs: all its choices show them, the first to speak brings them."""
        if scores:
            self._scores.setdefault(self._prompt(choice), scores)

    def piece(self, choice: int, text: str, logprobs: list[TokenLogprobs]) -> tuple[str, CompletionLogprobs | None]:
        """The next piece of a choice: its text and logprobs, after the prompt's own if it is the first."""
        entries: list[TokenLogprobs | int] = [*logprobs]
        if choice not in self._builders:
            builder = self._builders[choice] = CompletionLogprobsBuilder(self.tokenizer)
            if self.body.echo:
                prompt = self._prompt_text(choice)
                builder.echo(self.requests[self._prompt(choice)].prompt, prompt)
                text = prompt + text
                entries = self._scored(choice) + entries
        return text, None if self.body.logprobs is None else self._builders[choice].add(entries)

    def prompt_logprobs(self, choice: int) -> PromptLogprobs:
        return prompt_logprobs(self.tokenizer, self._scored(choice))

    def _prompt(self, choice: int) -> int:
        return choice // self.requests[0].params.n

    def _prompt_text(self, choice: int) -> str:
        prompt = prompts_of(self.body.prompt)[self._prompt(choice)]
        return prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt, skip_special_tokens=False)

    def _scored(self, choice: int) -> list[TokenLogprobs | int]:
        number = self._prompt(choice)
        return scored_prompt(self.requests[number].prompt, self._scores.get(number, []))


def kept(requests: list[EngineRequest], choices: list[Collected]) -> list[int]:
    """Which choices the caller sees, in order: all, or with best_of the likeliest n of each prompt."""
    every = range(len(choices))
    found: list[int] = []
    for number, request in enumerate(requests):
        own = every[number * request.params.n : (number + 1) * request.params.n]
        found += sorted(own, key=lambda i: -choices[i].likelihood)[: request.keep] if request.keep else own
    return found


def completion(
    serving: Serving, id: str, generation: Generation, choices: list[Collected], body: CompletionRequest
) -> bytes:
    writer = Writer(serving, body, generation.requests)
    for index, choice in enumerate(choices):
        writer.note(index, choice.prompt_logprobs)
    out: list[CompletionChoice] = []
    for index in kept(generation.requests, choices):
        choice = choices[index]
        text, logprobs = writer.piece(index, choice.text, choice.logprobs)
        out.append(CompletionChoice(len(out), text, logprobs, choice.finish_reason.value))
        if body.prompt_logprobs is not None:
            out[-1].prompt_logprobs = writer.prompt_logprobs(index)
        if body.return_token_ids:
            out[-1].token_ids = choice.token_ids
            out[-1].covered = Covered(*writer.tokenizer.covered(choice.token_ids, choice.text))
    return json(
        Completion(
            id=id,
            created=int(time.time()),
            model=serving.frontend.model_name,
            system_fingerprint=serving.fingerprint,
            choices=out,
            usage=generation.usage(),
        )
    )


async def stream(
    serving: Serving, id: str, generation: Generation, body: CompletionRequest
) -> AsyncGenerator[bytes, None]:
    writer = Writer(serving, body, generation.requests)
    chunks = Chunks(serving, id, "text_completion", body.stream_options)

    held: defaultdict[int, list[int]] = defaultdict(list)  # ids whose text is not sent yet, by choice

    def event(delta: Delta) -> bytes:
        text, logprobs = writer.piece(delta.branch, delta.text, delta.logprobs or [])
        ids = b',"token_ids":%b' % json(held.pop(delta.branch)) if body.return_token_ids else b""
        return chunks.event(
            b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b%b}'
            % (delta.branch, json(text), json(logprobs), json(delta.finish_reason), ids)
        )

    async with aclosing(generation.deltas()) as batches:
        async for deltas in batches:
            for delta in deltas:
                writer.note(delta.branch, delta.prompt_logprobs)
                held[delta.branch] += delta.token_ids
            if events := [event(delta) for delta in deltas if worth_sending(delta)]:
                yield b"".join(events)
    if chunks.with_usage:
        yield chunks.usage(generation.usage())


def parse(serving: Serving, raw: bytes) -> CompletionRequest:
    body = decode(_DECODER, raw)
    check(serving, body)
    return body


async def begin(serving: Serving, body: CompletionRequest) -> tuple[str, Generation]:
    arrived = time.perf_counter()
    id = f"cmpl-{uuid.uuid4().hex}"
    return id, Generation(serving, await prepare(serving, body, id), arrived, body.deadline_ms)


async def whole(serving: Serving, raw: bytes) -> bytes:
    """A body to its answer, without HTTP: what batches use."""
    body = parse(serving, raw)
    id, generation = await begin(serving, body)
    return completion(serving, id, generation, await collect(generation), body)


def router(serving: Serving) -> APIRouter:
    routes = APIRouter(tags=["OpenAI"])

    @routes.post(
        "/v1/completions", summary="Create a completion", openapi_extra=generates(CompletionRequest, Completion)
    )
    async def completions(request: Request) -> Response:
        body = parse(serving, await read_body(request, serving.max_body))
        id, generation = await begin(serving, body)
        if body.stream:
            return EventStream(stream(serving, id, generation, body))
        choices = await until_gone(request.receive, collect(generation))
        return Response(completion(serving, id, generation, choices, body), media_type="application/json")

    return routes
