"""From a parsed body to deltas: sampling parameters, engine requests, accounting. Shared by every API family.

One HTTP request is one engine request per prompt; its choices are numbered prompt by prompt, n for each. Deltas
leave here with `branch` set to that number. Refuses to know: JSON, HTTP.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from msgspec import UNSET, UnsetType

from quire.observe.ledger import Ledger
from quire.observe.metrics import Metrics
from quire.serve.core.context import Context, current
from quire.serve.core.fields import refuse_unsupported
from quire.serve.core.prepare_pool import INLINE_SIZE, PreparePool, off_loop
from quire.serve.core.rate_limits import Admission, Permit
from quire.serve.http.api_keys import KeyRing
from quire.serve.openai.request_bodies import GenerationRequest
from quire.serve.openai.response_bodies import CompletionTokensDetails, PromptTokensDetails, Usage
from quire.serve.ops.loop_lag import LagMonitor
from quire.types.errors import (
    ContextLengthError,
    DeadlineError,
    EngineDeadError,
    InputError,
    ModelNotFoundError,
    QuireError,
)
from quire.types.messages import EngineInfo
from quire.types.outputs import Delta
from quire.types.plan import TokenLogprobs
from quire.types.request import HOLD, FinishReason, Request
from quire.types.sampling_params import SamplingParams
from quire.types.serving import ServeOptions

if TYPE_CHECKING:
    from quire.engine.frontend import Frontend

__all__ = [
    "Collected",
    "Generation",
    "Serving",
    "check",
    "collect",
    "hold_session",
    "off_loop",
    "price",
    "sampling_params",
]

# Fields of a body that mean the same, under the same name, to the sampler.
_SHARED = [name for name in GenerationRequest.__struct_fields__ if name in SamplingParams.__struct_fields__]


@dataclass(frozen=True)
class Serving:
    """What the routes of one server share."""

    frontend: Frontend
    metrics: Metrics
    ledger: Ledger
    options: ServeOptions
    keys: KeyRing
    admission: Admission
    prepare_pool: PreparePool
    lag: LagMonitor
    fingerprint: str
    created: int

    @property
    def max_body(self) -> int:
        return self.options.body_bytes

    def check_model(self, name: str) -> None:
        if name != self.frontend.model_name:
            raise ModelNotFoundError(f"no model {name!r} here; this server has {self.frontend.model_name!r}")


def check(serving: Serving, body: GenerationRequest) -> None:
    """Refuse, before any work, what can be seen from the body alone."""
    serving.check_model(body.model)
    refuse_unsupported(body)
    hold_session(body.session_id, body.session_ttl)
    if body.stream_options is not None and not body.stream:
        raise InputError("stream_options needs stream to be true", param="stream_options")
    if body.stream and body.prompt_logprobs is not None:
        raise InputError("prompt_logprobs cannot be streamed; set stream to false", param="prompt_logprobs")


def hold_session(name: str | None, seconds: float | None) -> None:
    """Keep the pages of the request being handled for a while after its answer, if it names a session."""
    if name:
        context = current()
        context.session, context.hold = name, HOLD if seconds is None else seconds


def sampling_params(body: GenerationRequest, **changes: Any) -> SamplingParams:
    """The sampler's view of a body; `changes` are what the API family decides for itself."""
    given = {name: value for name in _SHARED if (value := getattr(body, name)) is not None}
    if isinstance(body.stop, str):
        given["stop"] = [body.stop]
    return SamplingParams(**(given | changes))


def preparing(size: int, params: SamplingParams) -> int:
    """The size of a request to prepare, for `off_loop`: grammars are compiled on trial, which is never small."""
    return size + (INLINE_SIZE + 1 if params.grammar is not None else 0)


@contextmanager
def naming(*, prompt: str = "prompt", constraint: str = "") -> Iterator[None]:
    """Errors name fields as this API does: the prompt, and the field that holds the grammar."""
    try:
        yield
    except ContextLengthError as error:
        error.param = prompt
        raise
    except InputError as error:
        if error.param == "grammar" and constraint:
            error.param = constraint
        raise


