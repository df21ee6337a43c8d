"""pull, list, show, rm: the models on this machine."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from quire import assets

Name = Annotated[str, typer.Argument(help="model name, hub id, directory or GGUF file")]


def register(app: typer.Typer) -> None:
    app.command()(pull)
    app.command(name="list")(list_)
    app.command()(show)
    app.command()(rm)


def pull(model: Name) -> None:
    """Fetch a model into the local cache."""
    local = assets.pull(model, progress=True)
    typer.echo(f"{local.name} is at {local.path}")


def list_() -> None:
    """List cached models."""
    table = Table("name", "kind", "size", "path", box=None)
    for found in assets.list_models():
        table.add_row(found.name, found.kind, f"{found.size / 2**20:.1f} MiB", str(found.path))
    Console().print(table if table.rows else "no models cached yet; try: quire pull smollm2-135m")


def show(model: Name) -> None:
    """Show what a model is, without loading it."""
    info = assets.describe(assets.resolve(model))
    table = Table.grid(padding=(0, 2))
    for field in dataclasses.fields(info):
        value = getattr(info, field.name)
        if value not in (None, ""):
            table.add_row(field.name.replace("_", " "), f"{value:,}" if isinstance(value, int) else str(value))
    Console().print(table)


def rm(model: Name) -> None:
    """Delete a cached model."""
    assets.remove(model)
    typer.echo(f"removed {model}")
