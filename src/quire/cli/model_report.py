"""What people are told of a model before it is fetched or loaded: lines of a terminal, and the same as JSON."""

from __future__ import annotations

import json
from typing import Any

import typer
from rich.console import Console
from rich.status import Status
from rich.table import Table

from quire import assets
from quire.types.config import EngineOptions

Rows = list[tuple[str, str]]


def size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def gigabytes(count: float) -> str:
    """Bytes of files as hubs show them."""
    return f"{count / 1e9:.2f} GB" if count >= 1e7 else f"{count / 1e6:.2f} MB"


def show_rows(title: str, rows: Rows, *, err: bool = False) -> None:
    console = Console(stderr=err, highlight=False)
    if title:
        console.print(f"[bold]{title}[/bold]", soft_wrap=True)
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for key, value in rows:
        table.add_row(f"  {key}", value)
    console.print(table)


def show_json(found: Any) -> None:
    typer.echo(json.dumps(found, indent=2, default=str))


def fetch_rows(found: assets.Preview) -> Rows:
    known = f"; {gigabytes(found.source.fetched)} were read to know this" if found.source else ""
    return [
        ("from", found.where),
        ("to fetch", f"{gigabytes(found.missing)} ({gigabytes(found.disk)} free on the disk{known})"),
    ]


def fit_rows(fit: Any, engine: EngineOptions, source: Any) -> Rows:
    """Whether a model fits, at which context, and about how fast it would be."""
    from quire.runtime.model_fit import misfit

    spec = fit.spec
    rows = [("supported", f"{spec.architecture}, {fit.parameters:,} parameters, context {spec.max_position:,}")]
    if not fit.fits:
        return [*rows, ("does not fit", misfit(source, engine, fit).removeprefix("it does not fit: "))]
    cut = "" if fit.context >= spec.max_position else f", of the {spec.max_position:,} it was trained for"
    kept, free = "as stored" if fit.form == "as stored" else f"in {fit.form}", size(fit.hardware.memory)
    return [
        *rows,
        ("fits", f"{size(fit.weights)} of weights {kept}, {free} free; context {fit.context:,}{cut}"),
        ("speed", f"about {float(f'{fit.tokens_per_second:.2g}'):,g} tok/s for one request, as fast as memory is read"),
    ]


def fit_figures(fit: Any) -> dict[str, Any]:
    """The same for programs."""
    return {
        "fits": fit.fits,
        "weights_bytes": fit.weights,
        "weights_form": fit.form,
        "free_bytes": fit.hardware.memory,
        "device": fit.hardware.device,
        "context": fit.context,
        "kv_tokens": fit.tokens,
        "kv_token_bytes": fit.layout.token_bytes,
        "kv_bytes": fit.kv_bytes,
        "ranks": fit.ranks,
        "tokens_per_second": round(fit.tokens_per_second, 2),
    }


def reading_headers(name: str) -> Status:
    """A sign on the terminal that a hub is being asked."""
    return Console(stderr=True).status(f"reading the headers of {name}")


def fetch(engine: EngineOptions) -> assets.LocalModel:
    """Fetch a model that is not here; says before what it is and how it fits."""
    from quire.engine.build import fetch_model

    def told(found: assets.Preview, fit: Any) -> None:
        reading.stop()
        about = fit_rows(fit, engine, found.source) if fit is not None and fit.fits else []
        show_rows(found.name, [*fetch_rows(found), *about], err=True)

    with reading_headers(engine.model.model) as reading:
        return fetch_model(engine, progress=True, tell=told)
