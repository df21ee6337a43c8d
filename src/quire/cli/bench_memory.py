"""bench multi-turn, bench oversubscribed: KV memory that is too small, with and without what helps; bench blend: KV
memory reused where it was not computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from quire.cli.options import JsonOption, with_engine_options
from quire.types.config import EngineOptions


def multi_turn(
    *,
    engine: EngineOptions,
    clients: Annotated[int, typer.Option(min=1, help="conversations at once")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="turns of each")] = 5,
    in_: Annotated[int, typer.Option("--in", min=1, help="fresh input tokens a turn")] = 512,
    out: Annotated[int, typer.Option(min=1, help="output tokens a turn")] = 64,
    share: Annotated[float, typer.Option(help="part of all pages that the device holds")] = 0.1,
    tiers: Annotated[
        list[str] | None, typer.Option(help="off, host, host+disk or remote; may be repeated (default: all there are)")
    ] = None,
    json_: JsonOption = None,
) -> None:
    """Hold conversations over a device cache that is too small; report hit rate and time with each set of tiers."""
    from quire.bench.memory import TIERS, conversation_rows, conversations

    chosen = tiers or [name for name in TIERS if name != "remote" or engine.cache.kv_remote]
    found = conversations(engine, chosen, clients=clients, rounds=rounds, n_in=in_, n_out=out, share=share)
    _show(found, conversation_rows(found), json_)


def oversubscribed(
    *,
    engine: EngineOptions,
    num: Annotated[int, typer.Option(min=1, help="requests, all at once")] = 500,
    in_: Annotated[int, typer.Option("--in", min=1, help="input tokens")] = 64,
    out: Annotated[int, typer.Option(min=1, help="output tokens")] = 64,
    over: Annotated[float, typer.Option(help="how many times the pages there are the requests need")] = 8.0,
    json_: JsonOption = None,
) -> None:
    """Submit far more than fits; report time and preemptions for recompute, swap and the measured choice."""
    from quire.bench.memory import oversubscribed as measure
    from quire.bench.memory import oversubscribed_rows

    found = measure(engine, num=num, n_in=in_, n_out=out, over=over)
    _show(found, oversubscribed_rows(found), json_)


def blend(
    *,
    engine: EngineOptions,
    num: Annotated[int, typer.Option(min=1, help="questions for each number of documents")] = 100,
    documents: Annotated[int, typer.Option(min=1, help="that there are")] = 12,
    chosen: Annotated[
        list[int] | None, typer.Option(min=1, help="of them, in each prompt; may be repeated (default: 2 and 4)")
    ] = None,
    recompute: Annotated[
        list[float] | None,
        typer.Option(min=0.0, max=1.0, help="part of their tokens; may be repeated (default: 0, 0.15, 0.25, 1)"),
    ] = None,
    json_: JsonOption = None,
) -> None:
    """Ask for facts in documents in ever other orders; report time to first token, agreement with prompts computed
    whole, and right answers, for each part of the documents' tokens that is computed again."""
    from quire.bench.chunk_reuse_bench import SHARES, measure, rows
    from quire.engine.llm import LLM

    shares, everything = tuple(recompute) if recompute else SHARES, []
    with LLM(progress=True, **{"model": engine.model.model, **engine.flat()}) as llm:
        for count in chosen or (2, 4):
            found = measure(llm, num, documents=documents, chosen=count, shares=shares)
            everything.append(found)
            title = f"{num} questions about {count} documents, {found['prompt_tokens']:.0f} tokens a prompt"
            _show(found, rows(found), None, f"{title}, computed whole in {found['ttft']:.2f} s")
    if json_:
        json_.write_text(json.dumps(everything, indent=1))


def _show(found: dict[str, Any], lines: list[tuple[str, ...]], path: Path | None, title: str = "") -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title or f"{found['pages']} pages on the device, {found['pages_needed']} needed")
    for title in lines[0]:
        table.add_column(title)
    for line in lines[1:]:
        table.add_row(*line)
    Console().print(table)
    if path:
        path.write_text(json.dumps(found, indent=1))


def register(app: typer.Typer) -> None:
    for command in (multi_turn, oversubscribed, blend):
        app.command()(with_engine_options(positional_model=False)(command))
