"""run: one answer, or an interactive chat, streamed to the terminal."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from quire.assets import on_hub, present, resolve
from quire.cli.model_report import fetch
from quire.cli.options import EngineCommand, with_engine_options
from quire.types.config import EngineOptions
from quire.types.errors import InputError
from quire.types.sampling_params import SamplingParams

EXAMPLES = """
Examples:

quire run qwen3:8b

quire run qwen3:8b "Why is the sky blue?" --verbose

cat notes.txt | quire run qwen3:8b "Summarise this."
"""


def register(app: typer.Typer) -> None:
    app.command(name="run", cls=EngineCommand, epilog=EXAMPLES)(with_engine_options(split_help=True)(run))


def run(
    *,
    engine: EngineOptions,
    prompt: Annotated[
        str | None, typer.Argument(help="question to answer, behind piped text if there is any; else a chat")
    ] = None,
    system: Annotated[str | None, typer.Option(help="system message")] = None,
    max_tokens: Annotated[int, typer.Option(help="longest answer, in tokens")] = 512,
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 0.7,
    top_p: Annotated[float, typer.Option(help="nucleus sampling")] = 0.95,
    seed: Annotated[int | None, typer.Option(help="make sampling repeatable")] = None,
    verbose: Annotated[bool, typer.Option(help="show tokens and speed after each answer")] = False,
    markdown: Annotated[bool, typer.Option(help="on a terminal, show Markdown as such")] = True,
) -> None:
    """Chat with a model in the terminal."""
    params = SamplingParams(temperature=temperature, top_p=top_p, max_tokens=max_tokens, seed=seed)
    piped = "" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.read()
    question = "\n\n".join(part for part in (piped.strip(), prompt) if part)
    try:
        (question + (system or "")).encode()
    except UnicodeEncodeError:
        raise InputError("the question is not valid UTF-8") from None
    if not question and not sys.stdin.isatty():
        if present(engine.model.model) is None and not on_hub(engine.model.model):
            resolve(engine.model.model)  # a question where a model belongs, perhaps: says so
        raise InputError("there is no question: none was given, and standard input is empty")

    from quire.cli.chat_commands import chat
    from quire.cli.chat_session import ChatSession
    from quire.engine.llm import LLM

    if present(engine.model.model) is None:
        fetch(engine)
    flat = engine.flat()
    with LLM(flat.pop("model", engine.model.model), progress=True, **flat) as llm:
        session = ChatSession(llm, params, system=system or "", verbose=verbose, markdown=markdown)
        if question:
            session.ask(question)
        else:
            chat(session)
