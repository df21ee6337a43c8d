"""What routers come to on simulated replicas: `python scripts/routing_figures.py [--trace FILE] [--replicas 8]`.

Three loads: 64 groups of 16 prompts that share a system prompt; one hot prefix that all prompts share; and a recorded
trace, if one is named, replayed as fast as `--scale` says. The best possible hit rate is that of one cache, least
recently used pages leaving first, as large as all replicas' together.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

from quire.cluster.router_policy import RouterPolicy
from quire.cluster.routers import ROUTERS, make_router
from quire.simulation import fleet as simulated
from quire.simulation.devices import load_device
from quire.simulation.figures import Targets, summarise
from quire.simulation.fleet import Fleet, simulate
from quire.simulation.planning import shared_tokens
from quire.simulation.traces import Arrival, read_trace
from quire.types.config import EngineOptions, SchedulerOptions

BLOCK = 64


def groups(rate: float, seed: int = 0, count: int = 64, each: int = 16) -> list[Arrival]:
    """Prompts of 2048 shared tokens and 256 of their own, in random order."""
    rng, ids = Random(seed), iter(range(1 << 30))
    shared = [tuple(next(ids) for _ in range(2048 // BLOCK)) for _ in range(count)]
    order = [group for group in range(count) for _ in range(each)]
    rng.shuffle(order)
    return _arriving([(*shared[group], *(next(ids) for _ in range(256 // BLOCK))) for group in order], rate, rng)


def hot(rate: float, seed: int = 0, count: int = 2048) -> list[Arrival]:
    """Prompts that all begin with the same 4096 tokens."""
    rng, ids = Random(seed), iter(range(1 << 30))
    shared = tuple(next(ids) for _ in range(4096 // BLOCK))
    return _arriving([(*shared, *(next(ids) for _ in range(256 // BLOCK))) for _ in range(count)], rate, rng)


def _arriving(prompts: list[tuple[int, ...]], rate: float, rng: Random) -> list[Arrival]:
    at, found = 0.0, []
    for blocks in prompts:
        at += rng.expovariate(rate)
        found.append(Arrival(at, len(blocks) * BLOCK, rng.randrange(64, 257), blocks, BLOCK))
    return found


def best_hit_rate(trace: list[Arrival], tokens: int) -> float:
    """Of one cache of so many tokens; the last token of a prompt is always computed."""
    hits = zip(trace, shared_tokens(trace, tokens), strict=True)
    cached = sum(min(hit, (one.prompt - 1) // BLOCK * BLOCK) for one, hit in hits)
    return cached / sum(one.prompt for one in trace)


def figures(name: str, trace: list[Arrival], replicas: int) -> dict[str, Any]:
    sent: Counter[int] = Counter()

    def counted(*arguments: Any) -> RouterPolicy:
        router = make_router(*arguments)
        choose = router.choose

        def note(*request: Any) -> int:
            chosen = choose(*request)
            sent[chosen] += 1
            return chosen

        router.choose = note  # type: ignore[method-assign]
        return router

    simulated.make_router = counted  # type: ignore[assignment]
    options = EngineOptions(scheduler=SchedulerOptions(max_waiting=1 << 30))
    found = summarise(simulate(Fleet(options, load_device("h200"), replicas, name), trace), len(trace), Targets())
    return {**found, "balance": max(sent.values()) * replicas / len(trace)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--num", type=int, default=None)
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--rate", type=float, default=40.0, help="requests a second of the made-up loads")
    asked = parser.parse_args()
    loads = {"64 groups x 16": groups(asked.rate), "hot prefix": hot(asked.rate)}
    if asked.trace is not None:
        recorded = read_trace(asked.trace, limit=asked.num)
        loads[asked.trace.stem] = [one._replace(at=one.at / asked.scale) for one in recorded]
    machine = load_device("h200").machine
    for title, trace in loads.items():
        best = best_hit_rate(trace, asked.replicas * machine.pages * machine.page_size)
        print(f"\n{title}: {len(trace)} requests, {asked.replicas} replicas; best possible hit rate {best:.3f}")
        print("| router | hit rate, of the best | TTFT mean, p99 (s) | output tokens/s | max/mean requests |")
        print("| --- | --- | --- | --- | --- |")
        for name in ROUTERS:
            one = figures(name, trace, asked.replicas)
            ttft, rate = one["ttft_s"], one["hit_rate"]
            print(
                f"| {name} | {rate:.3f}, {rate / best:.1%} | {ttft['mean']:.3f}, {ttft['p99']:.3f} "
                f"| {one['throughput_tok_s']:,.0f} | {one['balance']:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
