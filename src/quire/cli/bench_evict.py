"""bench evict: what each eviction policy costs at the same KV budget."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from quire.cli.options import JsonOption, with_engine_options
from quire.types.config import EngineOptions


@with_engine_options(positional_model=False)
def evict(
    *,
    engine: EngineOptions,
    budget: Annotated[int, typer.Option(min=1, help="tokens whose KV is kept")] = 1024,
    inside: Annotated[int, typer.Option(min=1, help="tokens of a text within the trained context")] = 4096,
    beyond: Annotated[int, typer.Option(min=1, help="tokens of a text beyond it")] = 16_384,
    tail: Annotated[int, typer.Option(min=1, help="last tokens of a text whose perplexity counts")] = 2048,
    haystack: Annotated[int, typer.Option(min=1, help="tokens around a pass key")] = 2048,
    num: Annotated[int, typer.Option(help="pass keys to find; 0: none")] = 20,
    way: Annotated[
        list[str] | None, typer.Option(help="full, recompute, sinks, snapkv or h2o; may be repeated (default: all)")
    ] = None,
    text: Annotated[str | None, typer.Option(help="file to read (default: the Python language reference)")] = None,
    seed: Annotated[int, typer.Option(help="seed of the pass keys")] = 1,
    json_: JsonOption = None,
) -> None:
    """Stream long texts through a KV budget and look for pass keys; report perplexity and what was found, by policy."""
    from rich.console import Console
    from rich.table import Table

    from quire.bench.evict import WAYS, compare, rows
    from quire.engine.llm import LLM
    from quire.types.errors import ConfigError

    chosen = way or list(WAYS)
    if unknown := set(chosen) - set(WAYS):
        raise ConfigError(f"no such way: {min(unknown)!r}; there are {', '.join(WAYS)}")
    if tail >= inside or haystack >= inside:
        raise ConfigError(f"--tail ({tail}) and --haystack ({haystack}) must be shorter than --inside ({inside})")
    options = EngineOptions.of(kv_memory="512M", max_model_len=beyond + 1).but(**engine.flat())
    with LLM(progress=True, **options.flat()) as llm:
        found = compare(
            llm, chosen, budget=budget, inside=inside, beyond=beyond, tail=tail, haystack=haystack, num=num, file=text,
            seed=seed,
        )  # fmt: skip
    heads, *lines = rows(found, inside, beyond)
    table = Table(*heads, box=None)
    for line in lines:
        table.add_row(*line)
    Console().print(table)
    if json_:
        json_.write_text(json.dumps({"engine": engine.flat(), "budget": budget, "figures": found}, indent=1))
