"""One response under way: its conversation, its answer, the object that tells of both; waited for or not.

Refuses to know: routes, how tokens are made, how calls are read.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec

from quire.serve.core.constraints import ANY_JSON, json_schema
from quire.serve.core.generation import Serving
from quire.serve.core.token_logprobs import ChatTokenLogprob, token_logprobs
from quire.serve.core.turns import Talk, Turn, start
from quire.serve.http.auth import own_place
from quire.serve.http.error_bodies import describe
from quire.serve.http.http_io import json
from quire.serve.openai.chat_parts import JsonObjectFormat, TextFormat
from quire.serve.openai.request_bodies import TIERS, tier_used
from quire.serve.openai.responses_bodies import (
    ENCRYPTED,
    LOGPROBS,
    ConversationId,
    ResponseRequest,
    TextConfig,
)
from quire.serve.openai.responses_input import (
    choice_of,
    conversation_of,
    earlier_items,
    items_of,
    messages_of,
    tools_of,
)
from quire.serve.openai.responses_items import Events, Output, item_id, split
from quire.serve.openai.responses_objects import (
    Incomplete,
    InputDetails,
    OutputDetails,
    ResponseFailure,
    ResponseObject,
    ResponseUsage,
)
from quire.serve.openai.responses_store import Kept
from quire.serve.openai.sampling import grammar_of, sampling_params
from quire.text.segments import CallBegun, Said, Thought
from quire.types.errors import InputError, OverloadedError
from quire.types.grammar import GrammarSpec
from quire.types.outputs import Delta
from quire.types.request import FinishReason
from quire.types.sampling_params import SamplingParams

FORMAT = "text.format"  # where a grammar may be
MAX_BACKGROUND = 256  # responses in the background at once
MAX_OWN_BACKGROUND = 64  # ... of one key
logger = logging.getLogger("quire.serve")

# Fields of a body that a response repeats.
_ECHOED = (
    *("instructions", "max_output_tokens", "metadata", "parallel_tool_calls", "previous_response_id", "user"),
    *("reasoning", "service_tier", "temperature", "tool_choice", "tools", "top_logprobs", "top_p", "truncation"),
    *("safety_identifier", "prompt_cache_key", "background"),
)


def constraint_of(body: ResponseRequest) -> tuple[str, GrammarSpec | None]:
    """The one constraint, and the field that holds it."""
    name, found = grammar_of(body)
    format = body.text.format if body.text else None
    if format is None or isinstance(format, TextFormat):
        return name, found
    if found is not None:
        raise InputError(f"an answer takes one constraint, not {FORMAT} and {name}", param=name)
    if isinstance(format, JsonObjectFormat):
        return FORMAT, ANY_JSON
    return FORMAT, json_schema(format.schema, FORMAT, strict=format.strict)


def params_of(body: ResponseRequest) -> SamplingParams:
    logprobs = (body.top_logprobs or 0) if LOGPROBS in (body.include or ()) else None
    return sampling_params(body, max_tokens=body.max_output_tokens, logprobs=logprobs, grammar=constraint_of(body)[1])


class Run:
    """`kept` is where items are found and, unless the body says otherwise, the response is kept."""

    def __init__(self, serving: Serving, body: ResponseRequest, kept: Kept | None, owner: str):
        self.serving = serving
        self.body = body
        self.kept = kept
        self.owner = owner
        self.stores = kept is not None and body.store is not False
        self.earlier = earlier_items(body, kept, owner)
        self.items = items_of(body.input, kept, owner)
        if not self.earlier and not self.items:
            raise InputError("there is nothing to answer; send input", param="input", code="missing_required_parameter")
        self.tools = tools_of(body)
        self.response = self._response()
        self.events = Events()
        self._scores: list[ChatTokenLogprob] = []
        thinking = body.reasoning
        self._output = Output(
            self.events,
            texts={tool.name for tool in self.tools if tool.takes_text},
            summarised=thinking is not None and bool(thinking.summary or thinking.generate_summary),
            carried=ENCRYPTED in (body.include or ()),
        )

    def _response(self) -> ResponseObject:
        body = self.body
        response = ResponseObject(
            id=item_id("resp"),
            created_at=int(time.time()),
            model=self.serving.model_name,
            store=body.store is not False,
        )
        if body.text is not None:
            response.text = TextConfig(format=body.text.format or TextFormat(), verbosity=body.text.verbosity)
        for name in _ECHOED:
            if (value := getattr(body, name)) is not None:
                setattr(response, name, value)
        if (conversation := conversation_of(body)) is not None:
            response.conversation = ConversationId(conversation)
        response.service_tier = tier_used(body.service_tier, self.serving.frontend.client.info) or response.service_tier
        return response

    def turn(self) -> Turn:
        body, effort = self.body, self.body.reasoning.effort if self.body.reasoning else None
        variables: dict[str, Any] = {}
        if effort:
            variables = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
        if body.text and body.text.verbosity:
            variables["verbosity"] = body.text.verbosity
        system = [{"role": "system", "content": body.instructions}] if body.instructions else []
        return Turn(
            messages=system + messages_of(self.earlier + self.items),
            params=params_of(body),
            tools=self.tools,
            choice=choice_of(body),
            variables=variables,
            priority=TIERS[self.response.service_tier] if body.priority is None else body.priority,
            salt=body.cache_salt or "",
            blend=body.blend,
            deadline_ms=body.deadline_ms,
            keep_tokens=body.truncate_prompt_tokens,
            drop_oldest=body.truncation == "auto",
            messages_param="input",
            constraint=constraint_of(body)[0],
        )

    async def start(self, arrived: float) -> Talk:
        return await start(self.serving, self.turn(), self.response.id, arrived)

    def opening(self) -> bytes:
        self.response.status = "in_progress"
        out = self.events.write("response.created", response=self.response)
        return out + self.events.write("response.in_progress", response=self.response)

    async def parts(self, talk: Talk) -> AsyncGenerator[bytes, None]:
        """Events from the first token on, the last of which says that the response is over."""
        async with aclosing(talk.generation.deltas()) as batches:
            async for deltas in batches:
                yield b"".join([self._write(talk, delta) for delta in deltas])
        closing = self._finish(talk)
        yield closing + self.events.write(f"response.{self.response.status}", response=self.response)

    def _write(self, talk: Talk, delta: Delta) -> bytes:
        """Tokens may come before their text does: their logprobs wait for it."""
        reply, output, out = talk.replies[delta.branch], self._output, b""
        if delta.logprobs:
            self._scores += token_logprobs(self.serving.frontend.text.tokenizer, delta.logprobs)
        for segment in reply.push(delta):
            if isinstance(segment, Said):
                scores, self._scores = self._scores, []
                out += output.text(segment.text, scores)
            elif isinstance(segment, Thought):
                out += output.thought(segment.text)
            elif isinstance(segment, CallBegun):
                out += output.call(reply.calls[segment.index].id, segment.name)
            else:
                out += output.arguments(segment.text)
        return out

    def _finish(self, talk: Talk) -> bytes:
        """Close the answer: events of its last item, the response complete, and kept if it is to be."""
        response, generation, [reply] = self.response, talk.generation, talk.replies
        short = reply.finish_reason is FinishReason.LENGTH
        closing = self._output.close("incomplete" if short else "completed")
        response.status = "incomplete" if short else "completed"
        response.incomplete_details = Incomplete("max_output_tokens") if short else None
        response.completed_at = None if short else int(time.time())
        response.output = self._output.items
        response.usage = ResponseUsage(
            generation.prompt_tokens,
            InputDetails(generation.cached_tokens),
            generation.completion_tokens,
            OutputDetails(reply.thought_tokens),
            generation.prompt_tokens + generation.completion_tokens,
        )
        self._add_to_conversation()
        if not response.background:
            self.keep()
        return closing

    def keep(self, log: list[bytes] | None = None) -> None:
        if self.kept is not None and self.stores:
            self.kept.keep(self.response, self.owner, self.items, self.earlier, log or [])

    def _add_to_conversation(self) -> None:
        if self.response.conversation is None or self.kept is None:
            return
        try:
            record = self.kept.conversation(self.response.conversation.id, self.owner)
            record.items += msgspec.to_builtins([*self.items, *self.response.output])
            self.kept.keep_conversation(record, self.owner)
        except InputError as error:  # deleted meanwhile, or full: the answer is there all the same
            logger.info("conversation %s: %s", self.response.conversation.id, error)

    def failed(self, error: Exception) -> bytes:
        detail = describe(error).body.error
        self.response.status, self.response.output = "failed", self._output.items
        self.response.error = ResponseFailure("server_error", detail.message)
        return self.events.write("response.failed", response=self.response)

    async def whole(self, talk: Talk) -> bytes:
        async with aclosing(self.parts(talk)) as parts:
            async for _ in parts:
                pass
        return json(self.response)

    async def stream(self, talk: Talk) -> AsyncGenerator[bytes, None]:
        """All events. Until the engine has begun, errors have a status of their own."""
        begun = False
        try:
            async with aclosing(self.parts(talk)) as parts:
                async for part in parts:
                    if not begun:
                        begun, part = True, self.opening() + part
                    if part:
                        yield part
        except Exception as error:
            if not begun:
                raise
            yield self.failed(error)


class BackgroundRun:
    """A response that is made whether or not anybody waits for it, and the events it has had, for any who follow."""

    def __init__(self, run: Run):
        self.run = run
        self.cancelled = False
        self.log: list[bytes] = []
        self._over = False
        self._news = asyncio.Event()
        response = run.response
        response.status = "queued"
        self._add(run.events.write("response.created", response=response))
        self._add(run.events.write("response.queued", response=response))
        run.keep(self.log)
        self.task = asyncio.create_task(self._work(), name=response.id)

    def _add(self, events: bytes) -> None:
        self.log += split(events)
        self._news.set()
        self._news = asyncio.Event()

    async def _work(self) -> None:
        run, response = self.run, self.run.response
        try:
            while True:
                try:
                    await self._answer()
                    break
                except OverloadedError as error:  # it waits for its turn
                    if response.status != "queued":
                        raise
                    await asyncio.sleep(error.retry_after)
        except asyncio.CancelledError:
            response.output = run._output.items
            response.status = "cancelled" if self.cancelled else "failed"
            if not self.cancelled:
                response.error = ResponseFailure("server_error", "the server ended before the response did")
        except Exception as error:
            self._add(run.failed(error))
        finally:
            self._over = True
            run.keep(self.log)
            self._news.set()

    async def _answer(self) -> None:
        run = self.run
        with own_place(run.serving):
            arrived = time.perf_counter()
            await run.serving.use_model(run.body.model)
            talk = await run.start(arrived)
            run.response.status = "in_progress"
            self._add(run.events.write("response.in_progress", response=run.response))
            async with aclosing(run.parts(talk)) as parts:
                async for part in parts:
                    self._add(part)

    async def follow(self, after: int) -> AsyncGenerator[bytes, None]:
        """Events behind the one of this number, as they come."""
        at = after + 1
        while True:
            news = self._news
            if at < len(self.log):
                yield b"".join(self.log[at:])
                at = len(self.log)
            if self._over:
                return
            await news.wait()


class Background:
    """The responses under way in the background, by id."""

    def __init__(self) -> None:
        self._runs: dict[str, BackgroundRun] = {}

    def start(self, run: Run) -> BackgroundRun:
        own = sum(other.run.owner == run.owner for other in self._runs.values())
        if len(self._runs) >= MAX_BACKGROUND or own >= MAX_OWN_BACKGROUND:
            raise OverloadedError("too many responses are under way in the background; try again later", retry_after=5)
        made = BackgroundRun(run)
        self._runs[run.response.id] = made
        made.task.add_done_callback(lambda _: self._runs.pop(run.response.id, None))
        return made

    def find(self, id: str, owner: str) -> BackgroundRun | None:
        found = self._runs.get(id)
        return found if found is not None and found.run.owner == owner else None

    async def cancel(self, run: BackgroundRun) -> None:
        run.cancelled = True
        run.task.cancel()
        await asyncio.wait([run.task])

    async def close(self) -> None:
        tasks = [run.task for run in self._runs.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
