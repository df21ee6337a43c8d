"""Ollama's API under /api: chat, generate, embed, and what it tells of models.

Refuses to know: how a template is written, how tokens are made, how calls are read; and models that are not served.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec
from fastapi import APIRouter
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from quire.serve.core.constraints import ANY_JSON, json_schema
from quire.serve.core.context import current
from quire.serve.core.fields import refuse_unsupported
from quire.serve.core.generation import Serving, hold_session
from quire.serve.core.token_logprobs import token_logprobs
from quire.serve.core.turns import Call, Talk, Turn, continued, start
from quire.serve.http.http_io import JsonLines, decode, json, read_body, until_gone
from quire.serve.http.openapi import answers
from quire.serve.ollama.model_files import is_copy
from quire.serve.ollama.ollama_bodies import (
    OllamaAnswerRequest,
    OllamaCall,
    OllamaChatAnswer,
    OllamaChatRequest,
    OllamaError,
    OllamaFunction,
    OllamaGenerateAnswer,
    OllamaGenerateRequest,
    OllamaOptions,
    OllamaReply,
    OllamaRequest,
)
from quire.text.segments import Said, Thought
from quire.types.errors import ConfigError, InputError, ModelNotFoundError
from quire.types.grammar import GrammarSpec
from quire.types.models_file import parse_keep_alive
from quire.types.plan import TokenLogprobs
from quire.types.request import FinishReason
from quire.types.sampling_params import SamplingParams

_CHAT = msgspec.json.Decoder(OllamaChatRequest)
_GENERATE = msgspec.json.Decoder(OllamaGenerateRequest)

Answer = OllamaChatAnswer | OllamaGenerateAnswer


def check(serving: Serving, body: OllamaRequest) -> str:
    """Refuse, before any work, what can be seen from the body alone; gives the model's name here."""
    name = known_name(serving, body.model)
    refuse_unsupported(body)
    if body.options is not None:
        refuse_unsupported(body.options)
    if isinstance(body, OllamaAnswerRequest):
        hold_session(body.session_id, body.session_ttl)
    keep_alive_of(body)
    return name


def known_name(serving: Serving, name: str) -> str:
    """The name by which a model or an adapter is served that Ollama's clients call so: with or without a tag, or by the
    name of a copy."""
    name, pool = name.removesuffix(":latest"), serving.models
    if pool.find(name) is not None:
        return name
    for served in pool.names:
        path = latest.client.info.weights.path if (latest := pool.latest(served)) is not None else ""
        copied = serving.options.model_management and path and is_copy(name, path)
        if copied or name == served.removesuffix(":latest"):
            return served
    raise ModelNotFoundError(f"model {name!r} not found; this server has {', '.join(map(repr, pool.names))}")


def keep_alive_of(body: OllamaRequest) -> float | None:
    """Seconds that the model is to stay after this request; None: as long as it would."""
    try:
        return None if body.keep_alive is None else parse_keep_alive(body.keep_alive)
    except ConfigError as error:
        raise InputError(str(error), param="keep_alive") from None


async def use_model(serving: Serving, body: OllamaRequest, name: str) -> float:
    """Have the model ready; gives how long that took, 0 where it stays loaded anyway."""
    began, keep_alive = time.perf_counter(), keep_alive_of(body)
    await serving.use_model(name)
    if (lease := current().lease) is None:
        return 0.0
    if keep_alive is not None:
        lease.keep_alive = keep_alive
    return time.perf_counter() - began


def params_of(body: OllamaAnswerRequest) -> SamplingParams:
    """Ollama's defaults where the body says nothing."""
    options = body.options or OllamaOptions()
    limit = None if options.num_predict is None or options.num_predict < 0 else int(options.num_predict)
    seed = None if options.seed is None or options.seed == -1 else int(options.seed)
    if body.top_logprobs is not None and not body.logprobs:
        raise InputError("top_logprobs needs logprobs to be true", param="top_logprobs")
    return SamplingParams(
        max_tokens=_within(limit, None, 1, 1 << 30),
        seed=_within(seed, None, -(1 << 63), (1 << 63) - 1),
        temperature=_within(options.temperature, 0.8, 0.0, 100.0),
        top_k=int(_within(options.top_k, 40, 0, 1 << 30)),
        top_p=_within(options.top_p, 0.9, 1e-6, 1.0),
        min_p=_within(options.min_p, 0.0, 0.0, 1.0),
        repetition_penalty=_within(options.repeat_penalty, 1.0, 1e-3, 100.0),
        presence_penalty=_within(options.presence_penalty, 0.0, -2.0, 2.0),
        frequency_penalty=_within(options.frequency_penalty, 0.0, -2.0, 2.0),
        stop=[options.stop] if isinstance(options.stop, str) else options.stop or [],
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        grammar=_grammar(body.format),
    )


def _within(value: Any, default: Any, least: Any, most: Any) -> Any:
    return default if value is None else min(max(value, least), most)


def _grammar(format: Any) -> GrammarSpec | None:
    if not format:
        return None
    return ANY_JSON if format == "json" else json_schema(format, "format")


def variables_of(body: OllamaAnswerRequest) -> dict[str, Any]:
    if body.think is None:
        return {}
    effort = {"reasoning_effort": body.think} if isinstance(body.think, str) else {}
    return {"enable_thinking": body.think is not False, **effort}


def now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


