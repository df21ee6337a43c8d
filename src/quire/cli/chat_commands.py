"""The lines of an interactive chat: editing, history, several lines in one message, and commands that begin with a
slash. Ctrl-C ends an answer or clears the line, Ctrl-D leaves, as in Ollama.

Knows: readline, if Python has it. Refuses to know: how answers are made.
"""

from __future__ import annotations

import contextlib
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import typer

from quire.assets import cache_dir
from quire.cli.chat_session import PARAMETERS, ChatSession
from quire.types.errors import QuireError

HISTORY_LINES = 1000
LOOK_FOR_INTERRUPTS_S = 0.2
QUOTES = '"""'
HELP = f"""\
/set NAME VALUE     change a parameter: {", ".join(PARAMETERS[:3])} and others
/set verbose|quiet  show tokens and speed after each answer, or not
/set markdown|plain how answers are shown
/set think|nothink  whether a model that can think should
/show               the model, parameters and system message
/system TEXT        set the system message; without TEXT, show it
/regenerate         answer the last question again
/save FILE, /load FILE   keep a conversation, go on with one
/clear              start over
/exit, /bye         leave (also Ctrl-D)
{QUOTES}                 begin a message of several lines, and end it
Ctrl-C stops an answer; the arrows edit lines and bring back earlier ones."""


class Exit(Exception):
    """The user wants to leave."""


def chat(session: ChatSession) -> None:
    """Read lines and answer them until the user leaves."""
    info = session.llm.info
    typer.secho(f"{info.model} on {info.device}. /help lists commands, Ctrl-D leaves.", dim=True)
    with _history():
        while True:
            try:
                if message := _read_message():
                    _take(session, message)
            except KeyboardInterrupt:
                typer.echo("\nUse Ctrl-D or /exit to leave.")
            except (EOFError, Exit):
                typer.echo()
                return
            except QuireError as error:
                typer.secho(f"error: {error}", fg=typer.colors.RED, err=True)
            except OSError as error:
                typer.secho(f"error: {error.strerror or error}", fg=typer.colors.RED, err=True)


def _read_message() -> str:
    """One line, or what stands between two marks of three quotes."""
    line = read_line(">>> ")
    if not line.lstrip().startswith(QUOTES):
        return line.strip()
    lines = [line.lstrip().removeprefix(QUOTES)]
    while not lines[-1].rstrip().endswith(QUOTES):
        lines.append(read_line("... "))
    lines[-1] = lines[-1].rstrip().removesuffix(QUOTES)
    return "\n".join(lines).strip()


def read_line(prompt: str) -> str:
    """A line of a terminal, in which a Ctrl-C is always seen. Python's readline looks for one only when its wait for a
    key is interrupted: one that came while it dealt with the key before, or that the system gave to another thread,
    would wait for the next. So the wait is interrupted now and then."""
    if sys.stdin is None or not sys.stdin.isatty():
        return input(prompt)
    handler = signal.signal(signal.SIGALRM, lambda number, frame: None)
    timer = signal.setitimer(signal.ITIMER_REAL, LOOK_FOR_INTERRUPTS_S, LOOK_FOR_INTERRUPTS_S)
    try:
        return input(prompt)
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)


def _take(session: ChatSession, message: str) -> None:
    if not message.startswith("/"):
        session.ask(message)
        return
    name, _, rest = message[1:].partition(" ")
    command = COMMANDS.get(name)
    if command is None:
        typer.echo(f"there is no command /{name}; /help lists those there are")
        return
    command(session, rest.strip())


def _set(session: ChatSession, rest: str) -> None:
    try:
        words = shlex.split(rest)
    except ValueError:
        words = rest.split()
    words = words[1:] if words[:1] == ["parameter"] else words  # as Ollama has it
    switches: dict[str, tuple[str, bool]] = {
        "verbose": ("verbose", True), "quiet": ("verbose", False), "markdown": ("markdown", True),
        "plain": ("markdown", False), "think": ("thoughts", True), "nothink": ("thoughts", False),
    }  # fmt: skip
    match words:
        case [switch] if switch in switches:
            setattr(session, *switches[switch])
        case ["system", *text] if text:
            session.system = " ".join(text)
        case [name, value]:
            session.set(name, value)
            typer.secho(f"{name} is {value}", dim=True)
        case _:
            typer.echo(f"usage: /set NAME VALUE ({', '.join(PARAMETERS)}), or /set {'|'.join(switches)}")


def _show(session: ChatSession, rest: str) -> None:
    info = session.llm.info
    typer.echo(f"model       {info.model}, context {info.max_model_len:,}, on {info.device}, {info.dtype}")
    typer.echo("parameters  " + ", ".join(f"{name} {value}" for name, value in session.parameters().items()))
    typer.echo(f"system      {session.system or '(none)'}")
    typer.echo(f"messages    {len(session.messages)}")


def _system(session: ChatSession, rest: str) -> None:
    session.system = rest or session.system
    typer.secho(f"system: {session.system or '(none)'}", dim=True)


def _clear(session: ChatSession, rest: str) -> None:
    session.messages.clear()
    typer.secho("a new conversation", dim=True)


def _keep(session: ChatSession, rest: str) -> None:
    path = _named(rest)
    session.save(path)
    typer.secho(f"{len(session.messages)} messages are in {path}", dim=True)


def _load(session: ChatSession, rest: str) -> None:
    session.load(_named(rest))
    typer.secho(f"{len(session.messages)} messages", dim=True)


def _named(rest: str) -> Path:
    if not rest:
        raise QuireError("name a file, as in /save talk.json")
    return Path(rest).expanduser()


def _exit(session: ChatSession, rest: str) -> None:
    raise Exit


COMMANDS: dict[str, Callable[[ChatSession, str], None]] = {
    "help": lambda session, rest: typer.echo(HELP),
    "?": lambda session, rest: typer.echo(HELP),
    "set": _set,
    "show": _show,
    "system": _system,
    "regenerate": lambda session, rest: session.regenerate(),
    "save": _keep,
    "load": _load,
    "clear": _clear,
    "reset": _clear,
    "exit": _exit,
    "bye": _exit,
}


@contextlib.contextmanager
def _history() -> Iterator[None]:
    """Lines of earlier chats come back by the arrows; those of this one are kept. Tab completes commands."""
    try:
        import readline
    except ImportError:  # a Python without it: lines are edited as the terminal does
        yield
        return
    path = cache_dir() / "history"
    with contextlib.suppress(OSError):
        readline.read_history_file(path)
    readline.set_history_length(HISTORY_LINES)
    readline.set_completer_delims(" ")
    readline.set_completer(_complete)
    readline.parse_and_bind("tab: complete")
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)
            readline.write_history_file(path)


def _complete(text: str, state: int) -> str | None:
    fitting = [f"/{name} " for name in COMMANDS if f"/{name}".startswith(text)] if text.startswith("/") else []
    return fitting[state] if state < len(fitting) else None
