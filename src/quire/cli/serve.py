"""serve: the HTTP server over an engine in a process of its own."""

from __future__ import annotations

from typing import Annotated

import typer

from quire.cli.options import with_engine_options
from quire.types.config import EngineOptions


def register(app: typer.Typer) -> None:
    app.command()(with_engine_options()(serve))


def serve(
    *,
    engine: EngineOptions,
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="port to listen on; 0 picks a free one")] = 8000,
    served_model_name: Annotated[str | None, typer.Option(help="name clients use (default: the model's own)")] = None,
) -> None:
    """Serve a model over HTTP (OpenAI-compatible)."""
    from quire.assets import resolve
    from quire.engine.client import AsyncClient
    from quire.engine.frontend import Frontend
    from quire.serve import run_server
    from quire.text import TextModel

    async def open_frontend() -> Frontend:
        local = resolve(engine.model.model, progress=True)  # here, where there is a terminal to show progress
        client = await AsyncClient.open(engine, process=True)
        return Frontend(client, TextModel.load(local), served_model_name or local.name)

    run_server(open_frontend, host=host, port=port)
