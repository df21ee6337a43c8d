"""pull, list, show, rm, catalog: the models on this machine, and those that could be."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from quire import assets
from quire.cli.model_report import fetch_rows, fit_figures, fit_rows, reading_headers, show_json, show_rows
from quire.cli.options import AsJson
from quire.types.config import EngineOptions
from quire.types.errors import QuireError

Name = Annotated[str, typer.Argument(help="model name, hub id, directory or GGUF file")]


def register(app: typer.Typer) -> None:
    app.command()(pull)
    app.command(name="list")(list_)
    app.command()(show)
    app.command()(rm)
    app.command()(catalog)


def pull(model: Name) -> None:
    """Fetch a model into the local cache; says before what it is and whether it would run here."""
    with reading_headers(model):
        found = assets.preview(model) if assets.present(model) is None else None
        engine = EngineOptions.of(model=model)
        fit = _fit(found, None, engine) if found is not None else None
    if found is not None:
        about = fit_rows(fit, engine, found.source) if fit is not None else []
        show_rows(found.name, [*fetch_rows(found), *about], err=True)
    local = assets.pull(model, progress=True)
    typer.echo(f"{local.name} is at {local.path}")


def list_(json: AsJson = False) -> None:
    """List cached models."""
    models = assets.list_models()
    if json:
        show_json([dataclasses.asdict(found) for found in models])
        return
    table = Table("name", "kind", "size", "path", box=None)
    for found in models:
        table.add_row(found.name, found.kind, f"{found.size / 2**20:.1f} MiB", str(found.path))
    Console().print(table if table.rows else "no models cached yet; try: quire pull smollm2-135m")


def show(model: Name, json: AsJson = False) -> None:
    """Show what a model is, whether it runs on this machine and about how fast, without loading or fetching it."""
    local = assets.present(model)
    with reading_headers(model):
        found = assets.preview(model) if local is None else None
    if local is None and found is None:
        assets.resolve(model)  # says what there is instead
    engine = EngineOptions.of(model=model)
    about: dict[str, Any] = {}
    if local is not None:
        info = assets.describe(local)
        about = {name: value for name, value in dataclasses.asdict(info).items() if value not in (None, "")}
        source: Any = local.open() if not info.problem else None
    else:
        assert found is not None
        source = found.source
        about = {"name": found.name, "from": found.where, "kind": found.kind, "size": found.size}
        about["to_fetch"] = found.missing
    rows = [(k.replace("_", " "), f"{v:,}" if isinstance(v, int) else str(v)) for k, v in about.items()]
    if found is not None:
        rows = [("name", found.name), *fetch_rows(found)]
    try:
        fit = _fit(found, source, engine)
    except QuireError as error:
        about["problem"], fit = str(error), None
        rows.append(("problem", str(error)))
    if json:
        show_json(about | (fit_figures(fit) if fit is not None else {}))
    else:
        show_rows("", rows + (fit_rows(fit, engine, source) if fit is not None else []))


def _fit(found: assets.Preview | None, source: Any, engine: EngineOptions) -> Any:
    from quire.engine.build import check_preview
    from quire.runtime.model_fit import model_fit

    if found is not None:
        return check_preview(found, engine)
    return model_fit(source, engine) if source is not None else None


def rm(model: Name) -> None:
    """Delete a cached model."""
    assets.remove(model)
    typer.echo(f"removed {model}")


def catalog(
    words: Annotated[str | None, typer.Argument(help="only names that have this in them")] = None, json: AsJson = False
) -> None:
    """List names of models that can be fetched without knowing a hub's repositories."""
    known = [m for m in assets.CATALOG.values() if words is None or words.lower() in m.name]
    if json:
        show_json([dataclasses.asdict(model) for model in known])
        return
    table = Table("name", "about", "quantised", "from", box=None)
    for model in known:
        table.add_row(model.name, f"{model.gigabytes:.2f} GB", model.tag, model.repository)
    Console().print(table if table.rows else f"no name has {words!r} in it; any model on the hub is org/name")
    if table.rows:
        Console(stderr=True).print(
            "Also NAME-q4, -q5, -q6, -q8 (other quantisations) and NAME-bf16 (the checkpoint itself).", style="dim"
        )
