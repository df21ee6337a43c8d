"""run: one answer, or an interactive chat, streamed to the terminal."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from quire.assets import present
from quire.cli.model_report import fetch
from quire.cli.options import with_engine_options
from quire.types.config import EngineOptions
from quire.types.errors import InputError
from quire.types.sampling_params import SamplingParams


def register(app: typer.Typer) -> None:
    app.command(name="run")(with_engine_options()(run))


def run(
    *,
    engine: EngineOptions,
    prompt: Annotated[str | None, typer.Argument(help="question to answer; without it, an interactive chat")] = None,
    system: Annotated[str | None, typer.Option(help="system message")] = None,
    max_tokens: Annotated[int, typer.Option(help="longest answer, in tokens")] = 512,
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 0.7,
    top_p: Annotated[float, typer.Option(help="nucleus sampling")] = 0.95,
    seed: Annotated[int | None, typer.Option(help="make sampling repeatable")] = None,
) -> None:
    """Chat with a model in the terminal."""
    from quire.engine.llm import LLM

    params = SamplingParams(temperature=temperature, top_p=top_p, max_tokens=max_tokens, seed=seed)
    if present(engine.model.model) is None:
        fetch(engine)
    flat = engine.flat()
    with LLM(flat.pop("model", engine.model.model), progress=True, **flat) as llm:
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        if prompt is None and not sys.stdin.isatty():
            prompt = sys.stdin.read()
        if prompt is not None:
            _answer(llm, messages, prompt, params)
            return
        typer.secho(f"{llm.info.model} on {llm.info.device}. /reset starts over, Ctrl-D ends.", dim=True)
        _chat(llm, messages, params)


def _chat(llm: Any, messages: list[dict[str, Any]], params: SamplingParams) -> None:
    start = len(messages)
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            typer.echo()
            return
        if line == "/reset":
            del messages[start:]
        elif line:
            try:
                _answer(llm, messages, line, params)
            except InputError as error:
                messages.pop()
                typer.secho(f"error: {error} (/reset starts over)", fg=typer.colors.RED, err=True)


def _answer(llm: Any, messages: list[dict[str, Any]], question: str, params: SamplingParams) -> None:
    messages.append({"role": "user", "content": question})
    pieces = []
    try:
        for delta in llm.stream(llm.text.encode_chat(messages), params):
            pieces.append(delta.text)
            typer.echo(delta.text, nl=False)
            sys.stdout.flush()
    except KeyboardInterrupt:
        pass  # stop this answer, keep the conversation
    typer.echo()
    messages.append({"role": "assistant", "content": "".join(pieces)})
