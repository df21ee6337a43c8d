"""Command-line flags derived from the option dataclasses: declared once in types.config, never repeated here. And those
that several measurements have."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand

from quire.types.autoscaling import AutoscaleOptions
from quire.types.config import CONCERNS, EngineOptions, SchedulerOptions, flat_fields
from quire.types.errors import ConfigError
from quire.types.option_names import COUNTERPARTS, unknown_option
from quire.types.serving import ServeOptions


def writable_path(path: Path | None) -> Path | None:
    """A file to write, whose folder is looked for before anything is measured."""
    if path is not None and not path.parent.is_dir():
        raise ConfigError(f"cannot write {path}: there is no folder {path.parent}")
    if path is not None and path.is_dir():
        raise ConfigError(f"cannot write {path}: it is a folder")
    return path


JsonOption = Annotated[Path | None, typer.Option("--json", help="write all figures here", callback=writable_path)]
HtmlOption = Annotated[
    Path | None, typer.Option("--html", help="write a page with tables and charts here", callback=writable_path)
]
PlotOption = Annotated[Path | None, typer.Option("--plot", help="write charts here, as SVG", callback=writable_path)]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON, for programs")]
RoundsOption = Annotated[int, typer.Option(min=1, help="measured runs; medians count")]
InOption = Annotated[int, typer.Option("--in", min=1, help="input tokens per request (fixed, shared_prefix)")]
OutOption = Annotated[int, typer.Option(min=1, help="output tokens per request (fixed, shared_prefix)")]
PrefixOption = Annotated[int, typer.Option(min=0, help="shared tokens before each input (shared_prefix)")]


def with_engine_options(
    *, positional_model: bool = True, split_help: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command every engine option; it receives them as one `engine: EngineOptions`. `split_help`: `--help` shows
    those that most people need, `--help-all` all."""
    derived = [
        _parameter(next(o for o in CONCERNS if f.name in o.__dataclass_fields__), f, positional_model, split_help)
        for f in flat_fields()
    ]
    if split_help:
        derived.append(HELP_ALL)
    return _with(derived, "engine", lambda options: EngineOptions.of(**options))


class EngineCommand(TyperCommand):
    """A command that knows what other engines call its options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        flags = {flag for parameter in self.params for flag in (*parameter.opts, *parameter.secondary_opts)}
        for flag in (arg.partition("=")[0] for arg in args if arg.startswith("--")):
            word = flag.removeprefix("--").replace("-", "_")
            if flag not in flags and word in COUNTERPARTS:
                raise ConfigError(unknown_option(word, ()))
        return super().parse_args(ctx, args)


def _help_all(ctx: typer.Context, wanted: bool) -> None:
    if wanted:
        for parameter in ctx.command.params:
            parameter.hidden = False  # type: ignore[attr-defined]
        typer.echo(ctx.get_help())
        raise typer.Exit


HELP_ALL = inspect.Parameter(
    "help_all",
    inspect.Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[
        bool, typer.Option("--help-all", callback=_help_all, is_eager=True, help="show all options and exit")
    ],
)


def with_scheduler_options(**defaults: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command the scheduler's options, some with other `defaults`; it receives them as one `scheduling:
    SchedulerOptions`."""
    derived = [
        _parameter(SchedulerOptions, f, False).replace(default=defaults.get(f.name, f.default))
        for f in dataclasses.fields(SchedulerOptions)
    ]
    return _with(derived, "scheduling", lambda options: SchedulerOptions(**options))


def with_autoscale_options() -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command the options of autoscaling; it receives them as one `autoscaling: AutoscaleOptions`."""
    derived = [_parameter(AutoscaleOptions, f, False) for f in dataclasses.fields(AutoscaleOptions)]
    return _with(derived, "autoscaling", lambda options: AutoscaleOptions(**options))


def with_serve_options() -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command every option of a server; it receives them as one `serving: ServeOptions`."""
    derived = [_parameter(ServeOptions, f, False, True) for f in dataclasses.fields(ServeOptions)]
    return _with(derived, "serving", lambda options: ServeOptions(**options))


def _with(
    derived: list[inspect.Parameter], argument: str, build: Callable[[dict[str, Any]], Any]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Replace a command's `argument` by the flags it is built from."""

    def wrap(command: Callable[..., Any]) -> Callable[..., Any]:
        own = [p for p in inspect.signature(command).parameters.values() if p.name != argument]
        hints = get_type_hints(command, include_extras=True)
        own = [p.replace(annotation=hints[p.name]) for p in own]
        names = [p.name for p in derived]

        @functools.wraps(command)
        def call(**kwargs: Any) -> Any:
            options = {name: kwargs.pop(name) for name in names}
            options.pop(HELP_ALL.name, None)
            return command(**{argument: build(options)}, **kwargs)

        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*derived, *own)]
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        call.__annotations__ = {p.name: p.annotation for p in parameters}
        return call

    return wrap


def _parameter(owner: Any, field: Any, positional_model: bool, split_help: bool = False) -> inspect.Parameter:
    annotation = get_type_hints(owner)[field.name]
    marker: Any
    if positional_model and field.metadata.get("positional"):
        marker = typer.Argument(help=field.metadata["help"])
    else:
        panel = (owner.__doc__ or "").strip().rstrip(".")
        shown = field.default is not None
        flag = "--" + field.name.replace("_", "-")
        names = [flag, field.metadata["alias"]] if field.metadata["alias"] else []
        hidden = split_help and not field.metadata["common"]
        help = field.metadata["help"].replace("[", r"\[")  # quire[ray] is no markup
        marker = typer.Option(*names, help=help, rich_help_panel=panel, show_default=shown, hidden=hidden)
        if annotation == tuple[str, ...]:
            annotation = list[str]
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=Annotated[annotation, marker]
    )
