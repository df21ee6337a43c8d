"""bench sampling: what temperature, top-p and their like cost over greedy."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import asdict
from typing import Annotated

import typer

from quire.cli.options import JsonOption, RoundsOption, with_engine_options
from quire.types.config import EngineOptions


@with_engine_options(positional_model=False)
def sampling(
    *,
    engine: EngineOptions,
    forms: Annotated[str, typer.Option(help="of sampling, separated by commas; by default all")] = "",
    num: Annotated[int, typer.Option(min=1, help="requests at once, of chat-like lengths")] = 32,
    in_: Annotated[int | None, typer.Option("--in", min=1, help="input tokens of each, instead")] = None,
    out: Annotated[int, typer.Option(min=1, help="output tokens of each, with --in")] = 128,
    rounds: RoundsOption = 3,
    seed: Annotated[int, typer.Option(help="seed of the workload")] = 1,
    json_: JsonOption = None,
) -> None:
    """Answer the same requests greedily and with sampling parameters in turn; report what these cost."""
    from quire.bench import workloads
    from quire.bench.sampling_bench import FORMS, measure
    from quire.engine.link import open_link
    from quire.types.errors import ConfigError

    chosen = forms.split(",") if forms else list(FORMS)
    if unknown := set(chosen) - set(FORMS):
        raise ConfigError(f"no such form of sampling: {min(unknown)!r}; there are {', '.join(FORMS)}")
    with closing(open_link(engine, process=False, progress=True)) as link:
        vocab = link.info.vocab_size
        if in_ is None:
            work = workloads.chat(num, seed=seed, vocab=vocab)
        else:
            work = workloads.fixed(num, in_, out, seed=seed, vocab=vocab)
        found = measure(link, work, chosen, rounds)
        device = link.info.device
    for cost in found:
        middle = sorted(cost.seconds)[len(cost.seconds) // 2]
        asked = " ".join(f"{name}={getattr(value, 'source', value)}" for name, value in FORMS[cost.form].items())
        typer.echo(f"{cost.form:12} {middle:8.3f} s  {cost.tokens / middle:9.1f} tok/s  {cost.over:+7.1%}   {asked}")
    if json_:
        settings = {"num": num, "in": in_, "out": out, "seed": seed, "device": device, "engine": engine.flat()}
        json_.write_text(json.dumps({**settings, "forms": [asdict(cost) for cost in found]}, indent=1))
