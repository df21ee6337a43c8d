"""From engine requests to deltas: admission, accounting, usage. Shared by every API family.

One call is one engine request per prompt; its choices are numbered prompt by prompt, n for each. Deltas
leave here with `branch` set to that number. Refuses to know: JSON, HTTP.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from msgspec.structs import replace

from quire.engine.collector import Collector
from quire.observe.metrics import RequestMeter
from quire.serve.core.context import Context, current
from quire.serve.core.fields import ServiceLevel
from quire.serve.core.prepare_pool import INLINE_SIZE, off_loop
from quire.serve.core.rate_limits import Permit
from quire.serve.core.server_state import Serving
from quire.types.beam import BeamParams
from quire.types.counts import Counts
from quire.types.errors import (
    ContextLengthError,
    DeadlineError,
    EngineDeadError,
    InputError,
    OverloadedError,
    QuireError,
)
from quire.types.messages import EngineInfo
from quire.types.outputs import Delta, RequestOutput
from quire.types.request import HOLD, FinishReason, Request
from quire.types.sampling_params import SamplingParams

if TYPE_CHECKING:
    from quire.engine.frontend import Frontend

__all__ = [
    "DirectOut",
    "Generation",
    "Serving",
    "Usage",
    "collect",
    "hold_session",
    "off_loop",
    "price",
]


BACKGROUND = 1000  # priority of what nobody waits for: behind all tiers, and by ageing not for ever


def hold_session(name: str | None, seconds: float | None) -> None:
    """Keep the pages of the request being handled for a while after its answer, if it names a session."""
    if name:
        context = current()
        context.session, context.hold = name, HOLD if seconds is None else seconds


def set_targets(slo: ServiceLevel | None) -> None:
    """Hold the request being handled to targets of its own."""
    if slo is not None:
        current().slo = (slo.ttft or 0.0, slo.tpot or 0.0)


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


@dataclass(frozen=True)
class Usage:
    """What a call used, whichever API tells of it."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int  # of the prompts, found in the cache
    blended_tokens: int | None  # ... of chunks, from another place; None: not asked for
    evicted_tokens: int | None  # whose KV was dropped; None: no budget was asked for
    forced_tokens: int  # of the completion, forced by a grammar
    drafted_tokens: int  # by speculation
    accepted_tokens: int  # ... of them, right

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass
class Generation:
    """The engine requests of one call under way, and what they have used."""

    serving: Serving
    requests: list[Request]
    arrived: float
    deadline_ms: int | None = None  # None: the server's own
    prompt_only: bool = False  # nothing that is drawn counts: the prompt is to be scored, or cached
    completion_tokens: int = 0
    counts: dict[int, Counts] = field(default_factory=dict)  # by choice

    @property
    def prompt_tokens(self) -> int:
        return sum(len(request.prompt) for request in self.requests)

    @property
    def cached_tokens(self) -> int:
        return self._of_prompts("cached")

    def usage(self) -> Usage:
        counts = self.counts.values()
        return Usage(
            self.prompt_tokens,
            self.completion_tokens,
            self.cached_tokens,
            self._of_prompts("blended") if any(request.blend for request in self.requests) else None,
            sum(c.evicted for c in counts) if any(request.params.kv_budget for request in self.requests) else None,
            sum(c.forced for c in counts),
            sum(c.drafted for c in counts),
            sum(c.accepted for c in counts),
        )

    def _of_prompts(self, name: str) -> int:
        """A counter that all choices of a prompt share, once for each prompt."""
        most: dict[int, int] = {}
        for choice, counts in self.counts.items():
            prompt = choice // self.requests[0].params.n
            most[prompt] = max(most.get(prompt, 0), getattr(counts, name))
        return sum(most.values())

    def deltas(self, out: DirectOut | None = None) -> AsyncGenerator[list[Delta], None]:
        """Everything that is new, as it comes, at most one delta a choice: a slow reader gets more at a time. Closing
        it aborts the work. To be called once; raises where the call may not be made now. `out`: where deltas that end
        nothing may go at once, rather than to a reader that would have to be woken for each."""
        permit = self._admitted(current())
        if len(self.requests) == 1:
            return self._deltas(0, self.requests[0], permit, out)
        return _merged([self._deltas(index, request, permit) for index, request in enumerate(self.requests)])

    def _admitted(self, context: Context) -> Permit | None:
        """The one way to the engine, for every API family: tenants, salts, deadlines, and the price of it all."""
        allowed = self.serving.options.deadline_ms if self.deadline_ms is None else self.deadline_ms
        left = allowed / 1000 - (time.perf_counter() - self.arrived) if allowed else math.inf
        if left <= 0:
            raise DeadlineError(f"the deadline of {allowed} ms passed before the request could be queued")
        for request in self.requests:
            request.salt, request.tenant = context.salted(request.salt), context.key.name
            request.session, request.hold = context.session, context.hold
            request.lora = context.lora
            request.deadline = time.time() + left if allowed else 0.0
            request.longest_wait = min(left, self.serving.options.max_queue_wait)
            request.weight = context.key.weight
            request.slo_ttft = context.slo[0] or request.slo_ttft or context.key.slo_ttft
            request.slo_tpot = context.slo[1] or request.slo_tpot or context.key.slo_tpot
            request.background = context.permit is not None and context.permit.background
            if request.background:
                request.longest_wait = 0.0
        if context.permit is not None:
            info = self.serving.frontend.client.info
            if context.permit.background and info.priorities:
                for request in self.requests:
                    request.priority = max(request.priority, BACKGROUND)
            tokens = sum(price(request, info) for request in self.requests)
            self.serving.admission.charge(context.permit, tokens)
        return context.permit

    async def _deltas(
        self, index: int, request: Request, permit: Permit | None, out: DirectOut | None = None
    ) -> AsyncGenerator[list[Delta], None]:
        who, first = current(), index * request.params.n
        with self.serving.ledger.watch(
            request,
            self.arrived,
            self.serving.metrics,
            call=who.request_id,
            owner=who.key.name,
            traceparent=who.traceparent,
        ) as meter:
            try:
                if out is not None:
                    out.meter, out.note = meter, self.note
                async with aclosing(self.serving.frontend.stream(request, out)) as stream:
                    async for deltas in stream:
                        if permit is not None and not permit.started:
                            self.serving.admission.start(permit)
                        now = time.perf_counter()
                        for delta in deltas:
                            meter.delta(delta, now)
                            if self.prompt_only:
                                _forget_drawn(delta)
                            delta.branch += first
                            self.note(delta)
                            if delta.finish_reason is not None:
                                _raise_failure(delta)
                        yield deltas if len(deltas) == 1 else coalesced(deltas)
            except OverloadedError as refusal:  # the engine knows its place in the queue, and what it would wait there
                raise self.serving.admission.refused_later(refusal) from None
            finally:
                if permit is not None:
                    permit.used += len(request.prompt) + meter.tokens

    def note(self, delta: Delta) -> None:
        """Count what a delta brings."""
        self.completion_tokens += len(delta.token_ids)
        if delta.counts is not None:
            known = self.counts.get(delta.branch)
            self.counts[delta.branch] = delta.counts if known is None else known + delta.counts


