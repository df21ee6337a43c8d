"""cache: look at a running server's KV cache."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from quire.cli.server_question import ask_server

app = typer.Typer(help="Look at the KV cache of a running server.", no_args_is_help=True)


@app.callback()
def cache() -> None:
    """Look at the KV cache of a running server."""


@app.command()
def stats(
    url: Annotated[str, typer.Argument(help="the server's admin address, as it says at start")],
    key: Annotated[str, typer.Option(help="an admin key (default: $QUIRE_ADMIN_KEY)")] = "",
) -> None:
    """Show what each tier holds, what it delivered, and what that saved."""
    report = ask_server(url, "/v1/cache", key or os.environ.get("QUIRE_ADMIN_KEY", ""), who="an admin key")
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for title in ("tier", "pages", "of", "MiB", "hit tokens", "MiB in", "MiB out", "missed", "skipped", "failed"):
        table.add_column(title, justify="left" if title == "tier" else "right")
    held = report["device_used"] + report["device_cached"]
    mib = report["page_bytes"] / 2**20
    table.add_row("device", str(held), str(report["device_pages"]), f"{held * mib:.1f}", *["-"] * 6)
    for tier in report["tiers"]:
        counts = (tier["bytes"] / 2**20, tier["hit_tokens"], tier["bytes_in"] / 2**20, tier["bytes_out"] / 2**20)
        numbers = [f"{n:.1f}" if isinstance(n, float) else str(n) for n in counts]
        ends = (str(tier[name]) for name in ("missed", "skipped", "failed"))
        table.add_row(tier["name"], str(tier["pages"]), str(tier["capacity"] or "∞"), *numbers, *ends)
    console = Console()
    console.print(table)
    console.print(f"prefix hit rate {report['hit_rate']:.1%}; seconds saved by tiers {report['saved_seconds']:.1f}")
    console.print(f"preemptions {report['preemptions']}, of them swapped {report['swaps']}")
    for way, rate in report["rates"].items():
        console.print(f"{way}: {rate:.0f} a second" if way == "tokens" else f"{way}: {rate / 1e6:.0f} MB/s")
    for session in report["sessions"]:
        console.print(f"session {session['session']}: {session['pages']} pages, {session['seconds']:.0f} s left")
