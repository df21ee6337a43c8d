"""bench spec: acceptance and speed of speculation."""

from __future__ import annotations

import json
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quire.cli.options import JsonOption, with_engine_options
from quire.types.config import EngineOptions

if TYPE_CHECKING:
    from quire.bench.speculation_bench import Figures


@with_engine_options(positional_model=False)
def spec(
    *,
    engine: EngineOptions,
    proposer: Annotated[
        list[str] | None, typer.Option(help="compare these (as --speculation has them) with none; may be repeated")
    ] = None,
    workload: Annotated[list[str] | None, typer.Option(help="edit, chat; may be repeated (default: both)")] = None,
    num: Annotated[int, typer.Option(min=1, help="prompts a round")] = 4,
    rounds: Annotated[int, typer.Option(min=1, help="measured rounds, each over other prompts; medians count")] = 3,
    max_tokens: Annotated[int, typer.Option(min=1, help="longest answer")] = 160,
    synthetic: Annotated[
        float | None, typer.Option(help="draft anything and accept this share: speed alone, over any weights")
    ] = None,
    k: Annotated[int, typer.Option("--k", min=1, help="with --synthetic: longest draft, in tokens")] = 4,
    batch: Annotated[list[int] | None, typer.Option(help="with --synthetic: requests at once; may be repeated")] = None,
    in_: Annotated[int, typer.Option("--in", min=1, help="with --synthetic: input tokens")] = 128,
    out: Annotated[int, typer.Option(min=1, help="with --synthetic: output tokens")] = 256,
    seed: Annotated[int, typer.Option(help="seed of the prompts")] = 1,
    json_: JsonOption = None,
) -> None:
    """Answer the same prompts with and without speculation; report acceptance and single-stream speed."""
    from quire.bench.speculation_bench import WORKLOADS, plain_figures, rows

    found: dict[str, dict[str, Figures]] = {}
    if synthetic is not None:
        found = _synthetic(engine, synthetic, k, batch or [1, 32], in_=in_, out=out, rounds=rounds, seed=seed)
    else:
        chosen = proposer or ["ngram", "suffix"]
        found = _proposers(engine, chosen, workload or list(WORKLOADS), num, rounds, max_tokens, seed)
    _table([row for name, figures in found.items() for row in rows(name, figures)])
    if json_:
        figures = {name: plain_figures(part) for name, part in found.items()}
        json_.write_text(json.dumps({"engine": engine.flat(), "seed": seed, "figures": figures}, indent=1))


def _proposers(
    engine: EngineOptions, chosen: list[str], workloads: list[str], num: int, rounds: int, max_tokens: int, seed: int
) -> dict[str, dict[str, Figures]]:
    """All engines at once, so that they take turns on the same machine in the same state."""
    from quire.bench.speculation_bench import WORKLOADS, compare
    from quire.engine.llm import LLM
    from quire.types.errors import ConfigError

    for name in workloads:
        if name not in WORKLOADS:
            raise ConfigError(f"no workload is called {name!r}; there are {', '.join(WORKLOADS)}")
    options = EngineOptions.of(kv_memory="512M").but(**engine.flat())
    with ExitStack() as stack:
        llms = {
            name: stack.enter_context(LLM(progress=True, **options.but(speculation=name).flat()))
            for name in ("off", *chosen)
        }
        return {
            name: compare(llms, name, rounds=rounds, num=num, max_tokens=max_tokens, seed=seed) for name in workloads
        }


def _synthetic(
    engine: EngineOptions, rate: float, k: int, batches: list[int], *, in_: int, out: int, rounds: int, seed: int
) -> dict[str, dict[str, Figures]]:
    """One engine after the other: on a GPU each takes all memory."""
    from quire.bench.speculation_bench import batched
    from quire.engine.link import open_link

    found: dict[str, dict[str, Any]] = {f"batch {size}": {} for size in batches}
    for name in ("off", f"synthetic:{rate}"):
        extra = {"draft_tokens": k} if name != "off" else {}
        with closing(open_link(engine.but(speculation=name, **extra), process=False, progress=True)) as link:
            for size in batches:
                figures = batched(link, size, n_in=in_, n_out=out, rounds=rounds, seed=seed)
                found[f"batch {size}"][name] = figures
    return found


def _table(lines: list[tuple[str, ...]]) -> None:
    from rich.console import Console
    from rich.table import Table

    from quire.bench.speculation_bench import HEADS

    table = Table(*HEADS, box=None)
    for line in lines:
        table.add_row(*line)
    Console().print(table)
