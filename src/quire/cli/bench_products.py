"""bench products: which kernels multiply a model's matrices the fastest on this GPU."""

from __future__ import annotations

import json

import typer

from quire.cli.options import JsonOption, with_engine_options
from quire.types.config import EngineOptions


@with_engine_options(positional_model=False)
def products(*, engine: EngineOptions, json_: JsonOption = None) -> None:
    """Measure now what a server measures while idle: which kernels multiply a model's matrices the fastest on this GPU;
    report what was chosen, and keep it for engines that start."""
    from quire.bench.product_measuring import measure_products

    found = measure_products(engine)
    for line in found.choices:
        typer.echo(line)
    typer.echo(f"{found.seconds:.0f} s")
    if json_:
        figures = {"choices": found.choices, "seconds": found.seconds, "longest_piece_s": found.longest}
        json_.write_text(json.dumps({"engine": engine.flat(), **figures}, indent=1))
