"""bench perplexity: what a model, as it is kept here, makes of a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from quire.cli.options import JsonOption, with_engine_options
from quire.types.config import EngineOptions


@with_engine_options(positional_model=False)
def perplexity(
    *,
    engine: EngineOptions,
    text: Annotated[Path, typer.Option(help="file of text to score")],
    window: Annotated[int, typer.Option(help="tokens scored together", min=2)] = 1024,
    num: Annotated[int | None, typer.Option(help="windows at most (default: the whole text)", min=1)] = None,
    json_: JsonOption = None,
) -> None:
    """Score a text; report its perplexity under the model as it is kept here."""
    from quire.bench.perplexity import perplexity as measure
    from quire.bench.perplexity import read_text, windows
    from quire.engine.llm import LLM

    words = read_text(text)
    with LLM(progress=True, **engine.but(prefix_cache=False).flat()) as llm:
        found = measure(llm, windows(llm.text.tokenizer.encode(words), window, num))
    typer.echo(f"perplexity {found.value:.4f} over {found.tokens:,} tokens")
    if json_:
        figures = {"perplexity": found.value, "tokens": found.tokens, "window": window}
        json_.write_text(json.dumps({"engine": engine.flat(), **figures}, indent=1))
