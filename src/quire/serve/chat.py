"""POST /v1/chat/completions.

Refuses to know: how a template is written, how tokens are made.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.serve.events import Chunks, json, worth_sending
from quire.serve.generation import Collected, Generation, Serving, check, collect, off_loop, sampling_params
from quire.serve.logprobs import chat_logprobs, prompt_logprobs, scored_prompt
from quire.serve.openapi import generates
from quire.serve.schema import AssistantMessage, ChatChoice, ChatCompletion, ChatRequest
from quire.serve.wire import EventStream, decode, read_body, until_gone
from quire.types.errors import ContextLengthError, InputError
from quire.types.outputs import Delta
from quire.types.request import Request as EngineRequest
from quire.types.sampling import MAX_LOGPROBS, SamplingParams

_DECODER = msgspec.json.Decoder(ChatRequest)


def chat_params(body: ChatRequest) -> SamplingParams:
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise InputError("max_tokens and max_completion_tokens mean the same; give one of them", param="max_tokens")
    top = body.top_logprobs
    if top is not None and not body.logprobs:
        raise InputError("top_logprobs needs logprobs to be true", param="top_logprobs")
    if top is not None and not 0 <= top <= MAX_LOGPROBS:
        raise InputError(f"top_logprobs must be in [0, {MAX_LOGPROBS}], got {top}", param="top_logprobs")
    limit = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
    return sampling_params(body, max_tokens=limit, logprobs=(top or 0) if body.logprobs else None)


async def prepare(serving: Serving, body: ChatRequest, id: str) -> EngineRequest:
    """Render the conversation, tokenise it, check it."""
    frontend = serving.frontend
    params = chat_params(body)
    messages = [message.plain() for message in body.messages]

    def work() -> EngineRequest:
        tokens = frontend.text.encode_chat(messages, add_generation_prompt=body.add_generation_prompt is not False)
        return frontend.prepare(tokens, params, request_id=id, priority=body.priority or 0, salt=body.cache_salt or "")

    try:
        return await off_loop(sum(len(message["content"]) for message in messages), work)
    except ContextLengthError as error:
        error.param = "messages"
        raise


def completion(serving: Serving, id: str, generation: Generation, choices: list[Collected], logprobs: bool) -> bytes:
    tokenizer = serving.frontend.text.tokenizer
    answer = ChatCompletion(
        id=id,
        created=int(time.time()),
        model=serving.frontend.model_name,
        system_fingerprint=serving.fingerprint,
        choices=[
            ChatChoice(
                index,
                AssistantMessage(choice.text),
                chat_logprobs(tokenizer, choice.logprobs) if logprobs else None,
                choice.finish_reason.value,
            )
            for index, choice in enumerate(choices)
        ],
        usage=generation.usage(),
    )
    request = generation.requests[0]
    if request.params.prompt_logprobs is not None:
        scores = next((choice.prompt_logprobs for choice in choices if choice.prompt_logprobs), [])
        answer.prompt_logprobs = prompt_logprobs(tokenizer, scored_prompt(request.prompt, scores))
    return json(answer)


async def stream(serving: Serving, id: str, generation: Generation, body: ChatRequest) -> AsyncGenerator[bytes, None]:
    tokenizer = serving.frontend.text.tokenizer
    chunks = Chunks(serving, id, "chat.completion.chunk", body.stream_options)
    begun: set[int] = set()

    def event(delta: Delta) -> bytes:
        role = b"" if delta.branch in begun else b'"role":"assistant",'
        begun.add(delta.branch)
        logprobs = json(chat_logprobs(tokenizer, delta.logprobs)) if body.logprobs and delta.logprobs else b"null"
        return chunks.event(
            b'{"index":%d,"delta":{%b"content":%b},"logprobs":%b,"finish_reason":%b}'
            % (delta.branch, role, json(delta.text), logprobs, json(delta.finish_reason))
        )

    async with aclosing(generation.deltas()) as batches:
        async for deltas in batches:
            if events := [event(delta) for delta in deltas if worth_sending(delta)]:
                yield b"".join(events)
    if chunks.with_usage:
        yield chunks.usage(generation.usage())


def router(serving: Serving) -> APIRouter:
    routes = APIRouter(tags=["OpenAI"])

    @routes.post(
        "/v1/chat/completions", summary="Create a chat completion", openapi_extra=generates(ChatRequest, ChatCompletion)
    )
    async def chat_completions(request: Request) -> Response:
        arrived = time.perf_counter()
        body = decode(_DECODER, await read_body(request, serving.max_body))
        check(serving, body)
        id = f"chatcmpl-{uuid.uuid4().hex}"
        generation = Generation(serving, [await prepare(serving, body, id)], arrived, body.deadline_ms)
        if body.stream:
            return EventStream(stream(serving, id, generation, body))
        choices = await until_gone(request.receive, collect(generation))
        answer = completion(serving, id, generation, choices, bool(body.logprobs))
        return Response(answer, media_type="application/json")

    return routes
