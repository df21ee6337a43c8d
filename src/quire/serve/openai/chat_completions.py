"""POST /v1/chat/completions.

Refuses to know: how a template is written, how tokens are made, how calls are read.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec
from fastapi import APIRouter
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from quire.serve.core.generation import DirectOut, Serving
from quire.serve.core.token_logprobs import TokenBytes
from quire.serve.core.turns import Reply, Talk, ToolChoice, Turn, continued, start
from quire.serve.http.http_io import EventStream, decode, json, owner_of, read_body, until_gone
from quire.serve.http.openapi import generates
from quire.serve.openai import stored_chats
from quire.serve.openai.chat_parts import (
    AllowedTools,
    CalledCustom,
    CalledFunction,
    CustomTool,
    CustomToolCall,
    NamedCustom,
    NamedTool,
    ToolCall,
    joined,
)
from quire.serve.openai.logprob_shapes import chat_logprobs, prompt_logprobs, scored_prompt
from quire.serve.openai.request_bodies import TIERS, ChatRequest, tier_used
from quire.serve.openai.response_bodies import ChatAnswer, ChatChoice, ChatCompletion, ChatLogprobs, Usage, usage_of
from quire.serve.openai.sampling import beam_of, check, grammar_of, sampling_params
from quire.serve.openai.sse import Chunks, worth_sending
from quire.text.segments import CallArguments, CallBegun, Said, Segment, Thought
from quire.text.text_inputs import TextInput, input_of
from quire.types.errors import InputError
from quire.types.messages import EngineInfo
from quire.types.outputs import Delta
from quire.types.plan import TokenLogprobs
from quire.types.request import FinishReason
from quire.types.sampling_params import SamplingParams

_DECODER = msgspec.json.Decoder(ChatRequest)


async def parse(serving: Serving, raw: bytes) -> ChatRequest:
    body = decode(_DECODER, raw)
    await check(serving, body)
    return body


def chat_params(body: ChatRequest) -> SamplingParams:
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise InputError("max_tokens and max_completion_tokens mean the same; give one of them", param="max_tokens")
    top = body.top_logprobs
    if top is not None and not body.logprobs:
        raise InputError("top_logprobs needs logprobs to be true", param="top_logprobs")
    limit = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
    _, grammar = grammar_of(body, body.response_format)
    return sampling_params(body, max_tokens=limit, logprobs=(top or 0) if body.logprobs else None, grammar=grammar)


def tool_choice(body: ChatRequest) -> ToolChoice:
    given, parallel = body.tool_choice, body.parallel_tool_calls is not False
    if isinstance(given, NamedTool | NamedCustom):
        return ToolChoice(required=True, only=[given.name], parallel=parallel)
    if isinstance(given, AllowedTools):
        names = [tool.name for tool in given.allowed_tools.tools]
        return ToolChoice(required=given.allowed_tools.mode == "required", only=names, parallel=parallel)
    return ToolChoice(required=given == "required", none=given == "none", parallel=parallel)


def template_variables(body: ChatRequest) -> dict[str, Any]:
    """What the chat template is told of thinking and of the answer's length, under the names that templates know."""
    routed, variables = body.reasoning, dict[str, Any]()
    effort = body.reasoning_effort or (routed.effort if routed else None)
    if effort is not None:
        variables = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    if body.thinking is not None:
        variables["enable_thinking"] = body.thinking.type != "disabled"
    thinks = body.enable_thinking if routed is None or routed.enabled is None else routed.enabled
    if thinks is not None:
        variables["enable_thinking"] = thinks
    for name in ("verbosity", "documents"):
        if (value := getattr(body, name)) is not None:
            variables[name] = value
    return variables | (body.chat_template_kwargs or {})


def thinking_budget(body: ChatRequest) -> int | None:
    """Tokens that a thought may have, under any of the names for it."""
    given = (
        body.thinking_budget,
        body.thinking.budget_tokens if body.thinking else None,
        body.reasoning.max_tokens if body.reasoning else None,
    )
    return min((budget for budget in given if budget is not None), default=None)


def shows_thoughts(body: ChatRequest) -> bool:
    return body.include_reasoning is not False and not (body.reasoning and body.reasoning.exclude)


def turn_of(body: ChatRequest, info: EngineInfo) -> Turn:
    params = chat_params(body)
    messages, prefix = [message.plain() for message in body.messages], ""
    if body.continue_final_message:
        messages, prefix = continued(messages)
        if not prefix:
            problem = "continue_final_message needs a last message of the assistant to go on from"
            raise InputError(problem, param="continue_final_message")
    return Turn(
        messages=messages,
        prefix=prefix,
        params=params,
        tools=[tool.tool() for tool in body.tools or ()],
        choice=tool_choice(body),
        variables=template_variables(body),
        prediction="" if body.prediction is None else joined(body.prediction.content),
        beam=beam_of(body, params),
        keep_tokens=body.truncate_prompt_tokens,
        begin=body.add_generation_prompt is not False,
        priority=TIERS[tier_used(body.service_tier, info) or "auto"] if body.priority is None else body.priority,
        salt=body.cache_salt or "",
        blend=body.blend,
        deadline_ms=body.deadline_ms,
        constraint=grammar_of(body, body.response_format)[0],
        thinking_budget=thinking_budget(body),
    )