class Body(Protocol):
    """A response under way."""

    @property
    def paused(self) -> bool: ...

    def write(self, data: bytes) -> None: ...


class DirectOut:
    """The way of plain deltas from the engine's step to the socket: metered and counted like those that a reader gets,
    `write` makes bytes of them, `body` takes these once the response has begun, unless its reader lags."""

    def __init__(self) -> None:
        self.body: Body | None = None
        self.write: Callable[[Delta], bytes] | None = None
        self.meter: RequestMeter | None = None
        self.note: Callable[[Delta], None] | None = None

    def ready(self) -> bool:
        return self.body is not None and not self.body.paused

    def take(self, delta: Delta) -> None:
        assert self.body and self.write and self.meter and self.note
        self.meter.delta(delta, time.perf_counter())
        self.note(delta)
        if data := self.write(delta):
            self.body.write(data)


def width(request: Request) -> int:
    """Sequences that run side by side for a request."""
    return request.params.n if request.beam is None else request.beam.beams


def price(request: Request, info: EngineInfo) -> int:
    """Tokens that `request` may come to hold, in whole pages: its prompt once, and what each branch may draw."""
    prompt = len(request.prompt)
    params = request.params
    room = info.room(params) - prompt
    drawn = 0 if request.pooling else min(params.max_tokens or room, room) * width(request)
    if params.kv_budget is not None:
        drawn = min(drawn, params.kv_budget * params.n)
        prompt = min(prompt, params.kv_budget) if params.kv_eviction == "sinks" else prompt
    return math.ceil((prompt + drawn) / info.page_size) * info.page_size


def search(
    frontend: Frontend, prompt: str | list[int], beam: BeamParams, params: SamplingParams, **where: Any
) -> Request:
    """A request for the answers that beam search finds, shown as `params` say; `where` as for `Frontend.prepare`."""
    request = frontend.prepare_beam(prompt, beam, **where)
    shown = ("stop", "include_stop", "skip_special_tokens")
    request.params = replace(request.params, **{name: getattr(params, name) for name in shown})
    return request


def _forget_drawn(delta: Delta) -> None:
    delta.text, delta.token_ids, delta.logprobs, delta.stop_reason = "", [], None, None
    if delta.finish_reason is FinishReason.STOP:
        delta.finish_reason = FinishReason.LENGTH


def kept_tail(tokens: list[int], most: int | None, params: SamplingParams, info: EngineInfo) -> list[int]:
    """The end of a prompt that may have `most` tokens; -1: as many as fit beside the answer. None: all of it."""
    if most is None:
        return tokens
    if most < 0:
        most = max(1, info.room(params) - (params.max_tokens or 1))
    return tokens[max(0, len(tokens) - most) :]


def _raise_failure(delta: Delta) -> None:
    """An end that is no completion becomes an error."""
    if delta.finish_reason is FinishReason.ERROR:
        raise QuireError("the engine could not finish this request")
    if delta.finish_reason is FinishReason.ABORT:
        raise EngineDeadError("the request was aborted before it finished; try again")


def coalesced(deltas: list[Delta]) -> list[Delta]:
    """At most one delta per branch: several that waited together become one."""
    merged: dict[int, Delta] = {}
    for delta in deltas:
        first = merged.setdefault(delta.branch, delta)
        if first is not delta:
            first.extend(delta)
    return list(merged.values())


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
                yield coalesced(batch)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def collect(generation: Generation) -> list[RequestOutput]:
    """Wait for every choice of the call; of each prompt those that are wanted."""
    collectors = [Collector(request, None) for request in generation.requests]
    branches = generation.requests[0].params.n
    async with aclosing(generation.deltas()) as stream:
        async for deltas in stream:
            for delta in deltas:
                prompt, delta.branch = divmod(delta.branch, branches)
                collectors[prompt].add(delta)
    return [collector.result() for collector in collectors]
