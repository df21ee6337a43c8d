"""batch: answer a file of API requests without a server, through the same parsing and the same answers."""

from __future__ import annotations

import asyncio
import dataclasses
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quire.cli.model_report import fetch
from quire.cli.options import with_engine_options
from quire.types.config import EngineOptions
from quire.types.errors import ConfigError
from quire.types.serving import ServeOptions

if TYPE_CHECKING:
    from quire.text import TextModel

_HELP = {field.name: field.metadata["help"] for field in dataclasses.fields(ServeOptions)}


def register(app: typer.Typer) -> None:
    app.command()(with_engine_options(positional_model=False)(batch))


def batch(
    *,
    engine: EngineOptions,
    source: Annotated[Path, typer.Argument(help="requests, one JSON object a line, as for /v1/batches", metavar="IN")],
    target: Annotated[Path, typer.Argument(help="where answers go, one a line, as they are ready", metavar="OUT")],
    served_model_name: Annotated[str | None, typer.Option(help=_HELP["served_model_name"])] = None,
    tool_call_parser: Annotated[
        str, typer.Option("--tool-call-parser", "--tool-parser", help=_HELP["tool_call_parser"])
    ] = "auto",
    reasoning_parser: Annotated[str, typer.Option(help=_HELP["reasoning_parser"])] = "auto",
) -> None:
    """Answer a file of OpenAI requests. Exit code 1 if any of them failed."""
    from quire.assets import present
    from quire.text import TextModel

    if not source.is_file():
        raise ConfigError(f"{source} is no file; write one request a line into it")
    local = present(engine.model.model) or fetch(engine)
    text = TextModel.load(local, tool_call_parser=tool_call_parser, reasoning_parser=reasoning_parser)
    done, failed = asyncio.run(_answer(engine, text, served_model_name or local.name, source, target))
    typer.echo(f"{done} answered, {failed} failed; see {target}", err=True)
    if failed:
        raise typer.Exit(1)


async def _answer(engine: EngineOptions, text: TextModel, name: str, source: Path, target: Path) -> tuple[int, int]:
    from rich.progress import Progress

    from quire.engine.client import AsyncClient
    from quire.engine.frontend import Frontend
    from quire.serve.core import prepare_pool as prepare_pool
    from quire.serve.http.app import create_serving
    from quire.serve.openai.batch_lines import answer_lines, lines_of

    total = await _count(source)
    client = await AsyncClient.open(engine, process=False, progress=True)
    serving = create_serving(Frontend(client, text, name))
    prepare_pool.enter(serving.prepare_pool)
    counts = {True: 0, False: 0}
    try:
        with Progress(transient=True) as progress, target.open("wb") as out:
            bar = progress.add_task("requests", total=total)
            async with aclosing(answer_lines(serving, lines_of(source, serving.max_body))) as answers:
                async for answered in answers:
                    out.write(answered.line + b"\n")
                    counts[answered.ok] += 1
                    progress.advance(bar)
    finally:
        serving.prepare_pool.close()
        await client.close()
    return counts[True], counts[False]


async def _count(source: Path) -> int:
    """How many lines there are; as in a server, two of one name are refused before any is answered."""
    from quire.serve.openai.batch_lines import custom_id_of, lines_of, note_id

    total, seen = 0, set[str]()
    async with aclosing(lines_of(source, ServeOptions().body_bytes)) as lines:
        async for raw in lines:
            total += 1
            if custom_id := custom_id_of(raw):
                note_id(custom_id, seen)
    return total