def finish_of(reply: Reply, finish: FinishReason | None, named: bool) -> str | None:
    """Why a choice ended; a call that was asked for by name is, to OpenAI, an ordinary end."""
    if finish is FinishReason.STOP and reply.calls and not named:
        return "tool_calls"
    return None if finish is None else finish.value


def message_of(reply: Reply, body: ChatRequest) -> ChatAnswer:
    answer = ChatAnswer(reply.text or (None if reply.calls else ""))
    if reply.thought and shows_thoughts(body):
        answer.reasoning = answer.reasoning_content = reply.thought
    if reply.calls:
        texts = text_tools(body)
        answer.tool_calls = [
            CustomToolCall(call.id, CalledCustom(call.name, input_of(call.text)))
            if call.name in texts
            else ToolCall(call.id, CalledFunction(call.name, call.text))
            for call in reply.calls
        ]
    return answer


def text_tools(body: ChatRequest) -> set[str]:
    """Names of the tools that take plain text."""
    return {tool.custom.name for tool in body.tools or () if isinstance(tool, CustomTool)}


def completion(serving: Serving, id: str, talk: Talk, body: ChatRequest) -> bytes:
    tokenizer = serving.frontend.text.tokenizer
    named = isinstance(body.tool_choice, NamedTool | NamedCustom)
    answer = ChatCompletion(
        id=id,
        created=int(time.time()),
        model=serving.model_name,
        system_fingerprint=serving.fingerprint,
        service_tier=tier_used(body.service_tier, serving.frontend.client.info) or UNSET,
        choices=[
            ChatChoice(
                index,
                message_of(reply, body),
                _scores(tokenizer, reply.output.logprobs or [], body) if body.logprobs else None,
                finish_of(reply, reply.finish_reason, named) or "length",
                reply.stop_reason,
                reply.output.token_ids if body.return_token_ids else UNSET,
            )
            for index, reply in enumerate(talk.wanted())
        ],
        usage=usage_of(talk.generation, talk.thought_tokens()),
    )
    if talk.request.params.prompt_logprobs is not None:
        scores = next((reply.prompt_logprobs for reply in talk.replies if reply.prompt_logprobs), [])
        answer.prompt_logprobs = prompt_logprobs(tokenizer, scored_prompt(talk.request.prompt, scores))
    if body.return_token_ids:
        answer.prompt_token_ids = talk.request.prompt
    if body.store:
        answer.metadata = body.metadata or {}
    return json(answer)


def _scores(tokenizer: TokenBytes, entries: list[TokenLogprobs], body: ChatRequest) -> ChatLogprobs:
    return chat_logprobs(tokenizer, entries, body.return_tokens_as_token_ids)


class ChoiceDelta:
    """The `delta` of a choice's chunks: texts joined, calls piece by piece."""

    def __init__(self, reply: Reply, reasoning: bool, texts: set[str]):
        self._reply = reply
        self._reasoning = reasoning
        self._texts = texts  # names of tools that take plain text
        self._inputs: dict[int, TextInput] = {}  # of calls of those

    def of(self, segments: Sequence[Segment]) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        for segment in segments:
            if isinstance(segment, Said):
                delta["content"] = delta.get("content", "") + segment.text
            elif isinstance(segment, Thought):
                if self._reasoning:
                    delta["reasoning"] = delta["reasoning_content"] = delta.get("reasoning", "") + segment.text
            elif isinstance(segment, CallBegun):
                custom = segment.name in self._texts
                if custom:
                    self._inputs[segment.index] = TextInput()
                begun = {"name": segment.name, **({"input": ""} if custom else {"arguments": ""})}
                kind = "custom" if custom else "function"
                call = {"index": segment.index, "id": self._reply.calls[segment.index].id, "type": kind, kind: begun}
                delta.setdefault("tool_calls", []).append(call)
            else:
                self._add(delta.setdefault("tool_calls", []), segment)
        return delta

    def _add(self, calls: list[dict[str, Any]], piece: CallArguments) -> None:
        reader = self._inputs.get(piece.index)
        kind, key = ("function", "arguments") if reader is None else ("custom", "input")
        if not calls or calls[-1]["index"] != piece.index:
            calls.append({"index": piece.index, kind: {key: ""}})
        calls[-1][kind][key] += piece.text if reader is None else reader.push(piece.text)


