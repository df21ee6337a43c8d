"""POST /v1/completions.

Refuses to know: chat, templates, how tokens are made.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from fastapi import APIRouter
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from quire.serve.core.embedding import prompts_of
from quire.serve.core.generation import (
    DirectOut,
    Generation,
    Serving,
    collect,
    kept_tail,
    naming,
    off_loop,
    preparing,
    search,
)
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
from quire.serve.openai.sampling import beam_of, check, grammar_of, sampling_params
from quire.serve.openai.sse import Chunks, worth_sending
from quire.text.fim import infill
from quire.types.errors import InputError
from quire.types.outputs import Delta, RequestOutput
from quire.types.plan import TokenLogprobs
from quire.types.request import FinishReason
from quire.types.request import Request as EngineRequest
from quire.types.sampling_params import SamplingParams

_DECODER = msgspec.json.Decoder(CompletionRequest)


def completion_params(body: CompletionRequest) -> SamplingParams:
    grammar = grammar_of(body, body.response_format)[1]
    params = sampling_params(
        body, logprobs=body.logprobs, grammar=grammar, **({"max_tokens": 1} if scores(body) else {})
    )
    if body.echo and body.logprobs is not None and params.prompt_logprobs is None:
        params.prompt_logprobs = body.logprobs
    return params


def scores(body: CompletionRequest) -> bool:
    """Whether nothing is to be drawn: the prompt alone is wanted, with its logprobs or in the cache."""
    return body.max_tokens == 0


def prompts_in(body: CompletionRequest) -> list[str | list[int]]:
    """What stands before a suffix may be nothing."""
    return [""] if body.suffix and body.prompt == "" else prompts_of(body.prompt)


class Preparing:
    """Prompts to engine requests: filled in, cut, tokenised as the body says."""

    def __init__(self, serving: Serving, body: CompletionRequest):
        self._frontend = serving.frontend
        self._body = body
        self._params = completion_params(body)
        self._beam = beam_of(body, self._params)
        self._prompts = prompts_in(body)

    async def run(self, id: str) -> list[EngineRequest]:
        names = [id] if len(self._prompts) == 1 else [f"{id}-{index}" for index in range(len(self._prompts))]

        def work() -> list[EngineRequest]:
            return [self._request(prompt, name) for prompt, name in zip(self._prompts, names, strict=True)]

        with naming(constraint=grammar_of(self._body, self._body.response_format)[0]):
            return await off_loop(preparing(sum(map(len, self._prompts)), self._params), work)

    def _request(self, prompt: str | list[int], name: str) -> EngineRequest:
        body, params, frontend = self._body, self._params, self._frontend
        where: dict[str, Any] = {"request_id": name, "priority": body.priority or 0, "salt": body.cache_salt or ""}
        if body.suffix:
            prompt, params = self._infill(prompt, body.suffix)
        elif isinstance(prompt, str) and (body.add_special_tokens is False or body.truncate_prompt_tokens is not None):
            prompt = frontend.text.tokenizer.encode(prompt, add_special=body.add_special_tokens is not False)
        if not isinstance(prompt, str):
            prompt = kept_tail(prompt, body.truncate_prompt_tokens, params, frontend.client.info)
        if self._beam is not None:
            return search(frontend, prompt, self._beam, params, **where)
        return frontend.prepare(prompt, params, blend=body.blend, **where)

    def _infill(self, prompt: str | list[int], suffix: str) -> tuple[list[int], SamplingParams]:
        if not isinstance(prompt, str) or self._body.echo or self._body.blend:
            raise InputError("a suffix follows a prompt of text, without echo or blend", param="suffix")
        found = infill(self._frontend.text.tokenizer, prompt, suffix)
        if found is None:
            message = "this model has no fill-in-the-middle tokens, so that nothing can be put before a suffix"
            raise InputError(message, param="suffix", code="unsupported_parameter")
        ends = [*self._params.stop_token_ids, *found.ends]
        return found.prompt, replace(self._params, stop_token_ids=ends)


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
            as_ids = self.body.return_tokens_as_token_ids
            builder = self._builders[choice] = CompletionLogprobsBuilder(self.tokenizer, as_ids)
            if self.body.echo:
                prompt = self._prompt_text(choice)
                builder.echo(self.prompt_ids(choice), prompt)
                text = prompt + text
                entries = self._scored(choice) + entries
        return text, None if self.body.logprobs is None else self._builders[choice].add(entries)

    def prompt_logprobs(self, choice: int) -> PromptLogprobs:
        return prompt_logprobs(self.tokenizer, self._scored(choice))

    def _prompt(self, choice: int) -> int:
        return choice // self.requests[0].params.n

    def _prompt_text(self, choice: int) -> str:
        prompt = prompts_in(self.body)[self._prompt(choice)]
        if isinstance(prompt, str) and self.body.truncate_prompt_tokens is None:
            return prompt
        return self.tokenizer.decode(self.prompt_ids(choice), skip_special_tokens=False)

    def prompt_ids(self, choice: int) -> list[int]:
        return self.requests[self._prompt(choice)].prompt

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
            out.append(CompletionChoice(len(out), text, logprobs, finish.value, choice.stop_reason))
            if body.prompt_logprobs is not None:
                out[-1].prompt_logprobs = writer.prompt_logprobs(first)
            if body.return_token_ids:
                out[-1].prompt_token_ids = writer.prompt_ids(first)
                out[-1].token_ids = choice.token_ids
                out[-1].covered = Covered(*writer.tokenizer.covered(choice.token_ids, choice.text))
    return json(
        Completion(
            id=id,
            created=int(time.time()),
            model=serving.model_name,
            system_fingerprint=serving.fingerprint,
            choices=out,
            usage=usage_of(generation),
        )
    )


async def stream(
    serving: Serving, id: str, generation: Generation, body: CompletionRequest, out: DirectOut
) -> AsyncGenerator[bytes, None]:
    writer = Writer(serving, body, generation.requests)
    chunks = Chunks(serving, id, "text_completion", body.stream_options, lambda: usage_of(generation))
    plain = body.logprobs is None and not body.echo and not body.return_token_ids  # nothing but text
    choices = sum(request.params.n for request in generation.requests)
    ends = b',"logprobs":null,"finish_reason":null}'
    frames = [chunks.around(b'{"index":%d,"text":' % choice, ends) for choice in range(choices)]
    held: dict[int, list[int]] = {}  # ids whose text is not sent yet, by choice

    def write(delta: Delta) -> bytes:
        frame = frames[delta.branch]
        if plain and frame is not None and delta.finish_reason is None:
            return frame[0] + json(delta.text) + frame[1] if delta.text else b""
        writer.note(delta.branch, delta.prompt_logprobs)
        first = delta.branch not in held
        held.setdefault(delta.branch, []).extend(delta.token_ids)
        if not worth_sending(delta):
            return b""
        text, logprobs = writer.piece(delta.branch, delta.text, delta.logprobs or [])
        more = b',"stop_reason":%b' % json(delta.stop_reason) if delta.finish_reason else b""
        if body.return_token_ids:
            more += b',"prompt_token_ids":%b' % json(writer.prompt_ids(delta.branch)) if first else b""
            more += b',"token_ids":%b' % json(held[delta.branch])
        held[delta.branch] = []
        return chunks.event(
            b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b%b}'
            % (delta.branch, json(text), json(logprobs), json(delta.finish_reason), more)
        )

    out.write = write
    async with aclosing(generation.deltas(out)) as batches:
        async for deltas in batches:
            if data := b"".join([write(delta) for delta in deltas]):
                yield data
    if last := chunks.last():
        yield last


async def parse(serving: Serving, raw: bytes) -> CompletionRequest:
    body = decode(_DECODER, raw)
    await check(serving, body)
    return body


async def begin(serving: Serving, body: CompletionRequest, arrived: float) -> tuple[str, Generation]:
    id = f"cmpl-{uuid.uuid4().hex}"
    requests = await Preparing(serving, body).run(id)
    return id, Generation(serving, requests, arrived, body.deadline_ms, prompt_only=scores(body))


async def whole(serving: Serving, raw: bytes) -> bytes:
    """A body to its answer, without HTTP: what batches use."""
    arrived = time.perf_counter()
    body = await parse(serving, raw)
    id, generation = await begin(serving, body, arrived)
    return completion(serving, id, generation, await collect(generation), body)


def router(serving: Serving) -> APIRouter:
    routes = APIRouter(tags=["OpenAI"])

    @routes.post(
        "/v1/completions", summary="Create a completion", openapi_extra=generates(CompletionRequest, Completion)
    )
    async def completions(request: Request) -> Response:
        raw, arrived = await read_body(request, serving.max_body), time.perf_counter()
        body = await parse(serving, raw)
        id, generation = await begin(serving, body, arrived)
        if body.stream:
            out = DirectOut()
            return EventStream(stream(serving, id, generation, body, out), out)
        results = await until_gone(request.receive, collect(generation))
        return Response(completion(serving, id, generation, results, body), media_type="application/json")

    return routes
