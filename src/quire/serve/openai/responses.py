"""POST /v1/responses, and the responses that can still be read and continued.

Refuses to know: how a template is written, how tokens are made, how calls are read.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.serve.core.constraints import ANY_JSON, json_schema
from quire.serve.core.fields import refuse_unsupported
from quire.serve.core.generation import Serving, hold_session
from quire.serve.core.token_logprobs import ChatTokenLogprob, token_logprobs
from quire.serve.core.turns import Talk, ToolChoice, Turn, start
from quire.serve.http.error_bodies import describe
from quire.serve.http.http_io import NamedEvents, decode, json, owner_of, read_body, until_gone
from quire.serve.http.openapi import answers, generates
from quire.serve.openai.chat_parts import JsonObjectFormat, TextFormat
from quire.serve.openai.request_bodies import TIERS, tier_used
from quire.serve.openai.responses_bodies import (
    AllowedFunctions,
    Incomplete,
    InputDetails,
    InputItem,
    InputItems,
    NamedFunction,
    OutputDetails,
    ResponseDeleted,
    ResponseFailure,
    ResponseObject,
    ResponseRequest,
    ResponseUsage,
    SchemaFormat,
    TextConfig,
)
from quire.serve.openai.responses_items import Events, Output
from quire.serve.openai.responses_store import ResponseStore, Stored
from quire.text.segments import Said
from quire.types.errors import InputError
from quire.types.grammar import GrammarSpec
from quire.types.outputs import Delta
from quire.types.request import FinishReason
from quire.types.sampling_params import SamplingParams

CONSTRAINT = "text.format"  # where a grammar is
_DECODER = msgspec.json.Decoder(ResponseRequest)


def parse(serving: Serving, raw: bytes) -> ResponseRequest:
    body = decode(_DECODER, raw)
    serving.check_model(body.model)
    refuse_unsupported(body)
    hold_session(body.session_id, body.session_ttl)
    if body.stream_options is not None and not body.stream:
        raise InputError("stream_options needs stream to be true", param="stream_options")
    if body.top_logprobs is not None and not body.include:
        raise InputError("top_logprobs needs include to hold message.output_text.logprobs", param="top_logprobs")
    return body


def params_of(body: ResponseRequest) -> SamplingParams:
    return SamplingParams(
        max_tokens=body.max_output_tokens,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=body.top_k or 0,
        seed=body.seed,
        logprobs=(body.top_logprobs or 0) if body.include else None,
        grammar=_grammar(body.text),
    )


def _grammar(text: TextConfig | None) -> GrammarSpec | None:
    format = text.format if text else None
    if isinstance(format, SchemaFormat):
        return json_schema(format.schema, CONSTRAINT)
    return ANY_JSON if isinstance(format, JsonObjectFormat) else None


def choice_of(body: ResponseRequest) -> ToolChoice:
    given, parallel = body.tool_choice, body.parallel_tool_calls is not False
    if isinstance(given, NamedFunction):
        return ToolChoice(required=True, only=[given.name], parallel=parallel)
    if isinstance(given, AllowedFunctions):
        names = [tool.name for tool in given.tools]
        return ToolChoice(required=given.mode == "required", only=names, parallel=parallel)
    return ToolChoice(required=given == "required", none=given == "none", parallel=parallel)


def input_messages(body: ResponseRequest) -> list[dict[str, Any]]:
    """The new messages; calls and thoughts that follow each other are one turn of the assistant's."""
    items = [InputItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    out: list[dict[str, Any]] = []
    for number, item in enumerate(items):
        message = item.plain(number)
        last = out[-1] if out else None
        if last and last["role"] == message["role"] == "assistant" and ("tool_calls" in message or not last["content"]):
            last["content"] = last["content"] or message["content"]
            if calls := last.get("tool_calls", []) + message.get("tool_calls", []):
                last["tool_calls"] = calls
        else:
            out.append(message)
    return out


class Work:
    """One response under way: its conversation, its answer, and the object that tells of both."""

    def __init__(self, serving: Serving, body: ResponseRequest, store: ResponseStore | None, owner: str):
        self.serving = serving
        self.body = body
        self.store = store if body.store is not False else None
        self.owner = owner
        self._scores: list[ChatTokenLogprob] = []
        self.messages: list[dict[str, Any]] = []
        if body.previous_response_id is not None:
            found = store.find(body.previous_response_id, owner) if store else None
            if found is None:
                problem = f"no stored response {body.previous_response_id!r}; it was never kept or has made room"
                raise InputError(problem, param="previous_response_id", code="previous_response_not_found")
            self.messages += msgspec.json.decode(found.messages)
        self.messages += input_messages(body)
        self.response = self._response()

    def _response(self) -> ResponseObject:
        body = self.body
        response = ResponseObject(
            id=f"resp_{uuid.uuid4().hex}",
            created_at=int(time.time()),
            model=self.serving.frontend.model_name,
            store=body.store is not False,
        )
        if body.text is not None:
            response.text = TextConfig(format=body.text.format or TextFormat(), verbosity=body.text.verbosity)
        for name in (
            *("instructions", "max_output_tokens", "metadata", "parallel_tool_calls", "previous_response_id", "user"),
            *(
                "reasoning",
                "service_tier",
                "temperature",
                "tool_choice",
                "tools",
                "top_logprobs",
                "top_p",
                "truncation",
            ),
        ):
            if (value := getattr(body, name)) is not None:
                setattr(response, name, value)
        response.service_tier = tier_used(body.service_tier, self.serving.frontend.client.info) or response.service_tier
        return response

    async def start(self, arrived: float) -> Talk:
        body, effort = self.body, self.body.reasoning.effort if self.body.reasoning else None
        system = [{"role": "system", "content": body.instructions}] if body.instructions else []
        turn = Turn(
            messages=system + self.messages,
            params=params_of(body),
            tools=[tool.tool() for tool in body.tools or ()],
            choice=choice_of(body),
            variables={"reasoning_effort": effort, "enable_thinking": effort != "none"} if effort else {},
            priority=TIERS[self.response.service_tier] if body.priority is None else body.priority,
            salt=body.cache_salt or "",
            deadline_ms=body.deadline_ms,
            messages_param="input",
            constraint=CONSTRAINT,
        )
        return await start(self.serving, turn, self.response.id, arrived)

    def write(self, output: Output, talk: Talk, deltas: list[Delta]) -> bytes:
        """Tokens may come before their text does: their logprobs wait for it."""
        return b"".join([self._events(output, talk, delta) for delta in deltas])

    def _events(self, output: Output, talk: Talk, delta: Delta) -> bytes:
        if delta.logprobs:
            self._scores += token_logprobs(self.serving.frontend.text.tokenizer, delta.logprobs)
        out = b""
        for segment in talk.replies[delta.branch].push(delta):
            scores: list[ChatTokenLogprob] = []
            if isinstance(segment, Said):
                scores, self._scores = self._scores, []
            out += output.write(segment, scores)
        return out

    def finish(self, talk: Talk, output: Output) -> bytes:
        """Close the answer: events of its last item, the response complete, and kept if it is to be."""
        response, generation, [reply] = self.response, talk.generation, talk.replies
        short = reply.finish_reason is FinishReason.LENGTH
        closing = output.close("incomplete" if short else "completed")
        response.status = "incomplete" if short else "completed"
        response.incomplete_details = Incomplete("max_output_tokens") if short else None
        response.completed_at = None if short else int(time.time())
        response.output = output.items
        response.usage = ResponseUsage(
            generation.prompt_tokens,
            InputDetails(generation.cached_tokens),
            generation.completion_tokens,
            OutputDetails(reply.thought_tokens),
            generation.prompt_tokens + generation.completion_tokens,
        )
        if self.store is not None:
            said: dict[str, Any] = {"role": "assistant", "content": reply.text}
            if reply.calls:
                calls = [
                    InputItem(type="function_call", call_id=c.id, name=c.name, arguments=c.text) for c in reply.calls
                ]
                said["tool_calls"] = [call.plain(0)["tool_calls"][0] for call in calls]
            items = (
                self.body.input
                if isinstance(self.body.input, list)
                else [InputItem(role="user", content=self.body.input)]
            )
            listing = InputItems(data=msgspec.to_builtins(items))
            stored = Stored(json(response), json([*self.messages, said]), json(listing), self.owner)
            self.store.keep(response.id, stored)
        return closing

    async def whole(self, talk: Talk) -> bytes:
        output = Output(Events(), talk.replies[0])
        async with aclosing(talk.generation.deltas()) as batches:
            async for deltas in batches:
                self.write(output, talk, deltas)
        self.finish(talk, output)
        return json(self.response)

    async def stream(self, talk: Talk) -> AsyncGenerator[bytes, None]:
        events = Events()
        output = Output(events, talk.replies[0])
        response, begun = self.response, False
        try:
            async with aclosing(talk.generation.deltas()) as batches:
                async for deltas in batches:
                    out = b""
                    if not begun:  # not before the engine has begun: until then, errors have a status of their own
                        begun = True
                        out = events.write("response.created", response=response)
                        out += events.write("response.in_progress", response=response)
                    if out := out + self.write(output, talk, deltas):
                        yield out
            closing = self.finish(talk, output)
            yield closing + events.write(f"response.{response.status}", response=response)
        except Exception as error:
            if not begun:
                raise
            detail = describe(error).body.error
            response.status, response.output = "failed", output.items
            response.error = ResponseFailure("server_error", detail.message)
            yield events.write("response.failed", response=response)


async def whole(serving: Serving, raw: bytes) -> bytes:
    """A body to its answer, without HTTP: what batches use."""
    work = Work(serving, parse(serving, raw), None, "")
    return await work.whole(await work.start(time.perf_counter()))


def router(serving: Serving) -> APIRouter:
    routes = APIRouter(tags=["OpenAI"])
    store = ResponseStore()

    @routes.post("/v1/responses", summary="Create a response", openapi_extra=generates(ResponseRequest, ResponseObject))
    async def create(request: Request) -> Response:
        arrived = time.perf_counter()
        body = parse(serving, await read_body(request, serving.max_body))
        work = Work(serving, body, store, owner_of(request))
        talk = await work.start(arrived)
        if body.stream:
            return NamedEvents(work.stream(talk))
        return Response(await until_gone(request.receive, work.whole(talk)), media_type="application/json")

    @routes.get("/v1/responses/{id}", summary="Read a stored response", openapi_extra=answers(ResponseObject))
    async def read(request: Request, id: str) -> Response:
        return Response(store.get(id, owner_of(request)).response, media_type="application/json")

    @routes.delete("/v1/responses/{id}", summary="Forget a response", openapi_extra=answers(ResponseDeleted))
    async def delete(request: Request, id: str) -> Response:
        store.delete(id, owner_of(request))
        return Response(json(ResponseDeleted(id)), media_type="application/json")

    @routes.get("/v1/responses/{id}/input_items", summary="What a response answered", openapi_extra=answers(InputItems))
    async def input_items(request: Request, id: str) -> Response:
        return Response(store.get(id, owner_of(request)).items, media_type="application/json")

    return routes
