"""Suites: a fixed list of workloads on a fixed model shape, each set against what peers and the hardware reach.

The anchors are data (`data/h200.json`). Prefix caches are emptied before each workload; the warm-up runs the same
shape on other tokens; afterwards drawn tokens are checked against a plain forward pass over the same weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from quire.bench.offline import Run, run_workload
from quire.bench.workloads import H200
from quire.engine.link import Link

DATA = Path(__file__).parent / "data"

WARM_UP = 1000  # added to a workload's seed: same shape, other tokens


class Result(msgspec.Struct):
    name: str
    seconds: float
    anchors: dict[str, float]
    run: Run


def anchors(suite: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DATA / f"{suite}.json").read_text())
    return found


def run_suite(link: Link, suite: str, *, only: list[str] | None = None, repeats: int = 1) -> Iterator[Result]:
    """Each workload's best of `repeats`, after a warm-up on other tokens."""
    table = anchors(suite)["workloads"]
    for name, make in H200.items():
        if only and name not in only:
            continue
        run_workload(link, make(seed=make.keywords["seed"] + WARM_UP))
        runs = [run_workload(link, make()) for _ in range(repeats)]
        best = min(runs, key=lambda run: run.seconds)
        yield Result(name, best.seconds, table[name], best)
