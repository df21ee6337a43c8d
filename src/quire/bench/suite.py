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
    anchors: dict[str, float]  # seconds: vllm, sglang, floor, goal
    run: Run
    flops: float  # of the model's products and attention, per second
    bytes: float  # of weights and KV that must be read, per second


def anchors(suite: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DATA / f"{suite}.json").read_text())
    return found


def run_suite(
    link: Link, suite: str, work: Work, *, only: list[str] | None = None, repeats: int = 1
) -> Iterator[Result]:
    """Each workload's best of `repeats`, after a warm-up on other tokens."""
    table = anchors(suite)["workloads"]
    for name, make in H200.items():
        if only and name not in only:
            continue
        run_workload(link, make(seed=make.keywords["seed"] + WARM_UP))
        runs = [run_workload(link, make()) for _ in range(repeats)]
        best = min(runs, key=lambda run: run.seconds)
        flops, moved = work.of(best)
        yield Result(name, best.seconds, table[name], best, flops / best.seconds, moved / best.seconds)


class Work(msgspec.Struct, frozen=True):
    """What a model must do at the least, from its shape."""

    matrix_parameters: int  # all weights but the embedding table
    weight_bytes: int  # of them
    kv_bytes: int  # per token
    attention_flops: int  # per query and key, over all layers

    def of(self, run: Run) -> tuple[float, float]:
        """(operations, bytes read) of a run. Weights are read once a step; a request's KV once for each of its steps
        that draws a token, shared or not."""
        tokens = keys = reads = 0
        for trace in run.traces:
            new, outputs = trace.prompt, len(trace.tokens)
            tokens += new + outputs - 1
            length = new + outputs - 1
            keys += length * (length + 1) // 2
            reads += sum(range(new, new + outputs))
        tokens -= run.stats.cached_tokens
        flops = 2.0 * self.matrix_parameters * tokens + self.attention_flops * keys
        return flops, run.stats.steps * self.weight_bytes + reads * self.kv_bytes
