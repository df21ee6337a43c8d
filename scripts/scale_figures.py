"""A fleet of simulated replicas on recorded traces: `python scripts/scale_figures.py TRACE... [--parts routers,roles]`.

A table for each part and trace: routers; policies of the engines; prefill and decode roles; autoscaling under a wave of
load. Rates are shares of what the cost model says the fleet can serve; figures are means over seeds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from quire.simulation.devices import load_device
from quire.simulation.figures import Targets, summarise
from quire.simulation.fleet import Fleet, simulate
from quire.simulation.planning import capacity_rps, shared_tokens
from quire.simulation.synthetic import resampled
from quire.simulation.traces import Arrival, read_trace
from quire.types.autoscaling import AutoscaleOptions
from quire.types.config import EngineOptions
from quire.types.errors import ConfigError

ROUTERS = ("cache-aware", "slo-aware", "prefix", "power-of-two", "least-load", "round-robin")
POLICIES = ("auto", "slo", "srpt", "fair", "fcfs")
PARTS = ("routers", "policies", "roles", "autoscaling")
MIN_REPLICAS = 8  # of which an eighth is one
HEADS = {"roles": " most that prefill | changes |", "autoscaling": " most replicas | replica-hours |"}
STARTUP_S = 10.0


class Variant(NamedTuple):
    name: str
    fleet: Callable[[int], Fleet]  # of a seed


class Load(NamedTuple):
    name: str
    trace: list[Arrival]
    targets: Targets
    seconds: float
    capacity: float  # requests a second of one replica

    def asked(self, fleet: Fleet, share: float, kind: str = "poisson") -> list[Arrival]:
        rate = share * self.capacity * fleet.most
        return resampled(self.trace, max(1, int(rate * self.seconds)), rate, fleet.seed, kind)


def options(targets: Targets, policy: str = "auto") -> EngineOptions:
    return EngineOptions.of(scheduler=policy, max_waiting=1 << 30, slo_ttft=targets.ttft, slo_tpot=targets.tpot)


def variants(part: str, load: Load, replicas: int) -> tuple[float, str, list[Variant]]:
    """The share of what the fleet can serve, how requests arrive, and what is compared."""
    device, own = load_device("h200"), options(load.targets)
    if part == "routers":
        return 0.7, "poisson", [Variant(r, lambda seed, r=r: Fleet(own, device, replicas, r, seed)) for r in ROUTERS]
    if part == "policies":
        made = {name: options(load.targets, name) for name in POLICIES}
        return 0.95, "gamma:0.25", [
            Variant(name, lambda seed, of=of: Fleet(of, device, replicas, "cache-aware", seed))
            for name, of in made.items()
        ]  # fmt: skip
    if part == "roles":
        counts = (0, replicas // 8, replicas // 4, replicas // 2)
        fixed = [
            Variant(f"{n} prefill replicas" if n else "all do both", lambda seed, n=n: Fleet(
                own, device, replicas, "cache-aware", seed, prefill_replicas=n, switch_roles=False
            )) for n in counts
        ]  # fmt: skip
        switching = Variant(f"{counts[1]} at first, `--switch-roles`", lambda seed: Fleet(
            own, device, replicas, "cache-aware", seed, prefill_replicas=counts[1]
        ))  # fmt: skip
        return 0.7, "poisson", [*fixed, switching]
    scaled = [
        Variant(f"{low} to {replicas}, {replicas // 2} at first", lambda seed, low=low: Fleet(
            own, device, replicas // 2, "cache-aware", seed, startup=STARTUP_S,
            autoscale=AutoscaleOptions(min_replicas=low, max_replicas=replicas, downscale_delay=20.0),
        )) for low in (replicas // 8, replicas // 2)
    ]  # fmt: skip
    always = Variant(f"{replicas} all the time", lambda seed: Fleet(own, device, replicas, "cache-aware", seed))
    return 0.45, f"diurnal:{load.seconds:g}", [always, *scaled]


def rows(part: str, load: Load, replicas: int, seeds: int) -> Iterator[str]:
    share, kind, compared = variants(part, load, replicas)
    rate = share * load.capacity * replicas
    yield f"\n**{load.name}, {part}**: {rate:,.0f} requests/s ({share:.0%}), {kind}, {load.seconds:g} s\n"
    yield f"| | met targets | TTFT mean, p99 | ITL p99 | last token p99 | hit rate, of the best |{HEADS.get(part, '')}"
    yield "| --- |" + " --- |" * (5 + HEADS.get(part, "").count("|"))
    for variant in compared:
        runs, best = [], []
        for seed in range(seeds):
            fleet = variant.fleet(seed)
            asked = load.asked(fleet, share, kind)
            runs.append(summarise(simulate(fleet, asked), len(asked), load.targets))
            machine = fleet.model.machine
            hits = shared_tokens(asked, machine.pages * machine.page_size * replicas)
            best.append(sum(hits) / sum(one.prompt for one in asked))
        yield line(part, variant.name, runs, mean(best))


def line(part: str, name: str, runs: list[dict[str, Any]], best: float) -> str:
    def of(key: str, inner: str | None = None) -> float:
        return mean(one[key][inner] if inner else one[key] for one in runs)

    hits = f"{of('hit_rate'):.1%}, {of('hit_rate') / best:.0%}" if best else ""
    ends = {
        "roles": f" {of('prefill_peak'):.0f} | {of('role_switches'):.0f} |",
        "autoscaling": f" {of('replicas_peak'):.0f} | {of('replica_s') / 3600:.2f} |",
    }
    return (
        f"| {name} | {of('slo_share'):.1%} | {of('ttft_s', 'mean'):.3f}, {of('ttft_s', 'p99'):.2f} s "
        f"| {of('itl_s', 'p99') * 1000:.0f} ms | {of('ttlt_s', 'p99'):.1f} s | {hits} |{ends.get(part, '')}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--parts", default=",".join(PARTS), help="some of them, with commas")
    parser.add_argument("--replicas", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--slo-ttft", type=float, default=2.0)
    parser.add_argument("--slo-tpot", type=float, default=0.05)
    asked = parser.parse_args()
    parts = asked.parts.replace(" ", "").split(",")
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"--parts are some of {', '.join(PARTS)}, not {unknown[0]!r}")
    if asked.replicas < MIN_REPLICAS or asked.seeds < 1 or not asked.seconds > 0:
        parser.error(f"it takes {MIN_REPLICAS} replicas, one seed and some seconds at least")
    try:
        traces = [read_trace(path) for path in asked.traces]
    except ConfigError as error:
        parser.error(str(error))
    for path, trace in zip(asked.traces, traces, strict=True):
        able = capacity_rps(load_device("h200"), trace)
        load = Load(path.stem, trace, Targets(asked.slo_ttft, asked.slo_tpot), asked.seconds, able)
        print(f"\n{path.stem}: one replica can serve {able:.2f} requests a second")
        for part in parts:
            for row in rows(part, load, asked.replicas, asked.seeds):
                print(row, flush=True)


if __name__ == "__main__":
    main()
