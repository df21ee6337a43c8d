"""Every policy on four workloads, at 70, 90 and 110% of what a device can serve, over ten seeds: the tables of
docs/scheduling.md, and whether `auto` keeps what is said of it there.

python scripts/policy_table.py --code azure_code_2023.csv --multi-turn mooncake_synthetic.jsonl --json table.json

The traces are those of the Azure public dataset and of Mooncake; without a path its workload is left out.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from quire.simulation.comparison import Cell, Contender, Workload, compare, made_up, markdown, recorded
from quire.simulation.devices import load_device
from quire.simulation.figures import Targets
from quire.simulation.traces import read_trace

LOADS = (0.7, 0.9, 1.1)
POLICIES = ("fcfs", "sjf", "sjf:oracle", "srpt", "srpt:oracle", "mlfq", "lpm", "slo", "fair", "auto", "auto:oracle")
WITHIN = 0.03  # of the best goodput in its cell
FASTER = 1.4  # times the goodput of fcfs, on `mix` at 110%


def workloads(arguments: argparse.Namespace) -> Iterator[Workload]:
    yield made_up("mix", Targets(0.5, 0.05), "gamma:0.3", 1200)
    if arguments.code is not None:
        yield recorded("code", read_trace(arguments.code), Targets(1.0, 0.1), "gamma:0.5", 1000)
    if arguments.multi_turn is not None:
        yield recorded("multi-turn", read_trace(arguments.multi_turn), Targets(5.0, 0.2), "poisson", 300)
    yield made_up("chat", Targets(0.5, 0.05), "poisson", 500)


def claims(cells: Sequence[Cell]) -> Iterator[str]:
    """What `auto` is held to, cell by cell."""
    for workload, load in dict.fromkeys((cell.workload, cell.load) for cell in cells):
        found = {c.contender: c.figures for c in cells if (c.workload, c.load) == (workload, load)}
        if not {"fcfs", "srpt (oracle)", "auto"} <= found.keys():
            continue
        auto, best = found["auto"], max(found, key=lambda name: found[name]["goodput_rps"])
        share = auto["goodput_rps"] / found[best]["goodput_rps"]
        line = f"{workload} at {load:.0%}: auto has {share:.1%} of the best goodput ({best})"
        line += f", {auto['goodput_rps'] / found['fcfs']['goodput_rps']:.2f} x fcfs"
        line += f"; last token p99 {auto['ttlt_p99']:.2f} s, srpt (oracle) {found['srpt (oracle)']['ttlt_p99']:.2f} s"
        missed = [
            *(["goodput"] if share < 1 - WITHIN else []),
            *(["last token"] if auto["ttlt_p99"] > found["srpt (oracle)"]["ttlt_p99"] else []),
        ]
        if (workload, load) == ("mix", 1.1) and auto["goodput_rps"] < FASTER * found["fcfs"]["goodput_rps"]:
            missed.append("fcfs")
        yield line + (f"  MISSED: {', '.join(missed)}" if missed else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--code", type=Path, help="the Azure code trace of 2023")
    parser.add_argument("--multi-turn", type=Path, help="Mooncake's synthetic trace")
    parser.add_argument("--device", default="h200")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--workers", type=int, help="processes (default: one a core)")
    parser.add_argument("--only", help="one workload by name")
    parser.add_argument("--policies", default=",".join(POLICIES), help="sjf:oracle is told lengths")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    named = [name.partition(":") for name in arguments.policies.split(",")]
    contenders = [Contender(policy, oracle == "oracle") for policy, _, oracle in named]
    model, cells = load_device(arguments.device), []
    for workload in workloads(arguments):
        if arguments.only in (None, workload.name):
            seeds = list(range(arguments.seeds))
            found = compare(model, [workload], LOADS, contenders, seeds, workers=arguments.workers)
            cells += found
            print(markdown(found), flush=True)
            if arguments.json is not None:
                arguments.json.write_text(json.dumps([cell._asdict() for cell in cells], indent=1))
    print(*claims(cells), sep="\n")


if __name__ == "__main__":
    main()
