"""The command tree, and the one place where errors become messages and exit codes."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from quire import __version__
from quire.cli import (
    batch_command,
    bench,
    cache_command,
    doctor,
    keys,
    model_commands,
    profile_command,
    ps,
    quantize_command,
    run,
    serve,
    simulate,
)
from quire.types.errors import QuireError

app = typer.Typer(
    name="quire",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="rich",
)


def show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"quire {__version__}")
        raise typer.Exit


@app.callback()
def top(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="print the version and exit")
    ] = False,
) -> None:
    """Run, serve and measure language models."""


run.register(app)
serve.register(app)
batch_command.register(app)
model_commands.register(app)
quantize_command.register(app)
doctor.register(app)
simulate.register(app)
profile_command.register(app)
ps.register(app)
app.add_typer(keys.app, name="keys")
app.add_typer(cache_command.app, name="cache")
app.add_typer(bench.app, name="bench")


def main() -> None:
    """Entry point: QuireErrors print as one line with exit code 1; a broken pipe is no error."""
    try:
        app()
    except QuireError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except OSError as error:
        _fail(f"{error.strerror or error}: {error.filename}" if error.filename else str(error))
    except UnicodeError:
        _fail("an argument, or a file that one names, is not valid UTF-8")


def _fail(message: str) -> None:
    typer.secho(f"error: {message.encode(errors='backslashreplace').decode()}", fg=typer.colors.RED, err=True)
    sys.exit(1)
