"""profile: what a service is asked, which settings suit it, what it costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from quire.cli.options import JsonOption


def profile(
    log: Annotated[Path, typer.Argument(help="a trace, or the server's log as JSON lines")],
    *,
    device: Annotated[str, typer.Option(help="h200, or a file that `quire bench calibrate` wrote")] = "h200",
    usd_per_hour: Annotated[float, typer.Option(min=0, help="price of a replica")] = 0.0,
    watts: Annotated[float, typer.Option(min=0, help="power of a replica")] = 0.0,
    gco2e_per_kwh: Annotated[float, typer.Option(min=0, help="emissions of its electricity")] = 0.0,
    json_: JsonOption = None,
) -> None:
    """Look at recorded traffic: lengths, prefixes, bursts, settings that suit it, cost per million tokens."""
    from quire.bench.traffic_profile import Rates, rows
    from quire.bench.traffic_profile import profile as look
    from quire.cli.bench_simulation import show
    from quire.simulation.devices import load_device
    from quire.simulation.traces import read_trace

    found = look(read_trace(log), load_device(device), Rates(usd_per_hour, watts, gco2e_per_kwh))
    show([*rows(found)])
    if json_:
        json_.write_text(json.dumps(found, indent=1))


def register(app: typer.Typer) -> None:
    app.command()(profile)
