"""POST /v1/messages and /v1/messages/count_tokens, as Anthropic's clients speak them.

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

from quire.serve.anthropic.message_bodies import (
    AnthropicError,
    AnthropicMessage,
    AnthropicUsage,
    ChoiceAny,
    ChoiceNone,
    ChoiceTool,
    ContentText,
    ContentThinking,
    ContentToolUse,
    CountTokensRequest,
    MessagesRequest,
    ThinkingDisabled,
    TokenCount,
    text_of,
)
from quire.serve.core.constraints import json_schema
from quire.serve.core.fields import refuse_unsupported
from quire.serve.core.generation import Serving, hold_session
from quire.serve.core.turns import Reply, Talk, ToolChoice, Turn, continued, render, start
from quire.serve.http.http_io import NamedEvents, decode, json, read_body, until_gone
from quire.serve.http.openapi import answers
from quire.text.segments import CallArguments, CallBegun, Said, Segment, Thought
from quire.types.request import FinishReason
from quire.types.sampling_params import SamplingParams

CONSTRAINT = "output_config.format"  # where a grammar is
_MESSAGES = msgspec.json.Decoder(MessagesRequest)
_COUNT = msgspec.json.Decoder(CountTokensRequest)


def params_of(body: MessagesRequest) -> SamplingParams:
    config = body.output_config
    return SamplingParams(
        max_tokens=body.max_tokens,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=body.top_k or 0,
        stop=body.stop_sequences or [],
        grammar=json_schema(config.format.schema, CONSTRAINT) if config and config.format else None,
    )


def choice_of(body: CountTokensRequest) -> ToolChoice:
    given = body.tool_choice
    if given is None or isinstance(given, ChoiceNone):
        return ToolChoice(none=given is not None)
    only = [given.name] if isinstance(given, ChoiceTool) else None
    required = isinstance(given, ChoiceAny | ChoiceTool)
    return ToolChoice(required=required, only=only, parallel=not given.disable_parallel_tool_use)


def turn_of(body: CountTokensRequest, params: SamplingParams) -> Turn:
    messages = [plain for message in body.messages for plain in message.plain()]
    if system := text_of(body.system):
        messages.insert(0, {"role": "system", "content": system})
    variables: dict[str, Any] = {"enable_thinking": thinks(body)}
    if body.output_config is not None and body.output_config.effort is not None:
        variables["reasoning_effort"] = body.output_config.effort
    messages, prefix = continued(messages)
    return Turn(
        messages=messages,
        params=params,
        tools=[tool.tool() for tool in body.tools or ()],
        choice=choice_of(body),
        variables=variables,
        prefix=prefix,
        constraint=CONSTRAINT,
    )


def thinks(body: CountTokensRequest) -> bool:
    return body.thinking is not None and not isinstance(body.thinking, ThinkingDisabled)


def stop_of(reply: Reply) -> tuple[str, str | None]:
    """(stop_reason, stop_sequence)."""
    if reply.finish_reason is FinishReason.LENGTH:
        return "max_tokens", None
    if reply.calls:
        return "tool_use", None
    if isinstance(reply.output.stop_reason, str):
        return "stop_sequence", reply.output.stop_reason
    return "end_turn", None


def usage_of(talk: Talk, tokens: int) -> AnthropicUsage:
    cached = talk.generation.cached_tokens
    return AnthropicUsage(
        input_tokens=talk.generation.prompt_tokens - cached, output_tokens=tokens, cache_read_input_tokens=cached
    )


def message_of(serving: Serving, id: str, talk: Talk, thinking: bool) -> bytes:
    [reply] = talk.replies
    content: list[ContentText | ContentThinking | ContentToolUse] = []
    if reply.thought and thinking:
        content.append(ContentThinking(reply.thought))
    if reply.text:
        content.append(ContentText(reply.text))
    content += [ContentToolUse(call.id, call.name, call.input) for call in reply.calls]
    stop_reason, stop_sequence = stop_of(reply)
    return json(
        AnthropicMessage(
            id=id,
            model=serving.frontend.model_name,
            content=content,
            stop_reason=stop_reason,
            stop_sequence=stop_sequence,
            usage=usage_of(talk, reply.tokens),
        )
    )


def event(kind: bytes, **data: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind, json({"type": kind.decode(), **data}))


class Blocks:
    """Content blocks of one stream: each is opened, filled and closed before the next begins."""

    def __init__(self, reply: Reply, thinking: bool):
        self._reply = reply
        self._thinking = thinking
        self._index = -1
        self._kind: Any = None

    def write(self, segment: Segment) -> bytes:
        if isinstance(segment, Thought) and not self._thinking:
            return b""
        out = b""
        if isinstance(segment, CallBegun):
            call = self._reply.calls[segment.index]
            return self._open(CallArguments, {"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
        if isinstance(segment, CallArguments):
            delta = {"type": "input_json_delta", "partial_json": segment.text}
        elif isinstance(segment, Said):
            out = b"" if self._kind is Said else self._open(Said, {"type": "text", "text": ""})
            delta = {"type": "text_delta", "text": segment.text}
        else:
            block = {"type": "thinking", "thinking": "", "signature": ""}
            out = b"" if self._kind is Thought else self._open(Thought, block)
            delta = {"type": "thinking_delta", "thinking": segment.text}
        return out + event(b"content_block_delta", index=self._index, delta=delta)

    def close(self) -> bytes:
        if self._kind is None:
            return b""
        signed = b""
        if self._kind is Thought:
            signed = event(
                b"content_block_delta", index=self._index, delta={"type": "signature_delta", "signature": ""}
            )
        self._kind = None
        return signed + event(b"content_block_stop", index=self._index)

    def _open(self, kind: Any, block: dict[str, Any]) -> bytes:
        closed = self.close()
        self._index += 1
        self._kind = kind
        return closed + event(b"content_block_start", index=self._index, content_block=block)


async def stream(serving: Serving, id: str, talk: Talk, thinking: bool) -> AsyncGenerator[bytes, None]:
    [reply] = talk.replies
    blocks = Blocks(reply, thinking)
    begun = False
    async with aclosing(talk.generation.deltas()) as batches:
        async for deltas in batches:
            out = b""
            if not begun:  # with the first tokens it is known what the cache held
                begun = True
                message = AnthropicMessage(
                    id=id,
                    model=serving.frontend.model_name,
                    content=[],
                    stop_reason=None,
                    stop_sequence=None,
                    usage=usage_of(talk, 0),
                )
                out = event(b"message_start", message=message) + event(b"ping")
            if out := out + b"".join(blocks.write(segment) for delta in deltas for segment in reply.push(delta)):
                yield out
    stop_reason, stop_sequence = stop_of(reply)
    delta = {"stop_reason": stop_reason, "stop_sequence": stop_sequence}
    yield (
        blocks.close()
        + event(b"message_delta", delta=delta, usage=usage_of(talk, reply.tokens))
        + event(b"message_stop")
    )


def router(serving: Serving) -> APIRouter:
    routes = APIRouter(tags=["Anthropic"])

    @routes.post(
        "/v1/messages",
        summary="Create a message",
        openapi_extra=answers(AnthropicMessage, takes=MessagesRequest, error=AnthropicError, media="text/event-stream"),
    )
    async def messages(request: Request) -> Response:
        arrived = time.perf_counter()
        body = decode(_MESSAGES, await read_body(request, serving.max_body))
        serving.check_model(body.model)
        refuse_unsupported(body)
        id = f"msg_{uuid.uuid4().hex}"
        hold_session(body.session_id, body.session_ttl)
        talk = await start(serving, turn_of(body, params_of(body)), id, arrived)
        if body.stream:
            return NamedEvents(stream(serving, id, talk, thinks(body)))
        await until_gone(request.receive, talk.whole())
        return Response(message_of(serving, id, talk, thinks(body)), media_type="application/json")

    @routes.post(
        "/v1/messages/count_tokens",
        summary="Count the tokens of a message",
        openapi_extra=answers(TokenCount, takes=CountTokensRequest, error=AnthropicError),
    )
    async def count_tokens(request: Request) -> Response:
        body = decode(_COUNT, await read_body(request, serving.max_body))
        serving.check_model(body.model)
        refuse_unsupported(body)
        tokens, _ = await render(serving, turn_of(body, SamplingParams()))
        return Response(json(TokenCount(len(tokens))), media_type="application/json")

    return routes
