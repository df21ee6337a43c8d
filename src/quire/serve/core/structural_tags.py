"""Structural tags: free text in which certain beginnings bind what follows, as in vLLM and XGrammar.

    {"type": "structural_tag", "triggers": ["<f="], "structures": [{"begin": "<f=x>", "schema": {...}, "end": "</f>"}]}
    {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": [...], "tags": [...]}}

Refuses to know: how a grammar is enforced.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from quire.types.errors import InputError
from quire.types.grammar import CLOSED, GrammarSpec

ANY = r"/(.|\n)*/"
MAX_DEPTH = 32


def structural_tag(given: Any, param: str) -> GrammarSpec:
    """As a grammar; `given` is the object, or its JSON."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            raise _refusal("it is no JSON", param) from None
    try:
        return GrammarSpec("lark", _Writer(param).whole(given))
    except (KeyError, TypeError, AttributeError) as error:
        raise _refusal(f"something in it is missing, or of the wrong type ({error})", param) from None


def _refusal(reason: str, param: str) -> InputError:
    return InputError(f"the structural tag cannot be used: {reason}", param=param, code="invalid_grammar")


class _Writer:
    def __init__(self, param: str):
        self._param = param
        self._rules: list[str] = []

    def whole(self, given: dict[str, Any]) -> str:
        format = given.get("format")
        if format is None:
            tags = [
                {
                    "begin": one["begin"],
                    "end": one["end"],
                    "content": {"type": "json_schema", "json_schema": one["schema"]},
                }
                for one in given["structures"]
            ]
            format = {"type": "triggered_tags", "triggers": given["triggers"], "tags": tags}
        start = self._format(format, MAX_DEPTH)
        return "\n".join([f"start: {start}", *self._rules])

    def _rule(self, body: str, *, terminal: bool = False, options: str = "") -> str:
        name = f"{'T' if terminal else 't'}{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}")
        return name

    def _format(self, format: dict[str, Any], depth: int, ends: Sequence[str] = ()) -> str:
        """A rule for the format and, where a tag is around it, for one of the ends of that: a text of any length goes
        as far as the first of them."""
        if depth == 0:
            raise _refusal("it is nested too deeply", self._param)
        kind = format["type"]
        if kind == "any_text":
            return self._text(ends, format.get("excludes") or ())
        if kind == "triggered_tags":
            return self._triggered(format, depth, ends)
        if kind == "sequence" and format["elements"]:
            *parts, last = format["elements"]
            return self._rule(
                " ".join([*(self._format(one, depth - 1) for one in parts), self._format(last, depth - 1, ends)])
            )
        if kind == "or" and format["elements"]:
            return self._rule(" | ".join(self._format(one, depth - 1, ends) for one in format["elements"]))
        found = self._bounded(format, kind, depth)
        return self._rule(f"{found} {_any_of(ends)}") if ends else found

    def _bounded(self, format: dict[str, Any], kind: str, depth: int) -> str:
        """What ends by itself."""
        if kind == "json_schema":
            schema = format["json_schema"]
            schema = {} if schema is True else {"not": {}} if schema is False else schema
            return self._rule("%json " + json.dumps({CLOSED: True} | schema))
        if kind == "const_string":
            return _quoted(format["value"])
        if kind == "regex":
            return self._rule(_pattern(format["pattern"]), terminal=True)
        if kind == "tag":
            return self._tag(format, format["begin"], depth)
        if kind in ("sequence", "or"):
            return '""'
        if kind == "tags_with_separator":
            one = "(" + " | ".join(self._tag(tag, tag["begin"], depth) for tag in format["tags"]) + ")"
            more = "" if format.get("stop_after_first") else f" ({_quoted(format['separator'])} {one})*"
            return self._rule(one + more if format.get("at_least_one") else f"({one}{more})?")
        raise _refusal(f"there is no format {kind!r}", self._param)

    def _tag(self, tag: dict[str, Any], begin: str, depth: int) -> str:
        end = tag["end"]
        ends = end if isinstance(end, list) else [end]
        return self._rule(f"{_quoted(begin)} {self._format(tag['content'], depth - 1, ends if all(ends) else ())}")

    def _text(self, ends: Sequence[str], without: Sequence[str]) -> str:
        """Any text but such that has one of some words in it; with ends, up to the first of these."""
        text = f"{ANY} & ~({ANY} {_any_of(without)} {ANY})" if without else ANY
        if not ends:
            return self._rule(text, terminal=True)
        return self._rule(f"{self._rule(text, terminal=True)} {_any_of(ends)}", options="[lazy]")

    def _triggered(self, format: dict[str, Any], depth: int, ends: Sequence[str]) -> str:
        """Text without a trigger, tags that begin with one."""
        triggers, excludes = format["triggers"], format.get("excludes") or []
        if not triggers or not all(isinstance(one, str) and one for one in triggers):
            raise _refusal("it needs triggers, none of them empty", self._param)
        text = self._text((), [*triggers, *excludes, *ends])
        opened = []
        for trigger in triggers:
            tags = [tag for tag in format["tags"] if tag["begin"].startswith(trigger)]
            rest = [self._tag(tag, tag["begin"][len(trigger) :], depth) for tag in tags]
            if rest:
                before = self._rule(f"{text} {_quoted(trigger)}", options="[lazy]")
                opened.append(self._rule(f"{before} ({' | '.join(rest)})"))
        if any(not any(tag["begin"].startswith(one) for one in triggers) for tag in format["tags"]) or not opened:
            raise _refusal("every tag must begin with a trigger", self._param)
        one = f"({' | '.join(opened)})"
        after = self._text(ends, [*triggers, *excludes]) if ends else f"{text}?"
        if format.get("stop_after_first"):
            end = f" {_any_of(ends)}" if ends else ""
            return self._rule(one + end if format.get("at_least_one") else f"{one}{end} | {after}")
        return self._rule(f"{one}{'+' if format.get('at_least_one') else '*'} {after}")


def _any_of(words: Sequence[str]) -> str:
    return f"({' | '.join(map(_quoted, words))})"


def _pattern(pattern: str) -> str:
    """Between slashes: those within it escaped, as some are already."""
    return (
        "/" + re.sub(r"(\\.)|/", lambda found: found[1] or "\\/", pattern, flags=re.DOTALL).replace("\n", "\\n") + "/"
    )


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
