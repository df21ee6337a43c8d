"""Who fills the holes: the seam between prompts and whatever runs the model, and the engine in this process behind it.

Knows: states of prompts, the text side of the engine. Refuses to know: holes, threads, HTTP.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from quire.engine.frontend import Frontend
from quire.lang.state import State, Usage, settle
from quire.types.blend import Blend
from quire.types.errors import EngineDeadError
from quire.types.grammar import GrammarKind, GrammarSpec
from quire.types.outputs import CompletionOutput, Delta
from quire.types.request import HOLD, FinishReason, Request
from quire.types.sampling_params import MAX_N, SamplingParams


@dataclass(frozen=True)
class Answer:
    """One way on from a state. `tokens` are exactly the text's beginning `covered`: all of it but for a token that a
    stop string cut in two."""

    text: str
    tokens: tuple[int, ...]
    covered: str
    finish: FinishReason
    logprobs: tuple[float, ...]  # of the tokens drawn, if asked for
    usage: Usage

    @property
    def cut(self) -> bool:
        """Whether it ended for want of room, not because it was complete."""
        return self.finish is FinishReason.LENGTH


class Backend(Protocol):
    """Calls may run at the same time."""

    async def settle(self, state: State) -> State:
        """The state as `generate` is to go on from: with its tokens, where this backend deals in tokens."""
        ...

    async def generate(self, state: State, params: SamplingParams) -> list[Answer]:
        """`params.n` ways on from a settled state; the first one's usage holds the prompt's."""
        ...

    async def spell(self, state: State, options: Sequence[str]) -> list[Answer]:
        """Each option as an answer, with the model's own log-probabilities of its tokens."""
        ...

    def stream(self, state: State, params: SamplingParams) -> AsyncGenerator[list[Delta], None]:
        """The same piece by piece; closing it ends the work."""
        ...


def choosing(kind: GrammarKind, options: Sequence[str], **more: Any) -> SamplingParams:
    """An answer that is one of the options. Log-probabilities, where asked for, are the model's own, from before the
    grammar."""
    longest = max(len(option.encode()) for option in options)
    return SamplingParams(max_tokens=longest + 1, grammar=GrammarSpec(kind, json.dumps(list(options))), **more)


async def spell_apart(backend: Backend, state: State, options: Sequence[str]) -> list[Answer]:
    """A call for each option, all at once."""
    calls = (backend.generate(state, choosing("choice", [option], temperature=0.0, logprobs=0)) for option in options)
    return [answer for (answer,) in await asyncio.gather(*calls)]


class InProcess:
    """The backend over a Frontend: token ids in, token ids out."""

    def __init__(self, frontend: Frontend):
        self._frontend = frontend

    async def settle(self, state: State) -> State:
        return await settle(state, self)

    async def render(self, messages: list[dict[str, str]], generation: bool) -> str:
        return self._frontend.text.render_chat(messages, add_generation_prompt=generation)

    async def encode(self, text: str, *, first: bool, special: bool) -> list[int]:
        tokenizer = self._frontend.text.tokenizer
        return tokenizer.encode(text, add_special=special) if first else tokenizer.encode_on(text)

    async def generate(self, state: State, params: SamplingParams) -> list[Answer]:
        output = await self._frontend.collect(await self._request(state, params))
        prompt = Usage(1, len(output.prompt_token_ids), output.cached_tokens, blended_tokens=output.blended_tokens)
        return [self._answer(out, Usage() if index else prompt) for index, out in enumerate(output.outputs)]

    async def spell(self, state: State, options: Sequence[str]) -> list[Answer]:
        """In one call, which computes the prompt once for all."""
        if len(options) > MAX_N:
            return await spell_apart(self, state, options)
        params = choosing("each", options, temperature=0.0, logprobs=0, n=len(options))
        return await self.generate(state, params)

    async def stream(self, state: State, params: SamplingParams) -> AsyncGenerator[list[Delta], None]:
        async for deltas in self._frontend.stream(await self._request(state, params)):
            yield deltas

    async def _request(self, state: State, params: SamplingParams) -> Request:
        name, seconds = state.session or ("", HOLD)
        blend = Blend(list(state.chunks)) if state.chunks else None
        prepare = partial(self._frontend.prepare, session=name, hold=seconds, blend=blend)
        if params.grammar is None:
            return prepare(state.tokens, params)
        return await asyncio.to_thread(prepare, state.tokens, params)  # a grammar is compiled on trial

    def _answer(self, out: CompletionOutput, usage: Usage) -> Answer:
        count, characters = self._frontend.text.tokenizer.covered(out.token_ids, out.text)
        if out.finish_reason is None or out.finish_reason is FinishReason.ABORT:
            raise EngineDeadError("the call was cancelled before it finished")
        return Answer(
            text=out.text,
            tokens=tuple(out.token_ids[:count]),
            covered=out.text[:characters],
            finish=out.finish_reason,
            logprobs=tuple(entry.logprob for entry in out.logprobs or ()),
            usage=usage + Usage(output_tokens=len(out.token_ids)),
        )