class Writer:
    """Chunks of one stream. What is the same in all of a choice's is encoded once; the text is put between."""

    def __init__(self, serving: Serving, id: str, talk: Talk, body: ChatRequest):
        self._tokenizer = serving.frontend.text.tokenizer
        self._talk = talk
        self._body = body
        self._named = isinstance(body.tool_choice, NamedTool | NamedCustom)
        self._begun: set[int] = set()
        shows, texts = shows_thoughts(body), text_tools(body)
        self._deltas = [ChoiceDelta(reply, shows, texts) for reply in talk.replies]
        self._held: dict[int, list[int]] = {}  # ids whose text is not sent yet, by choice

        def usage() -> Usage:
            return usage_of(talk.generation, talk.thought_tokens())

        self.chunks = Chunks(serving, id, "chat.completion.chunk", body.stream_options, usage)
        # Of choices that have begun and have nothing but text, what stands before the text and after it.
        self._frames: dict[int, tuple[bytes, bytes]] = {}

    def write(self, delta: Delta) -> bytes:
        """The chunk for a delta; nothing where it has nothing to say yet."""
        frame = self._frames.get(delta.branch)
        if frame is not None and delta.finish_reason is None and delta.logprobs is None:  # nearly always
            return frame[0] + json(delta.text) + frame[1] if delta.text else b""
        reply = self._talk.replies[delta.branch]
        segments = reply.push(delta)
        if self._body.return_token_ids:
            self._held.setdefault(delta.branch, []).extend(delta.token_ids)
        return self._chunk(delta, segments, reply) if segments or worth_sending(delta) else b""

    def _chunk(self, delta: Delta, segments: Sequence[Segment], reply: Reply) -> bytes:
        first = delta.branch not in self._begun
        self._begun.add(delta.branch)
        if first and reply.plain and not (self._body.return_token_ids or self._body.store):
            before = b'{"index":%d,"delta":{"content":' % delta.branch
            if frame := self.chunks.around(before, b'},"logprobs":null,"finish_reason":null}'):
                self._frames[delta.branch] = frame
        texts = [segment.text for segment in segments if isinstance(segment, Said)]
        if len(texts) == len(segments):  # nearly always
            said = b'"content":%b' % json("".join(texts))
            content = b'{"role":"assistant",%b}' % said if first else b"{%b}" % said
        else:
            role = {"role": "assistant", "content": None} if first else {}
            content = json(role | self._deltas[delta.branch].of(segments))
        scores = delta.logprobs if self._body.logprobs else None
        logprobs = json(_scores(self._tokenizer, scores, self._body)) if scores else b"null"
        last = b',"stop_reason":%b' % json(delta.stop_reason) if delta.finish_reason else b""
        more = b""
        if self._body.return_token_ids:
            last += b',"token_ids":%b' % json(self._held.pop(delta.branch, []))
            more = (
                b',"prompt_token_ids":%b' % json(self._talk.request.prompt) if len(self._begun) == 1 and first else b""
            )
        return self.chunks.event(
            b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b%b}'
            % (delta.branch, content, logprobs, json(finish_of(reply, delta.finish_reason, self._named)), last),
            more,
        )


async def stream(
    serving: Serving, id: str, talk: Talk, body: ChatRequest, out: DirectOut, keep: Callable[[bytes], None]
) -> AsyncGenerator[bytes, None]:
    """`keep` is given the whole completion at the end, if it is to be stored."""
    writer = Writer(serving, id, talk, body)
    out.write = writer.write
    async with aclosing(talk.generation.deltas(out)) as batches:
        async for deltas in batches:
            if data := b"".join([writer.write(delta) for delta in deltas]):
                yield data
    if last := writer.chunks.last():
        yield last
    if body.store:
        keep(completion(serving, id, talk, body))


async def begin(serving: Serving, body: ChatRequest, arrived: float) -> tuple[str, Talk]:
    id = f"chatcmpl-{uuid.uuid4().hex}"
    return id, await start(serving, turn_of(body, serving.frontend.client.info), id, arrived)


async def whole(serving: Serving, raw: bytes) -> bytes:
    """A body to its answer, without HTTP: what batches use."""
    arrived = time.perf_counter()
    body = await parse(serving, raw)
    id, talk = await begin(serving, body, arrived)
    await talk.whole()
    return completion(serving, id, talk, body)


def router(serving: Serving) -> APIRouter:
    routes = APIRouter(tags=["OpenAI"])
    store = stored_chats.ChatStore(Path(serving.options.files) / "chats" if serving.options.files else None)
    routes.include_router(stored_chats.router(serving, store))

    @routes.post(
        "/v1/chat/completions", summary="Create a chat completion", openapi_extra=generates(ChatRequest, ChatCompletion)
    )
    async def chat_completions(request: Request) -> Response:
        raw, arrived = await read_body(request, serving.max_body), time.perf_counter()
        body = await parse(serving, raw)
        if body.store:
            serving.need_store(raw)
        id, talk = await begin(serving, body, arrived)

        def keep(made: bytes) -> None:
            store.keep(owner_of(request), made, [message.plain() for message in body.messages])

        if body.stream:
            out = DirectOut()
            return EventStream(stream(serving, id, talk, body, out, keep), out)
        await until_gone(request.receive, talk.whole())
        made = completion(serving, id, talk, body)
        if body.store:
            keep(made)
        return Response(made, media_type="application/json")

    return routes
