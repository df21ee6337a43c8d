"""Options that check themselves when they are given: each is a dataclass field that declares what it takes, and pairs
that would have no effect are a table.

Refuses to know: which options there are, what the machine has.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import NoneType
from typing import Any, get_args, get_type_hints

from quire.types.errors import ConfigError

_WORDS = {bool: "true or false", int: "a whole number", float: "a finite number", str: "text"}
_UNITS = {"": 1, "B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(frozen=True)
class Takes:
    """What an option takes, beside its type."""

    low: float | None = None
    above: float | None = None
    high: float | None = None
    forms: tuple[str, ...] = ()  # words in capitals stand for something: cuda:N, draft:MODEL
    size: bool = False  # bytes, such as 512M
    sized: bool = False  # NAME or NAME:SIZE

    def problem(self, value: Any) -> str:
        """Why it does not take a value of the right type; nothing if it does."""
        if isinstance(value, str):
            return self._unread(value)
        if self.above is not None and not value > self.above:
            return f"must be more than {self.above:g}"
        if self.low is not None and self.high is not None and not self.low <= value <= self.high:
            return f"must be from {self.low:g} to {self.high:g}"
        if self.low is not None and not value >= self.low:
            return f"must be at least {self.low:g}" if self.low else "must not be negative"
        return f"must be at most {self.high:g}" if self.high is not None and value > self.high else ""

    def _unread(self, text: str) -> str:
        if not text:
            return "must not be empty"
        if self.forms and not any(re.fullmatch(_pattern(form), text) for form in self.forms):
            return f"must be one of {', '.join(self.forms)}"
        try:
            if self.size or (self.sized and (text := named_size(text)[1])):
                parse_size(text)
        except ConfigError:
            return "must be a size above 0 like 512M or 8G"
        return ""


@cache
def _pattern(form: str) -> str:
    return re.sub(r"[A-Z]+", lambda word: r"\d+" if word[0] == "N" else ".+", re.escape(form))


def option(
    default: Any, help: str, *, positional: bool = False, alias: str = "", common: bool = False, **takes: Any
) -> Any:
    """A field of an options dataclass; `alias`: another name of its flag; `common`: among those that most people need;
    `takes` as for `Takes`."""
    said = {"help": help, "positional": positional, "alias": alias, "common": common, "takes": Takes(**takes)}
    return dataclasses.field(default=default, metadata=said)


class Checked:
    """Base of options dataclasses: every value is of its field's type and what the field takes, or refused by name."""

    def __post_init__(self) -> None:
        options: Any = type(self)
        for name, kinds, _ in _declared(options):
            if Ellipsis in kinds:  # of lists too, as JSON and command lines have them, and of one alone
                given = getattr(self, name)
                object.__setattr__(self, name, tuple(given) if isinstance(given, (list, tuple)) else (given,))
        for name, kinds, takes in _declared(options):
            value = getattr(self, name)
            if value is None and NoneType in kinds:
                continue
            for one in value if Ellipsis in kinds else (value,):
                problem = takes.problem(one) if _is(one, kinds) else f"must be {_WORDS[kinds[0]]}"
                if problem:
                    raise ConfigError(f"{name} {problem}, got {one!r}")


@cache
def _declared(options: Any) -> tuple[tuple[str, tuple[Any, ...], Takes], ...]:
    hints = get_type_hints(options)
    return tuple(
        (field.name, get_args(hints[field.name]) or (hints[field.name],), field.metadata["takes"])
        for field in dataclasses.fields(options)
    )


def _is(value: Any, kinds: tuple[Any, ...]) -> bool:
    if isinstance(value, bool):
        return bool in kinds
    if float in kinds:
        return isinstance(value, (int, float)) and math.isfinite(value)
    return isinstance(value, tuple(kind for kind in kinds if kind is not Ellipsis))


@dataclass(frozen=True)
class Pair:
    """Where `option` is said (is not its default; with `value`, is that), it has no effect unless one of `needs` is
    said too, or beside another, `excludes`, that is said (with `excluded`, that is that)."""

    option: str
    why: str
    value: Any = None
    needs: tuple[str, ...] = ()
    excludes: str = ""
    excluded: Any = None

    def problem(self, said: Mapping[str, Any]) -> str:
        """Why the option has no effect, given all that are not their defaults; nothing if it has."""
        if not _said(said, self.option, self.value):
            return ""
        if self.needs and not any(name in said for name in self.needs):
            return f"{_shown(self.option, self.value)} has no effect without {' or '.join(self.needs)}: {self.why}"
        if self.excludes and _said(said, self.excludes, self.excluded):
            other = _shown(self.excludes, self.excluded)
            return f"{_shown(self.option, self.value)} has no effect beside {other}: {self.why}"
        return ""


def _said(said: Mapping[str, Any], name: str, value: Any) -> bool:
    return name in said and (value is None or said[name] == value)


def _shown(name: str, value: Any) -> str:
    return name if value is None else f"{name} {value}".replace(" False", " off")


def parse_size(text: str) -> int:
    """'512M' or '8GiB' → bytes."""
    stripped = text.strip().upper().removesuffix("IB").removesuffix("B")
    unit = stripped[-1:] if stripped[-1:].isalpha() else ""
    try:
        value = float(stripped.removesuffix(unit))
        size = int(value * _UNITS[unit])
    except (KeyError, ValueError, OverflowError):
        raise ConfigError(f"cannot read {text!r} as a size; write it like 512M or 8G") from None
    if size <= 0:
        raise ConfigError(f"size must be positive, got {text!r}")
    return size


def named_size(text: str) -> tuple[str, str]:
    """'kv:50G' → its name and its size, if it has one."""
    name, colon, size = text.rpartition(":")
    return (name, size) if colon and "/" not in size else (text, "")