@dataclass
class Generation:
    """The engine requests of one HTTP request under way, and what they have used."""

    serving: Serving
    requests: list[Request]
    arrived: float
    deadline_ms: int | None = None  # None: the server's own
    completion_tokens: int = 0
    drafted_tokens: int = 0  # guessed ahead
    accepted_tokens: int = 0  # ... of them, right
    forced_tokens: int = 0  # of completion_tokens, forced by a grammar
    cached: dict[int, int] = field(default_factory=dict)  # prompt tokens from the cache, by request
    blended: dict[int, int] = field(default_factory=dict)  # ... of chunks, from another place
    evicted: dict[int, int] = field(default_factory=dict)  # tokens whose KV was dropped, by choice

    @property
    def prompt_tokens(self) -> int:
        return sum(len(request.prompt) for request in self.requests)

    @property
    def cached_tokens(self) -> int:
        return sum(self.cached.values())

    def usage(self, thought_tokens: int = 0) -> Usage:
        return Usage(
            self.prompt_tokens,
            self.completion_tokens,
            self.prompt_tokens + self.completion_tokens,
            PromptTokensDetails(self.cached_tokens, self._blended_tokens()),
            CompletionTokensDetails(
                thought_tokens, self.accepted_tokens, self.drafted_tokens - self.accepted_tokens, self.forced_tokens
            ),
            sum(self.evicted.values()) if any(r.params.kv_budget for r in self.requests) else UNSET,
        )

    def _blended_tokens(self) -> int | UnsetType:
        return sum(self.blended.values()) if any(request.blend for request in self.requests) else UNSET

    async def deltas(self) -> AsyncGenerator[list[Delta], None]:
        """Everything that is new, as it comes; a slow reader gets more at a time. Closing it aborts the work."""
        permit = self._admitted(current())
        streams = [self._deltas(index, request) for index, request in enumerate(self.requests)]
        try:
            async with aclosing(streams[0] if len(streams) == 1 else _merged(streams)) as stream:
                async for deltas in stream:
                    if permit is not None and not permit.started:
                        self.serving.admission.start(permit)
                    yield coalesced(deltas)
        finally:
            if permit is not None:
                permit.used += self.usage().total_tokens

    def _admitted(self, context: Context) -> Permit | None:
        """The one door to the engine, for every API family: salts, deadlines, and the price of it all."""
        allowed = self.serving.options.deadline_ms if self.deadline_ms is None else self.deadline_ms
        left = allowed / 1000 - (time.perf_counter() - self.arrived) if allowed else math.inf
        if left <= 0:
            raise DeadlineError(f"the deadline of {allowed} ms passed before the request could be queued")
        for request in self.requests:
            request.salt = context.salted(request.salt)
            request.session, request.hold = context.session, context.hold
            request.deadline = time.monotonic() + left if allowed else 0.0
        if context.permit is not None:
            info = self.serving.frontend.client.info
            sequences = sum(request.params.n for request in self.requests)
            tokens = sum(price(request, info) for request in self.requests)
            self.serving.admission.charge(context.permit, tokens, sequences, left)
        return context.permit

    async def _deltas(self, index: int, request: Request) -> AsyncGenerator[list[Delta], None]:
        branches = request.params.n
        who = current()
        with self.serving.ledger.watch(
            request, self.arrived, call=who.request_id, owner=who.key.name, traceparent=who.traceparent
        ) as meter:
            source = self.serving.frontend.stream(request)
            async with aclosing(source) as stream:
                async for deltas in stream:
                    meter.deltas(deltas)
                    for delta in deltas:
                        _raise_failure(delta)
                        self.completion_tokens += len(delta.token_ids)
                        self.drafted_tokens += delta.drafted_tokens
                        self.accepted_tokens += delta.accepted_tokens
                        self.forced_tokens += delta.forced_tokens
                        if delta.cached_tokens:
                            self.cached[index] = max(delta.cached_tokens, self.cached.get(index, 0))
                        if delta.blended_tokens:
                            self.blended[index] = max(delta.blended_tokens, self.blended.get(index, 0))
                        delta.branch += index * branches
                        if delta.evicted_tokens:
                            self.evicted[delta.branch] = delta.evicted_tokens
                    yield deltas


