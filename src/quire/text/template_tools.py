"""The filters and functions chat templates may use: the known ones of jinja2 that cannot grow their input without
bound, the others rewritten with a bound, and what model makers expect beside them (tojson, raise_exception,
strftime_now).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateRuntimeError, pass_environment
from jinja2.defaults import DEFAULT_FILTERS, DEFAULT_NAMESPACE
from jinja2.filters import make_attrgetter
from jinja2.sandbox import SecurityError
from jinja2.utils import Namespace

from quire.text.sandbox import MAX_CHARACTERS, built, check_replace, rounds

MAX_WIDTH = 64  # of an indentation
MAX_FORMAT = 256  # characters of a date format

_AS_THEY_ARE = (
    *("abs", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float", "forceescape"),
    *("groupby", "int", "items", "last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr"),
    *("reverse", "safe", "select", "selectattr", "sort", "string", "title", "trim", "unique", "upper", "wordcount"),
)


def filters() -> dict[str, Any]:
    known = {name: _metered(DEFAULT_FILTERS[name]) for name in _AS_THEY_ARE}
    return known | {"tojson": _tojson, "join": _join, "replace": _replace, "indent": _indent, "round": _round}


def functions() -> dict[str, Any]:
    return {
        "dict": _dict,
        "namespace": _Namespace,
        "cycler": DEFAULT_NAMESPACE["cycler"],
        "joiner": DEFAULT_NAMESPACE["joiner"],
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
    }


def _metered(function: Callable[..., Any]) -> Callable[..., Any]:
    """One of the library's filters with its result weighed."""

    @functools.wraps(function)  # also copies the library's mark for functions that receive the context
    def metered(*args: Any, **kwargs: Any) -> Any:
        return built(function(*args, **kwargs))

    return metered


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """The plain form is about as long as the value. Indentation and separators multiply it, so that text is weighed
    piece by piece."""
    if indent is None and separators is None:
        return str(built(json.dumps(value, ensure_ascii=ensure_ascii, sort_keys=sort_keys)))
    _check_width(indent or 0)
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return _joined(encoder.iterencode(value))


@pass_environment
def _join(environment: Any, value: Any, d: Any = "", attribute: Any = None) -> str:
    items = value if attribute is None else map(make_attrgetter(environment, attribute), value)
    return _joined(map(str, items), str(d))


def _joined(texts: Iterable[str], between: str = "") -> str:
    """One text of many, refused as soon as it is known to be too large."""
    parts: list[str] = []
    size = 0
    for text in rounds(texts):
        parts.append(text)
        size += len(text) + len(between)
        if size > MAX_CHARACTERS:
            raise TemplateRuntimeError("the template joins texts to one that is too large")
    return str(built(between.join(parts)))


def _replace(value: Any, old: Any, new: Any, count: int | None = None) -> str:
    text, old, new = str(value), str(old), str(new)
    check_replace(text, old, new)
    return str(built(text.replace(old, new, -1 if count is None else count)))


def _indent(value: Any, width: Any = 4, first: bool = False, blank: bool = False) -> str:
    _check_width(width)
    check_replace(str(value), "\n", "\n" + " " * MAX_WIDTH)
    return str(built(DEFAULT_FILTERS["indent"](str(value), width, first, blank)))


def _round(value: Any, precision: int = 0, method: Any = "common") -> Any:
    if not isinstance(precision, int) or abs(precision) > 32:
        raise TemplateRuntimeError("round takes a precision of at most 32 digits")
    return built(DEFAULT_FILTERS["round"](value, precision, method))


def _check_width(width: Any) -> None:
    if (len(width) if isinstance(width, str) else width) > MAX_WIDTH:
        raise TemplateRuntimeError(f"an indentation may have at most {MAX_WIDTH} characters")


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


class _Namespace(Namespace):
    """A template's own variables; names with an underscore could reach for Python's."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        for name in dict(*args[1:], **kwargs):
            _plain_name(name)
        Namespace.__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        Namespace.__setitem__(self, _plain_name(name), value)

    def __repr__(self) -> str:
        return "<Namespace>"  # its contents were never weighed together


def _plain_name(name: Any) -> str:
    if not isinstance(name, str) or name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name!r}")
    return name


def _raise_exception(message: Any) -> NoReturn:
    raise TemplateError(str(message))


def _strftime_now(format: str) -> str:
    if len(format) > MAX_FORMAT:
        raise TemplateRuntimeError(f"a date format may have at most {MAX_FORMAT} characters")
    return datetime.now().strftime(format)
