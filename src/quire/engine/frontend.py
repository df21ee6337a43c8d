"""Text in, text out, over any EngineClient: what servers and async callers use. Also `AsyncLLM`, its short form."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from quire.assets import present
from quire.engine.client import AsyncClient
from quire.engine.collector import Collector
from quire.engine.consensus import LAST_NUMBER, Consensus, Extract, Vote
from quire.engine.text_input import (
    Prompt,
    check_grammar,
    chunked,
    pooled_tokens,
    prepare,
    prepare_beam,
    prepare_classes,
    prepare_embedding,
)
from quire.engine.text_output import RequestText, pooled_in
from quire.text import TextModel, chat_prompt
from quire.types.beam import BeamParams
from quire.types.blend import Blend, BlendLike
from quire.types.config import EngineOptions
from quire.types.events import TokenEvent
from quire.types.grammar import GrammarSpec
from quire.types.outputs import Delta, RequestOutput
from quire.types.pooling import unit
from quire.types.request import HOLD, Request
from quire.types.sampling_params import SamplingParams
from quire.types.seams import EngineClient


class Direct(Protocol):
    """A way for deltas past the reader of a stream."""

    def ready(self) -> bool:
        """Whether it would take one now."""
        ...

    def take(self, delta: Delta) -> None: ...


class Frontend:
    def __init__(self, client: EngineClient, text: TextModel, model_name: str):
        self.client = client
        self.text = text
        self.model_name = model_name

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        salt: str = "",
        blend: BlendLike | Blend | None = None,
        prediction: Sequence[int] = (),
        session: str = "",
        hold: float = HOLD,
        lora: str = "",
    ) -> Request:
        """Tokenise and check; raises InputError for anything that can be told from here. `blend`: how a text is to be
        cut into chunks, or where they are among token ids. `prediction`: what the answer may turn out to be."""
        prompt, chunks = chunked(prompt, blend, self.text)
        return prepare(
            prompt,
            params,
            text=self.text,
            info=self.client.info,
            request_id=request_id,
            priority=priority,
            salt=salt,
            blend=chunks,
            prediction=prediction,
            session=session,
            hold=hold,
            lora=lora,
        )

    def prepare_beam(self, prompt: Prompt, beam: BeamParams, **where: Any) -> Request:
        """... for the answers that beam search finds; `where` as for `prepare`, without `params`."""
        return prepare_beam(prompt, beam, text=self.text, info=self.client.info, **where)

    def check_grammar(self, grammar: GrammarSpec) -> None:
        """Compile it on trial; InputError with the reason if it cannot be used. Not for an event loop to call."""
        check_grammar(grammar, self.text)

    async def stream(self, request: Request, direct: Direct | None = None) -> AsyncGenerator[list[Delta], None]:
        """Deltas of all branches as they come; closing the iterator aborts the request. A reader that waits is spared
        those that `direct` takes: it is given what ends nothing, as soon as that comes, if it is `ready`."""
        view = RequestText(request, self.text)
        events = self.client.submit(request)
        if direct is not None:

            def sink(event: TokenEvent) -> bool:
                delta = view.plain(event) if direct.ready() else None
                if delta is None:
                    return False
                direct.take(delta)
                return True

            events.sink = sink
        try:
            async for batch in events:
                deltas = []
                for event in batch:
                    delta, end = view.take(event)
                    if end is not None:
                        self.client.finish_at(request.id, event.branch, end)
                    if delta is not None:
                        deltas.append(delta)
                if deltas:
                    yield deltas
                if not view.open:
                    return
        finally:
            await events.aclose()

    async def collect(self, request: Request, prompt: str | None = None) -> RequestOutput:
        """The whole answer."""
        collector = Collector(request, prompt)
        async for deltas in self.stream(request):
            for delta in deltas:
                collector.add(delta)
        return collector.result()

    async def beam_search(self, prompt: Prompt, beam: BeamParams | None = None, **where: Any) -> RequestOutput:
        """The best answers that beam search finds, best first, with their scores; `where` as for `prepare`."""
        request = self.prepare_beam(prompt, beam or BeamParams(), **where)
        return await self.collect(request, prompt if isinstance(prompt, str) else None)

    async def self_consistency(
        self, prompt: Prompt, params: SamplingParams, extract: Extract = LAST_NUMBER, **where: Any
    ) -> Consensus:
        """The answer that most of `params.n` branches arrive at; the others stop once it is decided."""
        vote = Vote(params.n, extract, params.max_tokens)
        async with aclosing(self.stream(self.prepare(prompt, params, **where))) as stream:
            async for deltas in stream:
                if any(vote.take(delta) for delta in deltas):
                    break
        return vote.result()

    async def embed(
        self, prompt: Prompt, pooling: str | None = None, normalize: bool | None = None, **where: Any
    ) -> tuple[list[float], int]:
        """The pooled hidden state of a prompt, of length one unless the model's files or `normalize` say otherwise, and
        how many tokens the prompt has; `where` as for `prepare`."""
        info = self.client.info
        vector, tokens = await self.pooled(prepare_embedding(prompt, pooling, text=self.text, info=info, **where))
        scaled = info.pooling.normalized if normalize is None else normalize
        return unit(vector) if scaled else vector, tokens

    def prepare_classes(self, prompt: Prompt, other: str | None = None, *, most: int | None = None) -> Request:
        """A request for the scores of classes (logits) of a prompt, or of two texts as a pair. `most`: tokens to keep;
        -1: as many as the model takes."""
        return prepare_classes(prompt, other, text=self.text, info=self.client.info, most=most)

    def pooled_tokens(self, prompt: Prompt, most: int | None) -> list[int]:
        """Of a prompt that an encoder reads, `most` as for `prepare_classes`."""
        return pooled_tokens(prompt, None, text=self.text, info=self.client.info, most=most)[0]

    async def pooled(self, request: Request) -> tuple[list[float], int]:
        """What a request for something pooled comes to, and how many tokens its prompt has."""
        events = [event async for batch in self.client.submit(request) for event in batch]
        return pooled_in(events[-1]), len(request.prompt)


class AsyncLLM(Frontend):
    """`async with await AsyncLLM.open("smollm2-135m") as llm: ...`"""

    @classmethod
    async def open(cls, model: str = "smollm2-135m", *, process: bool = False, **options: Any) -> AsyncLLM:
        engine = EngineOptions.of(model=model, **options)
        if (local := present(model)) is None:
            from quire.engine.build import fetch_model  # asks whether it would run here before it fetches

            local = await asyncio.to_thread(fetch_model, engine)
        client = await AsyncClient.open(engine, process=process)
        return cls(client, TextModel.load(local), local.name)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        blend: BlendLike | Blend | None = None,
        session_id: str = "",
        session_ttl: float = HOLD,
        lora: str = "",
    ) -> RequestOutput:
        """The whole answer; `blend`, sessions and `lora` as for `LLM.generate`."""
        request = self.prepare(
            prompt, params or SamplingParams(), blend=blend, session=session_id, hold=session_ttl, lora=lora
        )
        return await self.collect(request, prompt if isinstance(prompt, str) else None)

    async def chat(
        self,
        messages: list[dict[str, Any]],
        params: SamplingParams | None = None,
        *,
        blend: BlendLike | None = None,
        session_id: str = "",
        session_ttl: float = HOLD,
        lora: str = "",
    ) -> RequestOutput:
        tokens, chunks = chat_prompt(self.text, messages, blend)
        return await self.generate(
            tokens, params, blend=chunks, session_id=session_id, session_ttl=session_ttl, lora=lora
        )

    async def close(self) -> None:
        await self.client.close()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()
