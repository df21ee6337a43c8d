"""Policies beside each other: workloads, at shares of what a replica can serve, over seeds; a table of what each does.

A workload's capacity is what one replica finishes per second while it has more to do than it can, first come, first
served. A run has `SATURATING` times as many requests as run at once, so that it is long enough for queues to form.
Refuses to know: what a policy does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from statistics import mean
from typing import Any, NamedTuple

from msgspec.structs import replace

from quire.simulation.figures import Targets, summarise
from quire.simulation.fleet import Fleet, simulate
from quire.simulation.synthetic import resampled, synthetic
from quire.simulation.traces import Arrival
from quire.types.config import EngineOptions
from quire.types.cost_model import CostModel
from quire.types.memory_use import usable_cores

UNBOUNDED = 1_000_000_000
PLAIN = EngineOptions.of(max_waiting=UNBOUNDED)
SATURATING = 8  # a run has so many times as many requests as run at once, or more


class Workload(NamedTuple):
    """Traffic that can be had at any rate, and what counts as good."""

    name: str
    make: Callable[[int, float, int], list[Arrival]]  # (requests, rate, seed)
    targets: Targets
    requests: int = 1000


class Contender(NamedTuple):
    """A policy, and whether it is told lengths."""

    policy: str
    oracle: bool = False

    def __str__(self) -> str:
        return f"{self.policy} (oracle)" if self.oracle else self.policy


class Cell(NamedTuple):
    workload: str
    load: float
    contender: str
    figures: dict[str, float]  # means over seeds


def made_up(name: str, targets: Targets, kind: str = "poisson", requests: int = 1000) -> Workload:
    return Workload(name, lambda n, rate, seed: synthetic(name, n, rate, seed, kind), targets, requests)


def recorded(name: str, trace: Sequence[Arrival], targets: Targets, kind: str, requests: int = 1000) -> Workload:
    return Workload(name, lambda n, rate, seed: resampled(trace, n, rate, seed, kind), targets, requests)


def capacity(model: CostModel, workload: Workload, seed: int, options: EngineOptions = PLAIN) -> float:
    """Requests per second that one replica finishes in the middle half of a run in which it has enough to do."""
    asked = [one._replace(at=0.0) for one in workload.make(workload.requests, 1.0, seed)]
    plain = options.but(scheduler="fcfs", max_waiting=UNBOUNDED, slo_ttft=None, slo_tpot=None, slo_give_up=False)
    result = simulate(Fleet(plain, saturated(model, workload)), asked, workers=1)
    ends = sorted(result.rows["ttlt"])
    first, last = len(ends) // 4, 3 * len(ends) // 4
    return (last - first) / (ends[last] - ends[first])


def run(
    model: CostModel,
    workload: Workload,
    load: float,
    contender: Contender,
    seed: int,
    rate: float,
    options: EngineOptions = PLAIN,
) -> dict[str, float]:
    """One simulation of the comparison."""
    targets = workload.targets
    own = options.but(scheduler=contender.policy, slo_ttft=targets.ttft, slo_tpot=targets.tpot)
    asked = workload.make(workload.requests, load * rate, seed)
    fleet = Fleet(own, saturated(model, workload), oracle=contender.oracle)
    found = summarise(simulate(fleet, asked, workers=1), len(asked), targets)
    return {
        "goodput_rps": found["goodput_rps"],
        "slo_share": found["slo_share"],
        "ttft_p50": found["ttft_s"]["p50"],
        "ttft_p99": found["ttft_s"]["p99"],
        "ttlt_p99": found["ttlt_s"]["p99"],
        "max_wait_s": found["max_wait_s"],
        "preemptions": found["preemptions"],
    }


def compare(
    model: CostModel,
    workloads: Sequence[Workload],
    loads: Sequence[float],
    contenders: Sequence[Contender],
    seeds: Sequence[int],
    *,
    options: EngineOptions = PLAIN,
    workers: int | None = None,
    told: Callable[[], None] | None = None,
) -> list[Cell]:
    """Every contender in every cell; figures are means over the seeds. `options`: of all of them, as far as they have
    an effect. `told` hears when a run is over."""
    names = {workload.name: workload for workload in workloads}
    context = get_context("fork")  # workloads are closures over traces: children have them from their parent
    _SHARED["model"], _SHARED["workloads"], _SHARED["options"] = model, names, options
    with ProcessPoolExecutor(workers or usable_cores(), mp_context=context) as pool:
        rates = dict(
            zip(
                ((name, seed) for name in names for seed in seeds),
                pool.map(_capacity, *_columns((name, seed) for name in names for seed in seeds)),
                strict=True,
            )
        )
        jobs = [
            (name, load, contender, seed, rates[name, seed])
            for name in names
            for load in loads
            for contender in contenders
            for seed in seeds
        ]
        found = []
        for one in pool.map(_run, *_columns(jobs)):
            found.append(one)
            if told:
                told()
    cells = []
    for first in range(0, len(jobs), len(seeds)):
        name, load, contender, *_ = jobs[first]
        runs = found[first : first + len(seeds)]
        cells.append(Cell(name, load, str(contender), {key: mean(one[key] for one in runs) for key in runs[0]}))
    return cells


_SHARED: dict[str, Any] = {}  # what forked workers share


def _columns(jobs: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return list(zip(*jobs, strict=True))


def _capacity(name: str, seed: int) -> float:
    return capacity(_SHARED["model"], _SHARED["workloads"][name], seed, _SHARED["options"])


def _run(name: str, load: float, contender: Contender, seed: int, rate: float) -> dict[str, float]:
    return run(_SHARED["model"], _SHARED["workloads"][name], load, contender, seed, rate, _SHARED["options"])


def markdown(cells: Sequence[Cell]) -> str:
    """A table for each workload: a row for each policy, at each load its goodput, the tails, and the longest wait."""
    lines: list[str] = []
    loads = sorted({cell.load for cell in cells})
    for name in dict.fromkeys(cell.workload for cell in cells):
        head = " | ".join(f"{load:.0%}: goodput, TTFT p50 / p99, last token p99, longest wait" for load in loads)
        lines += [f"**{name}**", "", f"| policy | {head} |", "| --- |" + " --- |" * len(loads)]
        for contender in dict.fromkeys(cell.contender for cell in cells):
            own = {c.load: c.figures for c in cells if c.workload == name and c.contender == contender}
            shown = " | ".join(
                f"{f['goodput_rps']:.2f}, {f['ttft_p50']:.2f} / {f['ttft_p99']:.1f}, {f['ttlt_p99']:.1f}, "
                f"{f['max_wait_s']:.0f} s"
                for f in (own[load] for load in loads)
            )
            lines.append(f"| {contender} | {shown} |")
        lines.append("")
    return "\n".join(lines)


def sized(model: CostModel, **machine: Any) -> CostModel:
    """The device with other limits."""
    return replace(model, machine=replace(model.machine, **machine))


def saturated(model: CostModel, workload: Workload) -> CostModel:
    """The device, with no more slots than a run of the workload keeps full."""
    return sized(model, slots=max(1, min(model.machine.slots, workload.requests // SATURATING)))
