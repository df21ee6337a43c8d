"""One message of Anthropic's API under way: the model's rounds, and between them the searches that the server runs.

Refuses to know: HTTP, how an answer is written down.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from quire.serve.anthropic.context_edits import Conversation, Edited, edited
from quire.serve.anthropic.message_blocks import SearchOutcome, ToolReference, found_words, text_of, tool_message
from quire.serve.anthropic.message_bodies import (
    AnthropicUsage,
    ChoiceAny,
    ChoiceNone,
    ChoiceTool,
    CountTokensRequest,
    MessagesRequest,
    ThinkingDisabled,
    ThinkingEnabled,
)
from quire.serve.anthropic.message_tools import Toolbox
from quire.serve.anthropic.tool_search import SearchError, search
from quire.serve.core.constraints import json_schema
from quire.serve.core.generation import Serving
from quire.serve.core.turns import Call, Reply, Talk, ToolChoice, Turn, continued, plain_call, render, start
from quire.types.request import FinishReason
from quire.types.sampling_params import SamplingParams

CONSTRAINT = "output_config.format"  # where a grammar is
MAX_ROUNDS = 10  # of searches in one message; the caller may have it go on


def params_of(body: MessagesRequest) -> SamplingParams:
    config = body.output_config
    format = config.format if config and config.format else body.output_format
    return SamplingParams(
        max_tokens=body.max_tokens,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=body.top_k or 0,
        stop=body.stop_sequences or [],
        grammar=json_schema(format.schema, CONSTRAINT) if format else None,
    )


def choice_of(body: CountTokensRequest) -> ToolChoice:
    given = body.tool_choice
    if given is None or isinstance(given, ChoiceNone):
        return ToolChoice(none=given is not None)
    only = [given.name] if isinstance(given, ChoiceTool) else None
    required = isinstance(given, ChoiceAny | ChoiceTool)
    return ToolChoice(required=required, only=only, parallel=not given.disable_parallel_tool_use)


def thinks(body: CountTokensRequest) -> bool:
    return body.thinking is not None and not isinstance(body.thinking, ThinkingDisabled)


Searched = Sequence[tuple[Call, SearchOutcome]]


class Exchange:
    """A request's conversation and tools as the model is to see them, now and after searches."""

    def __init__(self, serving: Serving, body: CountTokensRequest, id: str = "", arrived: float = 0.0):
        self.serving = serving
        self.body = body
        self.id = id
        self.choice = choice_of(body)
        forced = self.choice.only[0] if self.choice.only else None
        self.tools = Toolbox(body.tools or [], body.messages, forced)
        self.edits = Edited([])
        self.priority = 0
        self._arrived = arrived
        self._messages: Conversation = []
        self._talks: list[Talk] = []

    async def prepare(self) -> Turn:
        """The first turn, the context edited."""
        described = self._described()
        messages = [plain for message in self.body.messages for plain in message.plain(described)]
        if system := text_of(self.body.system):
            messages.insert(0, {"role": "system", "content": system})

        async def count(messages: Conversation) -> int:
            tokens, _ = await render(self.serving, self._turn(messages, SamplingParams()))
            return len(tokens)

        self.edits = await edited(messages, self.body.context_management, count)
        self._messages = self.edits.messages
        params = params_of(self.body) if isinstance(self.body, MessagesRequest) else SamplingParams()
        return self._turn(self._messages, params)

    async def begin(self) -> Talk:
        return await self._start(await self.prepare())

    async def searched(self, reply: Reply) -> Searched:
        """Carry out the searches that a round of the model asked for."""
        found: list[tuple[Call, SearchOutcome]] = []
        for call in reply.calls:
            if call.name in self.tools.searches and reply.finish_reason is not FinishReason.LENGTH:
                found.append((call, await self._search(call)))
        return found

    async def _search(self, call: Call) -> SearchOutcome:
        try:
            tools = await search(call.name, call.input.get("query"), list(self.tools.deferred.values()))
        except SearchError as error:
            return SearchOutcome(type="tool_search_tool_result_error", error_code=error.code)
        self.tools.find(tool.name for tool in tools)
        references = [ToolReference(tool_name=tool.name) for tool in tools]
        return SearchOutcome(type="tool_search_tool_search_result", tool_references=references)

    def paused(self, found: Searched) -> bool:
        """Whether the model would go on, but has had its rounds."""
        return bool(found) and len(self._talks) >= MAX_ROUNDS

    async def go_on(self, reply: Reply, found: Searched) -> Talk | None:
        """The next round, if there is one: the model searched, and its caller has nothing to run."""
        assert isinstance(self.body, MessagesRequest)
        left = self.body.max_tokens - sum(talk.replies[0].tokens for talk in self._talks)
        if not found or len(found) < len(reply.calls) or self.paused(found) or left < 1:
            return None
        calls = [plain_call(server_id(call), call.name, call.input) for call, _ in found]
        messages, prefix = continued(self._messages)
        said: dict[str, Any] = {"role": "assistant", "content": prefix + reply.text, "tool_calls": calls}
        if reply.thought:
            said["reasoning_content"] = reply.thought
        described = self._described()
        results = [tool_message(server_id(call), found_words(outcome, described)) for call, outcome in found]
        self._messages = [*messages, said, *results]
        return await self._start(self._turn(self._messages, replace(params_of(self.body), max_tokens=left)))

    def usage(self) -> AnthropicUsage:
        """Of all rounds so far."""
        generations = [talk.generation for talk in self._talks]
        cached = sum(generation.cached_tokens for generation in generations)
        return AnthropicUsage(
            input_tokens=sum(generation.prompt_tokens for generation in generations) - cached,
            output_tokens=sum(talk.replies[0].tokens for talk in self._talks),
            cache_read_input_tokens=cached,
        )

    def _described(self) -> dict[str, str]:
        """Tools that were found, as the conversation tells of them."""
        return {
            name: msgspec.json.encode(tool.described()["function"]).decode() for name, tool in self.tools.found.items()
        }

    def _turn(self, messages: Conversation, params: SamplingParams) -> Turn:
        variables: dict[str, Any] = {"enable_thinking": thinks(self.body)}
        thinking = self.body.thinking
        if self.body.output_config is not None and self.body.output_config.effort is not None:
            variables["reasoning_effort"] = self.body.output_config.effort
        messages, prefix = continued(messages)
        return Turn(
            messages=messages,
            params=params,
            tools=[*self.tools.told, *self.tools.found.values()],
            choice=self.choice,
            variables=variables,
            prefix=prefix,
            constraint=CONSTRAINT,
            inline=self.tools.found,
            priority=self.priority,
            blend=self.body.blend,
            thinking_budget=thinking.budget_tokens if isinstance(thinking, ThinkingEnabled) else None,
        )

    async def _start(self, turn: Turn) -> Talk:
        round = f"-{len(self._talks)}" if self._talks else ""
        talk = await start(self.serving, turn, self.id + round, self._arrived)
        self._talks.append(talk)
        return talk


def server_id(call: Call) -> str:
    """The id of a call that the server itself carries out."""
    return f"srvtoolu_{call.id}"
