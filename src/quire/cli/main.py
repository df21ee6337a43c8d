"""The command tree, and the one place where errors become messages and exit codes."""

from __future__ import annotations

import os
import sys

import typer

from quire.cli import batch_command as batch
from quire.cli import bench, doctor, keys, serve
from quire.cli import cache_command as cache
from quire.cli import model_commands as models
from quire.cli import run as chat
from quire.types.errors import QuireError

app = typer.Typer(
    name="quire",
    help="Run, serve and measure language models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
chat.register(app)
serve.register(app)
batch.register(app)
models.register(app)
doctor.register(app)
app.add_typer(keys.app, name="keys")
app.add_typer(cache.app, name="cache")
app.add_typer(bench.app, name="bench")


def main() -> None:
    """Entry point: QuireErrors print as one line with exit code 1; a broken pipe is no error."""
    try:
        app()
    except QuireError as error:
        typer.secho(f"error: {error}", fg=typer.colors.RED, err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
