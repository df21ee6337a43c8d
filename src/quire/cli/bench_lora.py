"""bench lora: throughput with many adapters in one batch."""

from __future__ import annotations

import json
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from quire.cli.options import InOption, JsonOption, OutOption, RoundsOption, with_engine_options
from quire.types.config import EngineOptions


@with_engine_options(positional_model=False)
def lora(
    *,
    engine: EngineOptions,
    adapters: Annotated[int, typer.Option(min=1, help="random adapters, which requests take in turn")] = 32,
    rank: Annotated[int, typer.Option(min=1, help="rank of the adapters")] = 16,
    targets: Annotated[
        str, typer.Option(help="projections they update, separated by commas (PEFT's default for Llama); or all")
    ] = "q_proj,v_proj",
    num: Annotated[int, typer.Option(min=1, help="requests at once")] = 64,
    in_: InOption = 64,
    out: OutOption = 64,
    rounds: RoundsOption = 3,
    seed: Annotated[int, typer.Option(help="seed of prompts and adapters")] = 1,
    json_: JsonOption = None,
) -> None:
    """Answer the same requests with the base model and with many LoRA adapters in one batch; report throughput."""
    from quire.assets import resolve
    from quire.bench.lora_bench import TARGETS, compare, write_adapter
    from quire.engine.link import open_link
    from quire.model import read_spec
    from quire.types.errors import ConfigError

    chosen = TARGETS if targets == "all" else tuple(targets.split(","))
    if unknown := set(chosen) - set(TARGETS):
        raise ConfigError(f"no such projection: {min(unknown)!r}; there are {', '.join(TARGETS)}")
    spec = read_spec(resolve(engine.model.model, progress=True).open())
    with tempfile.TemporaryDirectory(prefix="quire-lora-") as folder:
        names = {f"adapter{i}": Path(folder) / str(i) for i in range(adapters)}
        for i, path in enumerate(names.values()):
            size = write_adapter(path, spec, chosen, rank, seed + i)
        options = EngineOptions.of(max_seqs=num).but(**engine.flat())
        options = options.but(lora=[f"{name}={path}" for name, path in names.items()])
        with closing(open_link(options, process=False, progress=True)) as link:
            found = compare(link, list(names), num=num, n_in=in_, n_out=out, rounds=rounds, seed=seed)
            for line in link.info.reasons:
                if line.startswith(("decoder", "stages", "LoRA")):
                    typer.echo(line)
    typer.echo(f"{adapters} adapters of rank {rank} on {', '.join(chosen)}: {size:,} numbers each; {num} requests")
    typer.echo(f"base      {_median(found.base):8.1f} tok/s")
    typer.echo(f"adapters  {_median(found.adapters):8.1f} tok/s   {found.share:.1%} of the base")
    if json_:
        figures = {"base": found.base, "adapters": found.adapters, "share": found.share}
        asked = {"adapters": adapters, "rank": rank, "targets": list(chosen), "num": num, "in": in_, "out": out}
        json_.write_text(json.dumps({"engine": engine.flat(), **asked, "tok_s": figures}, indent=1))


def _median(speeds: list[float]) -> float:
    return sorted(speeds)[len(speeds) // 2]
