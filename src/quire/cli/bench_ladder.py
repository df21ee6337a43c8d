"""bench ladder: one workload through the history of serving engines."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from quire.cli.options import HtmlOption, JsonOption, PlotOption, with_engine_options
from quire.types.config import EngineOptions
from quire.types.errors import ConfigError


def ladder(
    *,
    engine: EngineOptions,
    num: Annotated[int, typer.Option(min=2, help="requests, all at once")] = 16,
    seed: Annotated[int, typer.Option(help="seed of the workload")] = 1,
    rung: Annotated[list[str] | None, typer.Option(help="only this rung; may be repeated")] = None,
    json_: JsonOption = None,
    html: HtmlOption = None,
    plot: PlotOption = None,
) -> None:
    """Run one workload on a ladder of engines, from recomputing every token to speculation; see docs/ladder.md."""
    from quire.bench.ladder import RUNGS, climb_ladder, ladder_html, ladder_row, ladder_rows, ladder_svg
    from quire.cli.bench_simulation import show

    if unknown := set(rung or ()) - {one.name for one in RUNGS}:
        raise ConfigError(f"no rung is called {min(unknown)!r}; there are {', '.join(one.name for one in RUNGS)}")
    found = climb_ladder(
        engine, num, seed=seed, rungs=rung or (), told=lambda one: typer.echo("  ".join(ladder_row(one)), err=True)
    )
    show(ladder_rows(found))
    if json_:
        json_.write_text(json.dumps(found, indent=1))
    if html:
        html.write_text(ladder_html(found), encoding="utf-8")
    if plot:
        plot.write_text(ladder_svg(found), encoding="utf-8")


def register(app: typer.Typer) -> None:
    app.command()(with_engine_options(positional_model=False)(ladder))
