"""`LLM`: the engine as a Python object. Prompts in, results out; everything in this process unless asked otherwise."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from typing import Any, TypeVar

from quire.assets import present
from quire.engine.client import AsyncClient
from quire.engine.collector import Collector
from quire.engine.consensus import LAST_NUMBER, Consensus, Extract, Vote
from quire.engine.frontend import Frontend
from quire.engine.gc_control import calm
from quire.engine.link import LentLink, open_link
from quire.engine.request_progress import RequestProgress
from quire.engine.text_input import Prompt, chunked, prepare, prepare_beam, prepare_classes, prepare_embedding
from quire.engine.text_output import RequestText, pooled_in
from quire.text import TextModel, chat_prompt
from quire.text.pair_scores import cosine, ranked, scores_pairs, text_pairs
from quire.types.beam import BeamParams
from quire.types.blend import Blend, BlendLike
from quire.types.config import EngineOptions
from quire.types.errors import EngineDeadError, InputError, QuireError, from_wire
from quire.types.events import EngineStats, TokenEvent
from quire.types.messages import (
    Abort,
    Adapted,
    Answer,
    Events,
    FinishAt,
    GetStats,
    LoadAdapter,
    Power,
    Powered,
    Query,
    Question,
    Refused,
    Reply,
    Reset,
    Stats,
    Submit,
    ToClient,
    UnloadAdapter,
)
from quire.types.outputs import Delta, RequestOutput
from quire.types.pooling import unit
from quire.types.request import HOLD, Request, longest_first
from quire.types.sampling_params import SamplingParams

Kind = TypeVar("Kind", bound=Answer)


class LLM:
    """A model ready to generate.

    >>> llm = LLM("smollm2-135m")
    >>> llm.generate("The capital of France is", SamplingParams(temperature=0))[0].outputs[0].text

    Options are those of `quire serve`, by the same names (`page_size=`, `dtype=`, `scheduler=`, ...).
    `process=True` runs the engine in a process of its own.
    """

    def __init__(self, model: str = "smollm2-135m", *, process: bool = False, progress: bool = False, **options: Any):
        self.options = EngineOptions.of(model=model, **options)
        if (local := present(model)) is None:
            from quire.engine.build import fetch_model  # asks whether it would run here before it fetches

            local = fetch_model(self.options, progress=progress)
        self.text = TextModel.load(local)
        self._link = open_link(self.options, process=process, progress=progress)
        self._inboxes: dict[str, deque[TokenEvent]] = {}  # by request: what has come for whoever follows it
        self.info = self._link.info

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priorities: Sequence[int] | None = None,
        blend: BlendLike | Blend | None = None,
        session_id: str = "",
        session_ttl: float = HOLD,
        lora: str | Sequence[str] = "",
        slo_ttft: float = 0.0,
        slo_tpot: float = 0.0,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Answer all prompts, batched, those that may take longest first; results come in the order of the prompts.
        One `params` serves for all. `blend`: the prompts have chunks whose KV may be reused wherever they stand.
        `session_id`: the pages of the one prompt and its answer stay for `session_ttl` seconds. `lora`: the adapter
        they run with, one for all or one for each; "" is the base model. `slo_ttft`, `slo_tpot`: targets for the first
        token and for each after it, in seconds (scheduler slo or auto). `progress`: say on standard error how far they
        are."""
        many = _as_list(prompts)
        if session_id and len(many) > 1:
            raise InputError(f"a session is one conversation; {len(many)} prompts were given", param="session_id")
        each = _for_each(params, len(many))
        ranks = list(priorities or [0] * len(many))
        cut = [chunked(p, blend, self.text) for p in many]
        session = {"session": session_id, "hold": session_ttl}
        adapters = [lora] * len(many) if isinstance(lora, str) else lora
        more: dict[str, Any] = {**session, "slo_ttft": slo_ttft, "slo_tpot": slo_tpot}
        asked = zip(cut, each, ranks, adapters, strict=True)
        requests = [self._prepare(p, s, r, blend=b, lora=one, **more) for (p, b), s, r, one in asked]
        return self.collect(many, requests, progress=progress)

    def chat(
        self,
        conversations: list[dict[str, Any]] | list[list[dict[str, Any]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        blend: BlendLike | None = None,
        session_id: str = "",
        session_ttl: float = HOLD,
        lora: str = "",
        progress: bool = False,
        **template: Any,
    ) -> list[RequestOutput]:
        """One conversation (a list of messages) or several; all but `template`, variables of the chat template, as for
        `generate`."""
        many = [conversations] if conversations and isinstance(conversations[0], dict) else conversations
        if not all(isinstance(turn, dict) for one in many for turn in one):
            example = "{'role': 'user', 'content': 'Hello!'}"
            raise InputError(f"a conversation is a list of messages, such as {example}; plain text goes to generate()")
        cut = [chat_prompt(self.text, c, blend, **template) for c in many]  # type: ignore[arg-type]
        if session_id and len(cut) > 1:
            raise InputError(f"a session is one conversation; {len(cut)} were given", param="session_id")
        session: dict[str, Any] = {"session": session_id, "hold": session_ttl, "lora": lora}
        each = _for_each(params, len(cut))
        requests = [self._prepare(p, s, 0, blend=b, **session) for (p, b), s in zip(cut, each, strict=True)]
        return self.collect([tokens for tokens, _ in cut], requests, progress=progress)

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], beam: BeamParams | None = None, *, lora: str = ""
    ) -> list[RequestOutput]:
        """The best answers that beam search finds for each prompt, best first, with their scores."""
        many = _as_list(prompts)
        beam = beam or BeamParams()
        return self.collect(many, [prepare_beam(p, beam, text=self.text, info=self.info, lora=lora) for p in many])

    def self_consistency(self, prompt: Prompt, params: SamplingParams, extract: Extract = LAST_NUMBER) -> Consensus:
        """The answer that most of `params.n` branches arrive at; the others stop once it is decided. `extract` finds
        the answer in a text: a function, or a regular expression whose last match counts."""
        vote = Vote(params.n, extract, params.max_tokens)
        for _, delta in self._run([self._prepare(prompt, params, 0)]):
            if vote.take(delta):
                break
        return vote.result()

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Delta]:
        """Answer one prompt piece by piece; leaving the loop early aborts it."""
        if params and params.best_of:
            raise InputError("which branch is best is known at the end: best_of cannot be streamed", param="best_of")
        for _, delta in self._run([self._prepare(prompt, params or SamplingParams(), 0)]):
            yield delta

    def embed(
        self, prompts: Prompt | Sequence[Prompt], pooling: str | None = None, *, normalize: bool | None = None
    ) -> list[list[float]]:
        """One vector per prompt: the hidden states of its tokens after the final norm, their mean, the first (of an
        encoder) or the last of them, as the model's files or `pooling` say (mean, if nobody does), scaled to length
        one unless files or `normalize` say otherwise."""
        many = _as_list(prompts)
        vectors = self._pooled([prepare_embedding(p, pooling, text=self.text, info=self.info) for p in many])
        scaled = self.info.pooling.normalized if normalize is None else normalize
        return [unit(vector) for vector in vectors] if scaled else vectors

    def classify(self, prompts: Prompt | Sequence[Prompt], *, truncate: int | None = None) -> list[list[float]]:
        """The probability of each class (`info.pooling.labels`) for each prompt, by the model's classification head."""
        many = [prepare_classes(p, text=self.text, info=self.info, most=truncate) for p in _as_list(prompts)]
        return [self.info.pooling.probabilities(scores) for scores in self._pooled(many)]

    def score(self, first: str | Sequence[str], second: str | Sequence[str]) -> list[float]:
        """How well texts go together, pair by pair; one `first` serves for all. By a cross-encoder's head if the model
        has one, else the cosine of their embeddings."""
        pairs = text_pairs(first, second)
        if scores_pairs(self.info.pooling):
            made = [prepare_classes(one, two, text=self.text, info=self.info) for one, two in pairs]
            return [self.info.pooling.probabilities(scores)[0] for scores in self._pooled(made)]
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        vectors = dict(zip(texts, self.embed(texts, normalize=True), strict=True))
        return [cosine(vectors[one], vectors[two]) for one, two in pairs]

    def rerank(self, query: str, documents: Sequence[str], top_n: int = 0) -> list[tuple[int, float]]:
        """(which document, its score) by `score`, best first; all of them, or the best `top_n`."""
        return ranked(self.score(query, documents), top_n)

    def _pooled(self, requests: list[Request]) -> list[list[float]]:
        vectors: dict[str, list[float]] = {}
        waiting = {r.id for r in requests}
        with self._following(requests, waiting) as inbox:
            while waiting:
                event = self._next(inbox)
                waiting.remove(event.request)
                vectors[event.request] = pooled_in(event)
        return [vectors[r.id] for r in requests]

    def stats(self) -> EngineStats:
        """Counters since start, or since the last reset()."""
        return self._ask(GetStats(), Stats).stats

    def load_lora(self, name: str, path: str) -> None:
        """Load a LoRA adapter (a directory that PEFT saved); needs an engine with `lora` or `max_loras`."""
        self._ask(LoadAdapter(name, path), Adapted)

    def unload_lora(self, name: str) -> None:
        """No new request may name it; those that have it finish with it."""
        self._ask(UnloadAdapter(name), Adapted)

    def sleep(self, level: int = 1) -> None:
        """Free memory until `wake` or the next request. Level 1: weights wait in host memory, on a GPU cached prefixes
        too; 2: neither does, and weights are loaded again."""
        self._ask(Power(True, level), Powered)

    def wake(self) -> None:
        self._ask(Power(False), Powered)

    def reset(self) -> None:
        """Drop cached prefixes and counters."""
        self._link.send(Reset())

    @contextlib.asynccontextmanager
    async def shared(self) -> AsyncIterator[Frontend]:
        """This engine for asyncio, where many callers may use it at once, while the block lasts. Until it ends, the
        LLM's own methods must rest: one thread at a time makes the engine step."""
        client = AsyncClient(LentLink(self._link))
        try:
            yield Frontend(client, self.text, self.info.model)
        finally:
            with contextlib.suppress(EngineDeadError):
                await client.stats()  # what was sent before, aborts among it, has arrived
            await client.close()

    def close(self) -> None:
        self._link.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _prepare(self, prompt: Prompt, params: SamplingParams, priority: int, **more: Any) -> Request:
        return prepare(prompt, params, text=self.text, info=self.info, priority=priority, **more)

    def collect(
        self, prompts: Sequence[Prompt], requests: list[Request], *, progress: bool = False
    ) -> list[RequestOutput]:
        """The whole answers to prepared requests; `prompts` are what results show as such."""
        collectors = {
            r.id: Collector(r, p if isinstance(p, str) else None) for r, p in zip(requests, prompts, strict=True)
        }
        with calm, RequestProgress(len(requests), on=progress) as far:
            for request, delta in self._run(longest_first(requests)):
                collectors[request.id].add(delta)
                far.tokens(len(delta.token_ids))
                if delta.finish_reason is not None and collectors[request.id].done:
                    far.ended()
        return [collectors[r.id].result() for r in requests]

    def _run(self, requests: list[Request]) -> Iterator[tuple[Request, Delta]]:
        views = {r.id: RequestText(r, self.text) for r in requests}
        with self._following(requests, views) as inbox:
            while views:
                event = self._next(inbox)
                view = views.get(event.request)
                if view is None:
                    continue  # of what was drawn after its end
                try:
                    delta, end = view.take(event)
                except QuireError:
                    del views[event.request]
                    raise
                if end is not None:
                    self._link.send(FinishAt(event.request, event.branch, end))
                if not view.open:
                    del views[event.request]
                if delta is not None:
                    yield view.request, delta

    @contextlib.contextmanager
    def _following(self, requests: list[Request], open_: Collection[str]) -> Iterator[deque[TokenEvent]]:
        """Submits requests; their events come into what this gives. However it is left, those that are still open then
        are aborted."""
        inbox: deque[TokenEvent] = deque()
        self._inboxes.update((request.id, inbox) for request in requests)
        try:
            self._link.send(*map(Submit, requests))
            yield inbox
        finally:
            for request in requests:
                self._inboxes.pop(request.id, None)
            with contextlib.suppress(EngineDeadError):
                self._link.send(*map(Abort, open_))

    def _next(self, inbox: deque[TokenEvent]) -> TokenEvent:
        while not inbox:
            self._receive()
        return inbox.popleft()

    def _ask(self, question: Question, kind: type[Kind]) -> Kind:
        query = Query(question)
        self._link.send(query)
        while True:
            for message in self._receive():
                if isinstance(message, Reply) and message.id == query.id:
                    if isinstance(message.answer, Refused):
                        raise from_wire(message.answer.error, message.answer.message)
                    assert isinstance(message.answer, kind)
                    return message.answer

    def _receive(self) -> list[ToClient]:
        """Events go to whoever follows their request, for several may be under way; the rest is handed on."""
        others: list[ToClient] = []
        for message in self._link.receive(None):
            if not isinstance(message, Events):
                others.append(message)
                continue
            for event in message.events:
                if (inbox := self._inboxes.get(event.request)) is not None:
                    inbox.append(event)
        return others


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt (text, or a list of token ids) or several → several."""
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _for_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    """One for all, or one for each."""
    each = list(params) if isinstance(params, Sequence) else [params or SamplingParams()] * count
    if len(each) != count:
        raise InputError(f"{count} prompts but {len(each)} sampling parameters", param="params")
    return each
