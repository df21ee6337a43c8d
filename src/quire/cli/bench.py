"""bench: measurements, each a command."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from quire.cli.options import with_engine_options
from quire.types.config import EngineOptions

app = typer.Typer(help="Measure an engine.", no_args_is_help=True)


class Workload(StrEnum):
    CHAT = "chat"
    FIXED = "fixed"
    SHARED_PREFIX = "shared_prefix"


@app.callback()
def _group() -> None:
    pass


def throughput(
    *,
    engine: EngineOptions,
    workload: Annotated[Workload, typer.Option(help="what is asked: see docs/bench.md")] = Workload.CHAT,
    num: Annotated[int, typer.Option(help="requests")] = 200,
    in_: Annotated[int, typer.Option("--in", help="input tokens per request (fixed, shared_prefix)")] = 128,
    out: Annotated[int, typer.Option(help="output tokens per request (fixed, shared_prefix)")] = 64,
    prefix: Annotated[int, typer.Option(help="shared tokens before each input (shared_prefix)")] = 512,
    seed: Annotated[int, typer.Option(help="seed of the workload")] = 1,
    json_: Annotated[Path | None, typer.Option("--json", help="write all figures here")] = None,
) -> None:
    """Submit a whole workload at once; report tokens per second, latencies and KV use."""
    from rich.console import Console
    from rich.table import Table

    from quire.bench import workloads
    from quire.bench.offline import run_workload
    from quire.bench.report import rows, summarise
    from quire.engine.link import open_link

    link = open_link(engine, process=False, progress=True)
    try:
        vocab = min(128000, link.info.vocab_size)
        if workload is Workload.CHAT:
            work = workloads.chat(num, seed=seed, vocab=vocab)
        elif workload is Workload.FIXED:
            work = workloads.fixed(num, in_, out, seed=seed, vocab=vocab)
        else:
            work = workloads.shared_prefix(num, prefix, in_, out, seed=seed, vocab=vocab)
        run_workload(link, workloads.fixed(2, 8, 2, seed=seed + 1, vocab=vocab))  # first-use costs, other tokens
        summary = summarise(run_workload(link, work))
        info = link.info
    finally:
        link.close()
    table = Table.grid(padding=(0, 2))
    for row in rows(summary):
        table.add_row(*row)
    Console().print(table)
    if json_:
        settings: dict[str, Any] = {"workload": str(workload), "num": num, "seed": seed, "engine": engine.flat()}
        facts = {"model": info.model, "device": info.device, "dtype": info.dtype, "reasons": info.reasons}
        json_.write_text(json.dumps({**settings, **facts, **summary}, indent=1))


app.command()(with_engine_options(positional_model=False)(throughput))


def suite(
    *,
    engine: EngineOptions,
    name: Annotated[str, typer.Argument(help="which suite: h200")] = "h200",
    only: Annotated[list[str] | None, typer.Option(help="run these workloads only; may be repeated")] = None,
    repeats: Annotated[int, typer.Option(help="measured runs of each workload; the best counts")] = 1,
    verify: Annotated[int, typer.Option(help="answers of each workload to check against plain torch")] = 2,
    json_: Annotated[Path | None, typer.Option("--json", help="write all figures here")] = None,
) -> None:
    """Run a fixed set of workloads and set each against other engines and the hardware's floor."""
    from quire.bench.suite_report import report_suite

    report_suite(engine, name, only=only, repeats=repeats, verify=verify, json_path=json_)


app.command()(with_engine_options(positional_model=False)(suite))
