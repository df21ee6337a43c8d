"""POST /v1/messages and /v1/messages/count_tokens, as Anthropic's clients speak them.

Refuses to know: how a template is written, how tokens are made, how calls are read.
"""

from __future__ import annotations

import base64
import hashlib
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from fastapi import APIRouter
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from quire.serve.anthropic.message_bodies import (
    AnthropicError,
    AnthropicMessage,
    AnthropicUsage,
    AppliedEdits,
    Content,
    ContentSearchResult,
    ContentServerTool,
    ContentText,
    ContentThinking,
    ContentToolUse,
    CountTokensRequest,
    MessagesRequest,
    OriginalTokens,
    TokenCount,
)
from quire.serve.anthropic.message_exchange import Exchange, Searched, server_id, thinks
from quire.serve.core.fields import refuse_unsupported
from quire.serve.core.generation import Serving, hold_session
from quire.serve.core.turns import Call, Reply, Talk, render
from quire.serve.http.http_io import NamedEvents, decode, json, read_body, until_gone
from quire.serve.http.openapi import answers
from quire.text.segments import CallArguments, CallBegun, Said, Segment, Thought
from quire.types.request import FinishReason

BATCHED = 10  # priority of a batch's requests, as that of OpenAI's tier `flex`
_MESSAGES = msgspec.json.Decoder(MessagesRequest)
_COUNT = msgspec.json.Decoder(CountTokensRequest)


async def parse(serving: Serving, raw: bytes) -> MessagesRequest:
    body = decode(_MESSAGES, raw)
    serving.find_model(body.model)
    refuse_unsupported(body)
    hold_session(body.session_id, body.session_ttl)
    await serving.use_model(body.model)
    return body


def signed(thought: str) -> str:
    """A thought's signature: callers send back, and some clients keep, only thoughts that have one."""
    return base64.b64encode(hashlib.sha256(thought.encode()).digest()).decode()


def stop_of(reply: Reply, exchange: Exchange, found: Searched) -> tuple[str, str | None]:
    """(stop_reason, stop_sequence)."""
    if reply.finish_reason is FinishReason.LENGTH:
        return "max_tokens", None
    if len(reply.calls) > len(found):
        return "tool_use", None
    if found:
        return ("pause_turn" if exchange.paused(found) else "max_tokens"), None
    if isinstance(reply.output.stop_reason, str):
        return "stop_sequence", reply.output.stop_reason
    return "end_turn", None


def applied_edits(exchange: Exchange) -> AppliedEdits | UnsetType:
    return UNSET if exchange.body.context_management is None else AppliedEdits(exchange.edits.applied)


def call_block(exchange: Exchange, call: Call, input: dict[str, Any]) -> ContentToolUse | ContentServerTool:
    if call.name in exchange.tools.searches:
        return ContentServerTool(server_id(call), call.name, input)
    return ContentToolUse(call.id, call.name, input)


def result_blocks(found: Searched) -> list[ContentSearchResult]:
    return [ContentSearchResult(server_id(call), outcome) for call, outcome in found]


async def answer(exchange: Exchange) -> bytes:
    """The whole message."""
    content: list[Content] = []
    talk: Talk | None = await exchange.begin()
    while talk is not None:
        [reply] = await talk.whole()
        if reply.thought and thinks(exchange.body):
            content.append(ContentThinking(reply.thought, signed(reply.thought)))
        if reply.text:
            content.append(ContentText(reply.text))
        content += [call_block(exchange, call, call.input) for call in reply.calls]
        found = await exchange.searched(reply)
        content += result_blocks(found)
        talk = await exchange.go_on(reply, found)
    stop_reason, stop_sequence = stop_of(reply, exchange, found)
    return json(
        AnthropicMessage(
            id=exchange.id,
            model=exchange.serving.model_name,
            content=content,
            stop_reason=stop_reason,
            stop_sequence=stop_sequence,
            usage=exchange.usage(),
            context_management=applied_edits(exchange),
        )
    )


async def whole(serving: Serving, raw: bytes) -> bytes:
    """The answer to a body of a batch, behind those that somebody waits for where the scheduler looks at that."""
    arrived = time.perf_counter()
    exchange = Exchange(serving, await parse(serving, raw), _id(), arrived)
    exchange.priority = BATCHED if serving.frontend.client.info.priorities else 0
    return await answer(exchange)


def _id() -> str:
    return f"msg_{uuid.uuid4().hex}"


def event(kind: bytes, **data: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind, json({"type": kind.decode(), **data}))


