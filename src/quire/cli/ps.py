"""ps: which model a running server has loaded."""

from __future__ import annotations

import os
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from quire.cli.model_report import show_json, size
from quire.cli.options import AsJson
from quire.cli.server_question import ask_server


def register(app: typer.Typer) -> None:
    app.command()(ps)


def ps(
    url: Annotated[str, typer.Argument(help="the server's address")] = "http://127.0.0.1:8000",
    key: Annotated[str, typer.Option(help="an API key (default: $QUIRE_API_KEY)")] = "",
    json: AsJson = False,
) -> None:
    """Show the models that a running server has loaded."""
    models = ask_server(url, "/api/ps", key or os.environ.get("QUIRE_API_KEY", "")).get("models", [])
    if json:
        show_json(models)
        return
    table = Table("name", "size", "on", "context", "parameters", "quantised", box=None)
    for model in models:
        about = model.get("details") or {}
        where = "GPU" if model.get("size_vram") else "CPU"
        context = f"{model.get('context_length') or 0:,}"
        quantised = str(about.get("quantization_level") or "")
        parameters = str(about.get("parameter_size") or "")
        table.add_row(str(model.get("name")), size(model.get("size") or 0), where, context, parameters, quantised)
    Console().print(table if table.rows else "no model is loaded")
