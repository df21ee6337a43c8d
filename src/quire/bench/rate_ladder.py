"""A ladder of rates: up until the service level is no longer met, then between the last two, to the highest that is.

Refuses to know: how a rate is measured.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from quire.bench.load.load_report import SLO, summarise
from quire.bench.load.runner import Phase

MAX_RUNGS = 24

Measure = Callable[[float, int], Awaitable[Phase]]  # (requests per second, seed)


@dataclass
class Rung:
    """One rate, with every seed."""

    rate: float
    runs: list[dict[str, Any]]
    share: float  # of requests that must meet the service level

    @property
    def met(self) -> bool:
        return mean(run["slo_share"] or 0.0 for run in self.runs) >= self.share

    def plain(self) -> dict[str, Any]:
        shares = [run["slo_share"] or 0.0 for run in self.runs]
        goodput = [run["goodput_req_s"] for run in self.runs]
        return {
            "name": f"{self.rate:g} req/s",
            "rate": self.rate,
            "met": self.met,
            "slo_share": mean(shares),
            "slo_share_least": min(shares),
            "goodput_req_s": mean(goodput),
            "runs": self.runs,
        }


async def climb(
    measure: Measure, slo: SLO, *, start: float, factor: float, seeds: Sequence[int], share: float, refine: int
) -> list[Rung]:
    """Every rate that was tried, in that order. If the first does not meet the service level, rates go down."""
    rungs: list[Rung] = []

    async def tried(rate: float) -> bool:
        runs = [summarise(await measure(rate, seed), slo) for seed in seeds]
        rungs.append(Rung(rate, runs, share))
        return rungs[-1].met

    low, high, rate = 0.0, 0.0, start
    while len(rungs) < MAX_RUNGS and not (low and high):
        if await tried(rate):
            low, rate = rate, rate * factor
        else:
            high, rate = rate, rate / factor
    for _ in range(refine if low and high else 0):
        middle = (low * high) ** 0.5
        if await tried(middle):
            low = middle
        else:
            high = middle
    return rungs


def highest(rungs: Sequence[Rung]) -> float | None:
    """The highest rate that meets the service level."""
    return max((rung.rate for rung in rungs if rung.met), default=None)
