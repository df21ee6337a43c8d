"""Structural tags: free text in which certain beginnings bind what follows, as in vLLM and XGrammar.

    {"type": "structural_tag", "triggers": ["<f="], "structures": [{"begin": "<f=x>", "schema": {...}, "end": "</f>"}]}
    {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": [...], "tags": [...]}}

Refuses to know: how a grammar is enforced.
"""

from __future__ import annotations

import json
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

    def _format(self, format: dict[str, Any], depth: int) -> str:
        if depth == 0:
            raise _refusal("it is nested too deeply", self._param)
        kind = format["type"]
        if kind == "json_schema":
            return self._rule("%json " + json.dumps({CLOSED: True} | format["json_schema"]))
        if kind == "const_string":
            return _quoted(format["value"])
        if kind == "regex":
            return self._rule("/" + format["pattern"].replace("/", "\\/") + "/", terminal=True)
        if kind == "any_text":
            return self._rule(ANY, terminal=True)
        if kind == "tag":
            return self._tag(format, format["begin"], depth)
        if kind in ("sequence", "or"):
            parts = [self._format(one, depth - 1) for one in format["elements"]]
            return self._rule((" " if kind == "sequence" else " | ").join(parts) or '""')
        if kind == "tags_with_separator":
            one = "(" + " | ".join(self._tag(tag, tag["begin"], depth) for tag in format["tags"]) + ")"
            more = "" if format.get("stop_after_first") else f" ({_quoted(format['separator'])} {one})*"
            return self._rule(one + more if format.get("at_least_one") else f"({one}{more})?")
        if kind == "triggered_tags":
            return self._triggered(format, depth)
        raise _refusal(f"there is no format {kind!r}", self._param)

    def _tag(self, tag: dict[str, Any], begin: str, depth: int) -> str:
        content = self._format(tag["content"], depth - 1)
        end = tag["end"]
        ends = end if isinstance(end, list) else [end]
        return self._rule(f"{_quoted(begin)} {content} ({' | '.join(map(_quoted, ends))})")

    def _triggered(self, format: dict[str, Any], depth: int) -> str:
        """Text without a trigger, tags that begin with one."""
        triggers = format["triggers"]
        if not triggers or not all(isinstance(one, str) and one for one in triggers):
            raise _refusal("it needs triggers, none of them empty", self._param)
        words = " | ".join(map(_quoted, triggers))
        text = self._rule(f"{ANY} & ~({ANY} ({words}) {ANY})", terminal=True)
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
        if format.get("stop_after_first"):
            return self._rule(one if format.get("at_least_one") else f"{one} | {text}")
        return self._rule(f"{one}{'+' if format.get('at_least_one') else '*'} {text}?")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
