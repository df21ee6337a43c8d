"""POST /v1/completions.

Refuses to know: chat, templates, how tokens are made.
"""

from __future__ import annotations

import time
import uuid
from collections import defaultdict
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.serve.core.embedding import prompts_of
from quire.serve.core.generation import DirectOut, Generation, Serving, collect, naming, off_loop, preparing
from quire.serve.http.http_io import EventStream, decode, json, read_body, until_gone
from quire.serve.http.openapi import generates
from quire.serve.openai.logprob_shapes import CompletionLogprobsBuilder, prompt_logprobs, scored_prompt
from quire.serve.openai.request_bodies import CompletionRequest
from quire.serve.openai.response_bodies import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Covered,
    PromptLogprobs,
    usage_of,
)
from quire.serve.openai.sampling import check, grammar_of, sampling_params
from quire.serve.openai.sse import Chunks, worth_sending
from quire.types.errors import InputError
from quire.types.outputs import Delta, RequestOutput
from quire.types.plan import TokenLogprobs
from quire.types.request import FinishReason
from quire.types.request import Request as EngineRequest
from quire.types.sampling_params import SamplingParams

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


def completion(
    serving: Serving, id: str, generation: Generation, results: list[RequestOutput], body: CompletionRequest
) -> bytes:
    writer = Writer(serving, body, generation.requests)
    out: list[CompletionChoice] = []
    for prompt, result in enumerate(results):
        first = prompt * generation.requests[0].params.n
        writer.note(first, result.prompt_logprobs)
        for choice in result.outputs:
            text, logprobs = writer.piece(first + choice.index, choice.text, choice.logprobs or [])
            finish = choice.finish_reason or FinishReason.LENGTH
            out.append(CompletionChoice(len(out), text, logprobs, finish.value))
            if body.prompt_logprobs is not None:
                out[-1].prompt_logprobs = writer.prompt_logprobs(first)
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
            usage=usage_of(generation),
        )
    )


async def stream(
    serving: Serving, id: str, generation: Generation, body: CompletionRequest, out: DirectOut
) -> AsyncGenerator[bytes, None]:
    writer = Writer(serving, body, generation.requests)
    chunks = Chunks(serving, id, "text_completion", body.stream_options)
    plain = body.logprobs is None and not body.echo and not body.return_token_ids  # nothing but text
    choices = sum(request.params.n for request in generation.requests)
    ends = b',"logprobs":null,"finish_reason":null}'
    frames = [chunks.around(b'{"index":%d,"text":' % choice, ends) for choice in range(choices)]
    held: defaultdict[int, list[int]] = defaultdict(list)  # ids whose text is not sent yet, by choice

    def write(delta: Delta) -> bytes:
        if plain and delta.finish_reason is None:
            before, after = frames[delta.branch]
            return before + json(delta.text) + after if delta.text else b""
        writer.note(delta.branch, delta.prompt_logprobs)
        held[delta.branch] += delta.token_ids
        if not worth_sending(delta):
            return b""
        text, logprobs = writer.piece(delta.branch, delta.text, delta.logprobs or [])
        ids = b',"token_ids":%b' % json(held.pop(delta.branch)) if body.return_token_ids else b""
        return chunks.event(
            b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b%b}'
            % (delta.branch, json(text), json(logprobs), json(delta.finish_reason), ids)
        )

    out.write = write
    async with aclosing(generation.deltas(out)) as batches:
        async for deltas in batches:
            if data := b"".join([write(delta) for delta in deltas]):
                yield data
    if chunks.with_usage:
        yield chunks.usage(usage_of(generation))


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
            out = DirectOut()
            return EventStream(stream(serving, id, generation, body, out), out)
        results = await until_gone(request.receive, collect(generation))
        return Response(completion(serving, id, generation, results, body), media_type="application/json")

    return routes
