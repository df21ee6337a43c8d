"""A program against the calls it is made of: a tree of thoughts, and the same calls one by one and many at a time.

The program's calls are recorded (prompt, parameters, which of them belong to one stage) and replayed over HTTP against
the same server, each as a request of its own. Thoughts have a fixed length, so all runs draw equally many tokens. The
prefix cache is on everywhere, and empty at the beginning of each run.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from quire.engine.client import AsyncClient
from quire.engine.frontend import Frontend
from quire.lang import Model, gen, self_consistency, tree_of_thoughts
from quire.lang.backend import Answer, Backend, spell_apart
from quire.lang.reasoning import Tree
from quire.lang.state import State
from quire.types.config import EngineOptions
from quire.types.outputs import Delta
from quire.types.sampling_params import SamplingParams

CONCURRENT = 16
FACTS = (
    "A small town by a river has {} wells, {} farms and {} workshops. In spring the river floods the lower fields; in "
    "summer the wells run low. Every farm needs water for its animals, every workshop for its wheels, and the council "
    "may build one thing a year: a dam, a canal, a cistern or a new well. "
)


@dataclass
class Shape:
    """The tree that is grown, and the question's length."""

    branches: int = 16
    depth: int = 2
    keep: int = 4
    thought: int = 32  # tokens
    facts: int = 6  # paragraphs before the question, of some 70 tokens each


@dataclass
class Call:
    state: State
    params: SamplingParams


class Recorder:
    """A backend that notes what is asked of another."""

    def __init__(self, backend: Backend):
        self._backend = backend
        self.calls: list[Call] = []

    async def settle(self, state: State) -> State:
        return await self._backend.settle(state)

    async def generate(self, state: State, params: SamplingParams) -> list[Answer]:
        seeds = range(params.n) if params.n > 1 else [params.seed]
        self.calls += [Call(state, replace(params, n=1, seed=seed)) for seed in seeds]
        return await self._backend.generate(state, params)

    async def spell(self, state: State, options: Sequence[str]) -> list[Answer]:
        return await spell_apart(self, state, options)

    def stream(self, state: State, params: SamplingParams) -> AsyncGenerator[list[Delta], None]:
        return self._backend.stream(state, params)


def program(model: Model, shape: Shape, seed: int) -> Tree:
    facts = "".join(FACTS.format(seed + i, 2 * i + 3, i + 1) for i in range(shape.facts))
    step = gen("thought", max_tokens=shape.thought, ignore_eos=True, temperature=0.9, seed=seed)
    answer = gen("answer", max_tokens=shape.thought, ignore_eos=True, temperature=0.0)
    return tree_of_thoughts(
        model,
        f"{facts}What should the council build first, and why?",
        branches=shape.branches,
        depth=shape.depth,
        keep=shape.keep,
        step=step,
        answer=answer,
    )


def stages(calls: list[Call]) -> list[list[Call]]:
    """Calls as a caller without a program could issue them: all thoughts of a level, then all its verdicts."""
    found: list[list[Call]] = []
    for call in calls:
        kind = call.params.grammar is None
        if not found or (found[-1][0].params.grammar is None) != kind:
            found.append([])
        found[-1].append(call)
    return found


async def replay(backend: Backend, calls: list[list[Call]], at_once: int) -> None:
    gate = asyncio.Semaphore(at_once)

    async def issue(call: Call) -> None:
        async with gate:
            await backend.generate(call.state, call.params)

    for stage in calls:
        await asyncio.gather(*map(issue, stage))


def measure(options: EngineOptions, shape: Shape, rounds: int = 3) -> dict[str, Any]:
    """Seconds of each way, medians over rounds that take turns. Each round has a question of its own."""
    from quire.assets import resolve
    from quire.serve import background_server
    from quire.text import TextModel

    local = resolve(options.model.model)
    flat = {name: value for name, value in options.flat().items() if name != "model"}
    clients: list[AsyncClient] = []

    async def frontend() -> Frontend:
        clients.append(await AsyncClient.open(options, process=True))
        return Frontend(clients[0], TextModel.load(local), local.name)

    seconds: dict[str, list[float]] = {}

    def timed(way: str, run: Callable[..., Any], *arguments: Any) -> None:
        clients[0].reset()
        began = time.perf_counter()
        run(*arguments)
        seconds.setdefault(way, []).append(time.perf_counter() - began)

    def issue(calls: list[list[Call]], at_once: int) -> None:
        remote.wait(remote.start(replay(plain, calls, at_once)))

    with background_server(frontend) as url, Model(str(url)) as remote, Model(options.model.model, **flat) as near:
        plain = remote.backend
        for model in (remote, near):
            program(model, Shape(branches=2, depth=1, keep=1, thought=4, facts=1), seed=0)  # first-use costs
        for seed in range(1, rounds + 1):
            remote.backend = recorder = Recorder(plain)
            timed("program over HTTP", program, remote, shape, seed)
            remote.backend = plain
            calls = stages(recorder.calls)
            for way, at_once in (("16 calls at a time over HTTP", CONCURRENT), ("one by one over HTTP", 1)):
                timed(way, issue, calls, at_once)
            timed("program in process", program, near, shape, seed)
        votes = savings(near)
    medians = {way: statistics.median(times) for way, times in seconds.items()}
    return {"calls": sum(map(len, calls)), "stages": len(calls), "seconds": medians, "rounds": seconds, **votes}


def savings(model: Model, questions: int = 4) -> dict[str, int]:
    """What a vote costs that ends once it is decided, what it says that saved, and what it costs to hear everyone."""
    found = {"vote_tokens": 0, "vote_tokens_saved": 0, "vote_tokens_whole": 0}
    for i in range(questions):
        ask: dict[str, Any] = {"question": f"What is {i + 2} + {i + 3}?", "n": 16, "temperature": 0.5, "seed": i}
        early = self_consistency(model, **ask)
        found["vote_tokens"] += early.tokens
        found["vote_tokens_saved"] += early.tokens_saved
        found["vote_tokens_whole"] += self_consistency(model, extract=lambda text: None, **ask).tokens
    return found


def rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    took = summary["seconds"]
    base = took["program over HTTP"]
    return [
        ("calls", f"{summary['calls']} in {summary['stages']} stages"),
        ("self-consistency", f"{summary['vote_tokens']} tokens, {summary['vote_tokens_saved']} saved by its estimate"),
        ("heard to the end", f"{summary['vote_tokens_whole']} tokens for the same seeds"),
        *((way, f"{time:.2f} s  ({time / base:.2f} x the program over HTTP)") for way, time in took.items()),
    ]
