"""Command-line flags derived from the option dataclasses: declared once in types.config, never repeated here."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, get_type_hints

import typer

from quire.types import config
from quire.types.config import EngineOptions, flat_fields


def with_engine_options(*, positional_model: bool = True) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command every engine option; it receives them as one `engine: EngineOptions`."""

    def wrap(command: Callable[..., Any]) -> Callable[..., Any]:
        own = [p for p in inspect.signature(command).parameters.values() if p.name != "engine"]
        hints = get_type_hints(command, include_extras=True)
        own = [p.replace(annotation=hints[p.name]) for p in own]
        derived = [_parameter(f, positional_model) for f in flat_fields()]
        names = [p.name for p in derived]

        @functools.wraps(command)
        def call(**kwargs: Any) -> Any:
            options = {name: kwargs.pop(name) for name in names}
            return command(engine=EngineOptions.of(**options), **kwargs)

        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*derived, *own)]
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        call.__annotations__ = {p.name: p.annotation for p in parameters}
        return call

    return wrap


def _parameter(field: Any, positional_model: bool) -> inspect.Parameter:
    owner = next(
        kind
        for kind in (config.ModelOptions, config.DeviceOptions, config.CacheOptions, config.SchedulerOptions)
        if field.name in kind.__dataclass_fields__
    )
    annotation = get_type_hints(owner)[field.name]
    marker: Any
    if positional_model and field.metadata.get("positional"):
        marker = typer.Argument(help=field.metadata["help"])
    else:
        panel = (owner.__doc__ or "").strip().rstrip(".")
        shown = field.default is not None
        marker = typer.Option(help=field.metadata["help"], rich_help_panel=panel, show_default=shown)
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=Annotated[annotation, marker]
    )
