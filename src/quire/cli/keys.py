"""keys: make API keys. The key itself is shown once and kept nowhere; a key file needs only its digest."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(help="Make API keys for `quire serve --api-keys`.", no_args_is_help=True)


@app.callback()
def keys() -> None:
    """Make API keys for `quire serve --api-keys`."""


@app.command()
def new(
    name: Annotated[str, typer.Argument(help="whose key it is: a name for logs, limits and the cache salt")],
    scope: Annotated[list[str] | None, typer.Option(help="inference (default) or admin; may be given twice")] = None,
) -> None:
    """Print a new entry for the key file, and on stderr the key itself."""
    from quire.serve.core.api_keys import INFERENCE, check_entry, digest, new_secret

    secret = new_secret()
    entry = {"name": name, "sha256": digest(secret).hex(), "scopes": scope or [INFERENCE]}
    check_entry("quire keys", entry)
    typer.secho(f"key of {name} (shown this once): {secret}", err=True, bold=True)
    scopes = ", ".join(f'"{each}"' for each in entry["scopes"])
    typer.echo(f'[[key]]\nname = "{name}"\nsha256 = "{entry["sha256"]}"\nscopes = [{scopes}]\n')