class Blocks:
    """Content blocks of one stream: each is opened, filled and closed before the next begins."""

    def __init__(self, exchange: Exchange):
        self._exchange = exchange
        self._thinking = thinks(exchange.body)
        self._index = -1
        self._kind: Any = None
        self._thought: list[str] = []  # of the open block

    def write(self, segment: Segment, reply: Reply) -> bytes:
        if isinstance(segment, Thought) and not self._thinking:
            return b""
        out = b""
        if isinstance(segment, CallBegun):
            return self._open(CallArguments, call_block(self._exchange, reply.calls[segment.index], {}))
        if isinstance(segment, CallArguments):
            delta = {"type": "input_json_delta", "partial_json": segment.text}
        elif isinstance(segment, Said):
            out = b"" if self._kind is Said else self._open(Said, ContentText(""))
            delta = {"type": "text_delta", "text": segment.text}
        else:
            out = b"" if self._kind is Thought else self._open(Thought, ContentThinking(""))
            self._thought.append(segment.text)
            delta = {"type": "thinking_delta", "thinking": segment.text}
        return out + event(b"content_block_delta", index=self._index, delta=delta)

    def results(self, found: Searched) -> bytes:
        """Blocks that are whole at once."""
        return b"".join([self._open(ContentSearchResult, block) for block in result_blocks(found)])

    def close(self) -> bytes:
        if self._kind is None:
            return b""
        out = b""
        if self._kind is Thought:
            delta = {"type": "signature_delta", "signature": signed("".join(self._thought))}
            out = event(b"content_block_delta", index=self._index, delta=delta)
        self._kind, self._thought = None, []
        return out + event(b"content_block_stop", index=self._index)

    def _open(self, kind: Any, block: Content) -> bytes:
        closed = self.close()
        self._index += 1
        self._kind = kind
        return closed + event(b"content_block_start", index=self._index, content_block=block)


async def stream(exchange: Exchange, talk: Talk | None) -> AsyncGenerator[bytes, None]:
    blocks = Blocks(exchange)
    begun = False
    while talk is not None:
        [reply] = talk.replies
        async with aclosing(talk.generation.deltas()) as batches:
            async for deltas in batches:
                pushed = [(segment, reply) for delta in deltas for segment in reply.push(delta)]
                out = b"" if begun else opening(exchange)  # with the first tokens it is known what the cache held
                begun = True
                if out := out + b"".join([blocks.write(segment, reply) for segment, reply in pushed]):
                    yield out
        found = await exchange.searched(reply)
        if found:
            yield blocks.results(found)
        talk = await exchange.go_on(reply, found)
    stop_reason, stop_sequence = stop_of(reply, exchange, found)
    delta = {"stop_reason": stop_reason, "stop_sequence": stop_sequence}
    edits = applied_edits(exchange)
    more = {} if edits is UNSET else {"context_management": edits}
    yield (
        blocks.close() + event(b"message_delta", delta=delta, usage=exchange.usage(), **more) + event(b"message_stop")
    )


def opening(exchange: Exchange) -> bytes:
    usage = exchange.usage()
    message = AnthropicMessage(
        id=exchange.id,
        model=exchange.serving.model_name,
        content=[],
        stop_reason=None,
        stop_sequence=None,
        usage=AnthropicUsage(
            input_tokens=usage.input_tokens, output_tokens=0, cache_read_input_tokens=usage.cache_read_input_tokens
        ),
    )
    return event(b"message_start", message=message) + event(b"ping")


def router(serving: Serving) -> APIRouter:
    routes = APIRouter(tags=["Anthropic"])

    @routes.post(
        "/v1/messages",
        summary="Create a message",
        openapi_extra=answers(AnthropicMessage, takes=MessagesRequest, error=AnthropicError, media="text/event-stream"),
    )
    async def messages(request: Request) -> Response:
        arrived = time.perf_counter()
        body = await parse(serving, await read_body(request, serving.max_body))
        exchange = Exchange(serving, body, _id(), arrived)
        if body.stream:
            return NamedEvents(stream(exchange, await exchange.begin()))
        return Response(await until_gone(request.receive, answer(exchange)), media_type="application/json")

    @routes.post(
        "/v1/messages/count_tokens",
        summary="Count the tokens of a message",
        openapi_extra=answers(TokenCount, takes=CountTokensRequest, error=AnthropicError),
    )
    async def count_tokens(request: Request) -> Response:
        body = decode(_COUNT, await read_body(request, serving.max_body))
        serving.find_model(body.model)
        refuse_unsupported(body)
        await serving.use_model(body.model, engine=False)
        exchange = Exchange(serving, body)
        tokens, _ = await render(serving, await exchange.prepare())
        count = TokenCount(len(tokens))
        if body.context_management is not None:
            count.context_management = OriginalTokens(exchange.edits.original_tokens)
        return Response(json(count), media_type="application/json")

    return routes
