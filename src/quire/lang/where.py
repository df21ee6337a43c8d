"""What a hole may be filled with, as constraints that combine: `StartsWith("I") & Length(max=60) & ~Contains("bad")`.

Every constraint is a set of texts, described by regular expressions and `&`, `|`, `~` between them; it compiles to one
grammar, and can also tell in plain Python whether a text belongs to it. Refuses to know: tokens, engines, prompts.
"""

from __future__ import annotations

import json
import re
from typing import Any

from quire.types.errors import InputError
from quire.types.grammar import GrammarSpec

ANYTHING = "(?s:.*)"
MAX_DIGITS = 18


class Where:
    """A set of texts. Subclasses say how a grammar writes it, and whether a text is in it."""

    def expression(self) -> str:
        """As a terminal of a Lark grammar."""
        raise NotImplementedError

    def holds(self, text: str) -> bool:
        raise NotImplementedError

    def value(self, text: str) -> Any:
        """What the text stands for."""
        return text

    def grammar(self) -> GrammarSpec:
        return GrammarSpec("lark", f"start: ANSWER\nANSWER: {self.expression()}\n")

    def __and__(self, other: Where) -> Where:
        return _Both(self, other)

    def __or__(self, other: Where) -> Where:
        return _Either(self, other)

    def __invert__(self) -> Where:
        return _Not(self)


class Regex(Where):
    """Texts that match a regular expression as a whole."""

    def __init__(self, pattern: str):
        try:
            self._compiled = re.compile(pattern)
        except re.error as error:
            raise InputError(f"the pattern {pattern!r} is no regular expression: {error}", param="where") from error
        self.pattern = pattern

    def expression(self) -> str:
        slashes = re.sub(r"(\\.)|/", lambda match: match[1] or r"\/", self.pattern, flags=re.DOTALL)
        return "/" + slashes.replace("\n", r"\n") + "/"

    def holds(self, text: str) -> bool:
        return self._compiled.fullmatch(text) is not None

    def grammar(self) -> GrammarSpec:
        return GrammarSpec("regex", self.pattern)


class OneOf(Regex):
    """One of a few texts."""

    def __init__(self, *options: str):
        if not options or not all(options):
            raise InputError("OneOf needs at least one option, and none that is empty", param="where")
        self.options = options
        super().__init__("|".join(map(_literal, options)))

    def grammar(self) -> GrammarSpec:
        return GrammarSpec("choice", json.dumps(self.options))


class Int(Regex):
    """A whole number in decimal, within bounds if they are given. Its value is an `int`."""

    def __init__(self, low: int | None = None, high: int | None = None):
        if low is not None and high is not None and low > high:
            raise InputError(f"Int({low}, {high}) holds no number: the first bound is the lower one", param="where")
        limit = 10**MAX_DIGITS - 1
        low, high = -limit if low is None else low, limit if high is None else high
        if max(-low, high) > limit:
            raise InputError(f"Int takes bounds of at most {MAX_DIGITS} digits", param="where")
        parts = []
        if low < 0:
            parts.append(f"-({_naturals(max(1, -high), -low)})")
        if high >= 0:
            parts.append(_naturals(max(0, low), high))
        super().__init__("|".join(parts))

    def value(self, text: str) -> int:
        return int(text)


class Length(Regex):
    """Texts of so many characters."""

    def __init__(self, min: int = 0, max: int = 1000):
        super().__init__(f"(?s:.{{{_count(min, max)}}})")


class Words(Regex):
    """Texts of so many words, with single spaces between them."""

    def __init__(self, min: int = 1, max: int = 100):
        _count(min, max)
        super().__init__(rf"\S+( \S+){{{min - 1},{max - 1}}}" if min > 0 else rf"(\S+( \S+){{0,{max - 1}}})?")


class StartsWith(Regex):
    def __init__(self, text: str):
        super().__init__(_literal(text) + ANYTHING)


class EndsWith(Regex):
    def __init__(self, text: str):
        super().__init__(ANYTHING + _literal(text))


class Contains(Regex):
    def __init__(self, text: str):
        super().__init__(ANYTHING + _literal(text) + ANYTHING)


def StopsAt(text: str) -> Where:
    """Texts that end where `text` first occurs, with it."""
    return EndsWith(text) & ~Regex(ANYTHING + _literal(text) + "(?s:.+)")


class _Both(Where):
    def __init__(self, *parts: Where):
        self._parts = parts

    def expression(self) -> str:
        return "(" + " & ".join(part.expression() for part in self._parts) + ")"

    def holds(self, text: str) -> bool:
        return all(part.holds(text) for part in self._parts)

    def value(self, text: str) -> Any:
        return next((value for part in self._parts if (value := part.value(text)) is not text), text)


class _Either(Where):
    def __init__(self, *parts: Where):
        self._parts = parts

    def expression(self) -> str:
        return "(" + " | ".join(part.expression() for part in self._parts) + ")"

    def holds(self, text: str) -> bool:
        return any(part.holds(text) for part in self._parts)

    def value(self, text: str) -> Any:
        return next((part.value(text) for part in self._parts if part.holds(text)), text)


class _Not(Where):
    def __init__(self, part: Where):
        self._part = part

    def expression(self) -> str:
        return f"~({self._part.expression()})"

    def holds(self, text: str) -> bool:
        return not self._part.holds(text)


def where_of(given: Where | str) -> Where:
    """A bare text is a regular expression."""
    return Regex(given) if isinstance(given, str) else given


def _literal(text: str) -> str:
    """A pattern for exactly this text, in the syntax that Python's and Rust's expressions share."""
    return re.sub(r"[\\.+*?()|\[\]{}^$#&~-]", r"\\\g<0>", text).replace("\n", r"\n").replace("\t", r"\t")


def _count(least: int, most: int) -> str:
    if not 0 <= least <= most:
        raise InputError(f"between {least} and {most} there is no count; give 0 <= min <= max", param="where")
    return f"{least},{most}"


def _naturals(low: int, high: int) -> str:
    """A pattern for the whole numbers from low to high, neither of them negative, without leading zeros."""
    parts = []
    while low <= high:
        top = min(high, 10 ** len(str(low)) - 1)  # the last number with as many digits
        parts.append(_digits(str(low), str(top)))
        low = top + 1
    return "|".join(parts)


def _digits(low: str, high: str) -> str:
    """A pattern for the strings of digits from low to high, which are equally long."""
    if not low:
        return ""
    rest = len(low) - 1
    first, last = int(low[0]), int(high[0])
    if first == last:
        return low[0] + _digits(low[1:], high[1:])
    parts = []
    if low[1:] != "0" * rest:
        parts.append(low[0] + _digits(low[1:], "9" * rest))
        first += 1
    if high[1:] != "9" * rest:
        parts.append(high[0] + _digits("0" * rest, high[1:]))
        last -= 1
    if first <= last:
        parts.append(f"[{first}-{last}]" + (f"[0-9]{{{rest}}}" if rest else ""))
    return "(" + "|".join(parts) + ")"
