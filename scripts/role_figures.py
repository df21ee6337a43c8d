"""Roles of a simulated fleet under a load whose shape changes, long prompts and then answers: `python
scripts/role_figures.py`. Prefill replicas that stay, and such as follow the load (`--switch-roles`)."""

from __future__ import annotations

import argparse
from random import Random

from quire.simulation.devices import load_device
from quire.simulation.figures import Targets, summarise
from quire.simulation.fleet import Fleet, simulate
from quire.simulation.traces import Arrival
from quire.types.config import EngineOptions, SchedulerOptions


def phase(start: float, seconds: float, rate: float, prompt: int, outputs: int, seed: int) -> list[Arrival]:
    rng, at, found = Random(seed), start, []
    while (at := at + rng.expovariate(rate)) < start + seconds:
        found.append(Arrival(at, prompt, outputs))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=6)
    parser.add_argument("--device", default="h200")
    parser.add_argument("--router", default="least-load")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    trace = phase(0.0, 60.0, 24.0, 8000, 8, asked.seed) + phase(80.0, 40.0, 40.0, 128, 200, asked.seed + 1)
    options = EngineOptions(scheduler=SchedulerOptions(max_waiting=1 << 30))
    for prefill, switch in ((1, False), (asked.replicas // 2, False), (1, True)):
        fleet = Fleet(
            options, load_device(asked.device), asked.replicas, asked.router, asked.seed,
            prefill_replicas=prefill, switch_roles=switch,
        )  # fmt: skip
        found = summarise(simulate(fleet, trace, workers=1), len(trace), Targets(ttft=2.0, tpot=0.03))
        ttft = found["ttft_s"]
        who = f"{prefill} prefill replica(s){', switching' if switch else ''}"
        print(
            f"{who}: met targets {found['slo_share']:.0%}; TTFT mean {ttft['mean']:.1f}, p99 {ttft['p99']:.1f} s; "
            f"ITL p99 {found['itl_s']['p99']:.3f} s; at most {found['prefill_peak']}, {found['role_switches']} changes",
            flush=True,
        )


if __name__ == "__main__":
    main()
