"""A trace replayed on an engine in this process, and the simulator's answer to the same trace beside it.

Requests are submitted at their moments, with prompts of their lengths (equal blocks are equal tokens) and answers of
theirs, whatever the model says. Refuses to know: where traces come from.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from quire.bench.offline import Trace
from quire.engine.gc_control import settle
from quire.engine.link import LocalLink
from quire.engine.request_progress import RequestProgress
from quire.simulation.figures import Targets, spread, summarise
from quire.simulation.fleet import Fleet, simulate
from quire.simulation.traces import Arrival
from quire.types.config import EngineOptions
from quire.types.cost_model import CostModel
from quire.types.errors import ConfigError
from quire.types.messages import Events, Reset, Submit
from quire.types.request import Request
from quire.types.sampling_params import SamplingParams

MAX_IDLE_S = 0.5  # between looks at the clock while nothing is under way
FIGURES = ("ttft_s", "tpot_s", "itl_s", "ttlt_s")


class Figure(NamedTuple):
    """One of the engine and of the simulator."""

    name: str
    measured: float
    simulated: float

    @property
    def off(self) -> float:
        """By which share the simulator's is off."""
        return self.simulated / self.measured - 1 if self.measured else 0.0


def replay(link: LocalLink, asked: Sequence[Arrival]) -> dict[str, Any]:
    """Figures of the engine, by the names that the simulator's have."""
    too_long = [one for one in asked if one.prompt + one.outputs > link.core.capacity.longest]
    if too_long:
        most = link.core.capacity.longest
        raise ConfigError(f"{len(too_long)} of the requests have more than {most} tokens: leave them out (longest)")
    link.send(Reset())
    due = deque(_requests(link, asked))
    traces = [Trace(prompt=one.prompt, tokens=[], times=[], arrival=one.at) for one in asked]
    settle()
    left, began, wall = len(due), time.perf_counter(), time.time()
    with RequestProgress(left) as progress:
        while left:
            now = time.perf_counter() - began
            while due and due[0].arrival <= now:
                request = due.popleft()
                request.arrival += wall
                link.send(Submit(request))
            wait = min(MAX_IDLE_S, max(0.0, due[0].arrival - now)) if due else MAX_IDLE_S
            for message in link.receive(wait):
                if isinstance(message, Events):
                    now = time.perf_counter() - began
                    for event in message.events:
                        trace = traces[int(event.request)]
                        trace.times += [now] * len(event.tokens)
                        if event.finish is not None:
                            trace.end = now
                            left -= 1
                            progress.ended()
    return summary(traces)


def _requests(link: LocalLink, asked: Sequence[Arrival]) -> list[Request]:
    return [
        Request(
            id=str(number),
            prompt=_tokens(one, number, link.info.vocab_size),
            params=SamplingParams(temperature=0.0, seed=number, max_tokens=one.outputs, ignore_eos=True),
            arrival=one.at,
            tenant=one.tenant,
            slo_ttft=one.ttft,
            slo_tpot=one.tpot,
            background=one.background,
        )
        for number, one in enumerate(asked)
    ]


def _tokens(one: Arrival, number: int, vocab: int) -> list[int]:
    """Equal blocks have equal tokens, and else nothing repeats."""
    tokens: list[int] = []
    for block in one.blocks:
        tokens += np.random.default_rng((0, block)).integers(vocab, size=one.block).tolist()
    own = np.random.default_rng((1, number)).integers(vocab, size=max(0, one.prompt - len(tokens))).tolist()
    return [*tokens[: one.prompt], *own]


def summary(traces: Sequence[Trace]) -> dict[str, Any]:
    done = [trace for trace in traces if trace.times]
    seconds = max((trace.end for trace in done), default=0.0)

    def of(values: list[float]) -> dict[str, float | None]:
        return spread(np.array(values, dtype=np.float64))

    return {
        "requests": len(traces),
        "finished": len(done),
        "seconds": seconds,
        "throughput_tok_s": sum(len(trace.times) for trace in done) / seconds if seconds else 0.0,
        "ttft_s": of([trace.ttft for trace in done]),
        "tpot_s": of([trace.tpot for trace in done if trace.tpot is not None]),
        "itl_s": of([gap for trace in done for gap in trace.gaps]),
        "ttlt_s": of([trace.end - trace.arrival for trace in done]),
    }


def simulated(options: EngineOptions, model: CostModel, asked: Sequence[Arrival]) -> dict[str, Any]:
    """The simulator's, of one replica of the same options."""
    return summarise(simulate(Fleet(options, model), list(asked), workers=1), len(asked), Targets())


def beside(measured: dict[str, Any], other: dict[str, Any]) -> list[Figure]:
    found = [Figure("throughput_tok_s", measured["throughput_tok_s"], other["throughput_tok_s"])]
    for name in FIGURES:
        found += [
            Figure(f"{name} {part}", measured[name][part], other[name][part])
            for part in ("mean", "p50", "p90", "p99")
            if measured[name][part] is not None and other[name][part] is not None
        ]
    return found
