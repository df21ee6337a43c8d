"""Offline runs: a token-level workload submitted to an engine at once, every token's arrival noted."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import msgspec

from quire.engine.link import Link, LocalLink
from quire.engine.request_progress import RequestProgress
from quire.types.errors import from_wire
from quire.types.events import EngineStats
from quire.types.messages import Events, GetStats, Query, Reply, Reset, Stats, Submit
from quire.types.request import FinishReason, Request, longest_first
from quire.types.sampling_params import SamplingParams


class Trace(msgspec.Struct):
    """One request's life, seconds after the run began."""

    prompt: int
    tokens: list[int] = []
    times: list[float] = []  # arrival of each output token
    end: float = 0.0
    arrival: float = 0.0

    @property
    def ttft(self) -> float:
        return self.times[0] - self.arrival

    @property
    def tpot(self) -> float | None:
        """(end-to-end - time to first token) / (output tokens - 1)."""
        return (self.end - self.times[0]) / (len(self.times) - 1) if len(self.times) > 1 else None

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]


class Run(msgspec.Struct):
    seconds: float
    traces: list[Trace]
    stats: EngineStats
    peak_memory: int  # bytes resident at most, in this process
    host_share: float | None = None  # of the time, spent outside the model's own calls; where that can be told


def run_workload(
    link: Link,
    work: Sequence[tuple[list[int], int]],
    *,
    sampling: dict[str, Any] | None = None,
    lora: Sequence[str] = (),
    last_after: int = 0,
    concurrency: int = 0,
) -> Run:
    """Submit all requests, in the order in which `LLM.generate` does, and wait for all; output lengths are as the
    workload says (EOS ignored). `sampling`: parameters of all; without any, greedy; a grammar has to allow such
    lengths. `lora`: the adapter of each. `last_after`: the last one arrives when the others have so many tokens each.
    `concurrency`: so many at a time, in the order of the workload, the next when one ends."""
    link.send(Reset())
    traces = [Trace(prompt=len(prompt), tokens=[], times=[]) for prompt, _ in work]
    drawn = sampling or {"temperature": 0.0}
    began = time.perf_counter()
    requests = []
    for i, (prompt, length) in enumerate(work):
        params = SamplingParams(**drawn, seed=i, max_tokens=length, ignore_eos="grammar" not in drawn)
        adapter = lora[i] if lora else ""
        requests.append(Request(id=str(i), prompt=list(prompt), params=params, arrival=time.time(), lora=adapter))
    late = requests.pop() if last_after else None
    first, later = (requests[:concurrency], requests[concurrency:]) if concurrency else (longest_first(requests), [])
    with model_clock(link) as model:
        link.send(*map(Submit, first))
        _follow(link, traces, began, late, last_after, iter(later))
        seconds = time.perf_counter() - began
    host = None if model is None else 1 - model[0] / seconds
    return Run(seconds=seconds, traces=traces, stats=stats_of(link), peak_memory=_peak_memory(), host_share=host)


def _follow(
    link: Link, traces: list[Trace], began: float, late: Request | None, after: int, later: Iterator[Request]
) -> None:
    """Note every token until all requests have ended. `late` arrives when all others have `after` tokens, one of those
    that come `later` whenever one ends."""
    left = len(traces)
    with RequestProgress(left) as progress:
        while left:
            for message in link.receive(None):
                if not isinstance(message, Events):
                    continue
                now = time.perf_counter() - began
                for event in message.events:
                    if event.finish is FinishReason.ERROR:
                        raise from_wire(event.error, event.message)
                    trace = traces[int(event.request)]
                    trace.tokens += event.tokens
                    trace.times += [now] * len(event.tokens)
                    progress.tokens(len(event.tokens))
                    if event.finish is not None:
                        trace.end = now
                        left -= 1
                        progress.ended()
                        for request in islice(later, 1):
                            traces[int(request.id)].arrival = now
                            link.send(Submit(request))
            if late is not None and all(len(trace.times) >= after for trace in traces[:-1]):
                traces[-1].arrival = time.perf_counter() - began
                link.send(Submit(late))
                late = None


@contextmanager
def model_clock(link: Link) -> Iterator[list[float] | None]:
    """Seconds spent in the model's forward and logits, in a list of one; None where calls return before they are
    done (a GPU) or run elsewhere (another process or thread)."""
    if not isinstance(link, LocalLink) or link.info.device != "cpu" or link.info.depth > 1:
        yield None
        return
    executor: Any = link.core.executor
    model, spent = executor.model, [0.0]

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            result = call(*arguments, **named)
            spent[0] += time.perf_counter() - began
            return result

        return wrapped

    model.forward, model.logits = timed(model.forward), timed(model.logits)
    try:
        yield spent
    finally:
        del model.forward, model.logits  # the class's own again


def stats_of(link: Link) -> EngineStats:
    query = Query(GetStats())
    link.send(query)
    while True:
        for message in link.receive(None):
            if isinstance(message, Reply) and message.id == query.id:
                assert isinstance(message.answer, Stats)
                return message.answer.stats


def _peak_memory() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes there, KiB elsewhere