@dataclass
class Writer:
    """Lines of one answer, in the shape of /api/chat or /api/generate."""

    serving: Serving
    body: OllamaAnswerRequest
    arrived: float
    name: str  # who answers
    load_s: float = 0.0  # that it took to load the model
    first: float = 0.0  # when the first token came

    def line(self, said: str, thought: str, calls: list[Call], logprobs: list[TokenLogprobs] | None = None) -> Answer:
        thinking = thought if thought and self.body.think is not False else UNSET
        name, created = self.name, now()
        answer: Answer
        if isinstance(self.body, OllamaChatRequest):
            message = OllamaReply(content=said, thinking=thinking)
            if calls:
                message.tool_calls = [
                    OllamaCall(id=call.id, function=OllamaFunction(name=call.name, arguments=call.input))
                    for call in calls
                ]
            answer = OllamaChatAnswer(model=name, created_at=created, message=message)
        else:
            answer = OllamaGenerateAnswer(model=name, created_at=created, response=said, thinking=thinking)
        if self.body.logprobs and logprobs:
            answer.logprobs = token_logprobs(self.serving.frontend.text.tokenizer, logprobs)
        return answer

    def finish(self, answer: Answer, talk: Talk) -> Answer:
        """The last line tells why it ended and what it took."""
        end = time.perf_counter()
        first = self.first or end
        answer.done = True
        answer.done_reason = "length" if talk.replies[0].finish_reason is FinishReason.LENGTH else "stop"
        answer.total_duration = _nanoseconds(end - self.arrived)
        answer.load_duration = _nanoseconds(self.load_s)
        answer.prompt_eval_count = talk.generation.prompt_tokens
        answer.prompt_eval_duration = _nanoseconds(first - self.arrived - self.load_s)
        answer.eval_count = talk.replies[0].tokens
        answer.eval_duration = _nanoseconds(end - first)
        return answer

    def loaded(self, reason: str = "load") -> Answer:
        """Nothing was asked: to Ollama, a wish that the model be loaded, or be let go (`keep_alive` 0)."""
        answer = self.line("", "", [])
        answer.done, answer.done_reason = True, reason
        return answer


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


async def stream(writer: Writer, talk: Talk) -> AsyncGenerator[bytes, None]:
    """Calls are sent whole: when the next begins, or the answer ends."""
    [reply] = talk.replies
    sent = 0
    async with aclosing(talk.generation.deltas()) as batches:
        async for deltas in batches:
            writer.first = writer.first or time.perf_counter()
            for delta in deltas:
                segments = reply.push(delta)
                said = "".join(segment.text for segment in segments if isinstance(segment, Said))
                thought = "".join(segment.text for segment in segments if isinstance(segment, Thought))
                ready = reply.calls[sent : len(reply.calls) - (delta.finish_reason is None)]
                sent += len(ready)
                if said or thought or ready or delta.logprobs:
                    yield json(writer.line(said, thought, ready, delta.logprobs)) + b"\n"
    yield json(writer.finish(writer.line("", "", []), talk)) + b"\n"


async def whole(writer: Writer, talk: Talk) -> bytes:
    [reply] = talk.replies
    async with aclosing(talk.generation.deltas()) as batches:
        async for deltas in batches:
            writer.first = writer.first or time.perf_counter()
            for delta in deltas:
                reply.push(delta)
    return json(writer.finish(writer.line(reply.text, reply.thought, reply.calls, reply.output.logprobs), talk))


def chat_turn(body: OllamaChatRequest) -> Turn:
    messages, prefix = continued([message.plain() for message in body.messages or ()])
    return Turn(
        messages=messages,
        prefix=prefix,
        params=params_of(body),
        tools=[tool.tool() for tool in body.tools or ()],
        variables=variables_of(body),
        constraint="format",
        blend=body.blend,
    )


def generate_turn(body: OllamaGenerateRequest) -> Turn:
    messages = [{"role": "system", "content": body.system}] if body.system else []
    messages.append({"role": "user", "content": body.prompt or ""})
    return Turn(
        messages=messages,
        params=params_of(body),
        variables=variables_of(body),
        constraint="format",
        blend=body.blend,
        messages_param="prompt",
        raw=body.raw is True,
    )


def router(serving: Serving) -> APIRouter:
    routes = APIRouter(tags=["Ollama"])

    async def reply(
        request: Request, body: OllamaAnswerRequest, turn: Callable[[], Turn] | None, arrived: float
    ) -> Response:
        name = check(serving, body)
        if turn is None and keep_alive_of(body) == 0:
            reason = "unload" if await serving.models.unload(serving.find_model(name)[0]) else "load"
            return Response(json(Writer(serving, body, arrived, name).loaded(reason)), media_type="application/json")
        load_s = await use_model(serving, body, name)
        writer = Writer(serving, body, arrived, serving.model_name, load_s)
        if turn is None:
            return Response(json(writer.loaded()), media_type="application/json")
        talk = await start(serving, turn(), f"ollama-{uuid.uuid4().hex}", arrived)
        if body.stream is not False:
            return JsonLines(stream(writer, talk))
        return Response(await until_gone(request.receive, whole(writer, talk)), media_type="application/json")

    @routes.post(
        "/api/chat",
        summary="Chat",
        openapi_extra=answers(
            OllamaChatAnswer, takes=OllamaChatRequest, error=OllamaError, media="application/x-ndjson"
        ),
    )
    async def chat(request: Request) -> Response:
        arrived = time.perf_counter()
        body = decode(_CHAT, await read_body(request, serving.max_body))
        return await reply(request, body, (lambda: chat_turn(body)) if body.messages else None, arrived)

    @routes.post(
        "/api/generate",
        summary="Continue a prompt",
        openapi_extra=answers(
            OllamaGenerateAnswer, takes=OllamaGenerateRequest, error=OllamaError, media="application/x-ndjson"
        ),
    )
    async def generate(request: Request) -> Response:
        arrived = time.perf_counter()
        body = decode(_GENERATE, await read_body(request, serving.max_body))
        return await reply(request, body, (lambda: generate_turn(body)) if body.prompt else None, arrived)

    return routes