def price(request: Request, info: EngineInfo) -> int:
    """Tokens that `request` may come to hold, in whole pages: its prompt once, and what each branch may draw."""
    prompt = len(request.prompt)
    params = request.params
    room = info.room(params) - prompt
    drawn = 0 if request.pooling else min(params.max_tokens or room, room) * params.n
    if params.kv_budget is not None:
        drawn = min(drawn, params.kv_budget * params.n)
        prompt = min(prompt, params.kv_budget) if params.kv_eviction == "sinks" else prompt
    return math.ceil((prompt + drawn) / info.page_size) * info.page_size


def _raise_failure(delta: Delta) -> None:
    """An end that is no completion becomes an error."""
    if delta.finish_reason is FinishReason.ERROR:
        raise QuireError("the engine could not finish this request")
    if delta.finish_reason is FinishReason.ABORT:
        raise EngineDeadError("the request was aborted before it finished; try again")


def coalesced(deltas: list[Delta]) -> list[Delta]:
    """At most one delta per branch: several that waited together become one."""
    if len(deltas) == 1:
        return deltas
    merged: dict[int, Delta] = {}
    for delta in deltas:
        first = merged.setdefault(delta.branch, delta)
        if first is not delta:
            first.text += delta.text
            first.token_ids = first.token_ids + delta.token_ids
            first.logprobs = _joined(first.logprobs, delta.logprobs)
            first.prompt_logprobs = _joined(first.prompt_logprobs, delta.prompt_logprobs)
            first.finish_reason = delta.finish_reason
            first.stop_reason = delta.stop_reason
    return list(merged.values())


def _joined(first: list[TokenLogprobs] | None, second: list[TokenLogprobs] | None) -> list[TokenLogprobs] | None:
    return first + second if first and second else first or second


async def _merged(streams: list[AsyncGenerator[list[Delta], None]]) -> AsyncGenerator[list[Delta], None]:
    """All streams as one, with whatever is ready in each batch. The first error ends them all."""
    queue: asyncio.Queue[list[Delta] | Exception | None] = asyncio.Queue()

    async def pump(stream: AsyncGenerator[list[Delta], None]) -> None:
        try:
            async with aclosing(stream):
                async for deltas in stream:
                    queue.put_nowait(deltas)
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(pump(stream)) for stream in streams]
    try:
        running = len(tasks)
        while running:
            batch: list[Delta] = []
            items = [await queue.get()]
            while not queue.empty():
                items.append(queue.get_nowait())
            for item in items:
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    running -= 1
                else:
                    batch += item
            if batch:
                yield batch
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


@dataclass
class Collected:
    """One choice, complete."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason = FinishReason.LENGTH

    @property
    def likelihood(self) -> float:
        """Mean log-probability of its tokens, where asked for."""
        return sum(t.logprob for t in self.logprobs) / max(1, len(self.logprobs))


async def collect(generation: Generation) -> list[Collected]:
    """Wait for every choice of the request."""
    choices = [Collected() for request in generation.requests for _ in range(request.params.n)]
    parts: list[list[str]] = [[] for _ in choices]
    async with aclosing(generation.deltas()) as stream:
        async for deltas in stream:
            for delta in deltas:
                choice = choices[delta.branch]
                parts[delta.branch].append(delta.text)
                choice.token_ids += delta.token_ids
                choice.logprobs += delta.logprobs or ()
                choice.prompt_logprobs = choice.prompt_logprobs or delta.prompt_logprobs
                choice.finish_reason = delta.finish_reason or choice.finish_reason
    for choice, texts in zip(choices, parts, strict=True):
        choice.text = "".join(texts)
    return choices
