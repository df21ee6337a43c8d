"""bench needle: what sparse attention finds, and what it reads."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from quire.cli.options import JsonOption, with_engine_options
from quire.types.config import EngineOptions


@with_engine_options(positional_model=False)
def needle(
    *,
    engine: EngineOptions,
    length: Annotated[
        int | None, typer.Option(min=1, help="tokens of a haystack (default: the model's context)")
    ] = None,
    pages: Annotated[
        int | None, typer.Option(min=1, help="pages that decoding reads (default: a quarter of all)")
    ] = None,
    haystacks: Annotated[int, typer.Option(min=1, help="texts to look in")] = 5,
    keys: Annotated[int, typer.Option(min=1, help="pass keys in each, up to 12")] = 8,
    text: Annotated[str | None, typer.Option(help="file to read (default: the Python language reference)")] = None,
    seed: Annotated[int, typer.Option(help="seed of the pass keys")] = 1,
    json_: JsonOption = None,
) -> None:
    """Look for pass keys in long texts with all pages and with some; report what was found, and bytes read."""
    from rich.console import Console
    from rich.table import Table

    from quire.bench.evict import long_text
    from quire.bench.needle import NAMES, compare
    from quire.engine.llm import LLM
    from quire.types.errors import ConfigError

    if not 1 <= keys <= len(NAMES):
        raise ConfigError(f"--keys must be from 1 to {len(NAMES)}, got {keys}")
    with LLM(progress=True, **EngineOptions.of(kv_memory="1G").but(**engine.flat()).flat()) as llm:
        tokens = length or llm.info.max_model_len - 128
        some = pages or tokens // llm.info.page_size // 4
        filler = long_text(llm, 4 * tokens, text)
        found = compare(llm, length=tokens, pages=some, haystacks=haystacks, keys=keys, filler=filler, seed=seed)
    table = Table("pages read", "pass keys found", "bytes that attention read", box=None)
    table.add_row(f"all {found['pages_of_all']}", f"{found['found_full']:.0%}", f"{found['bytes_full'] / 1e9:.2f} GB")
    less = f"{found['bytes_sparse'] / 1e9:.2f} GB ({found['bytes_factor']:.2f} times less)"
    table.add_row(str(some), f"{found['found_sparse']:.0%}", less)
    Console().print(table)
    if json_:
        json_.write_text(json.dumps({"engine": engine.flat(), **found}, indent=1))
