"""Tools whose input is plain text, over models that write calls as JSON: the text out of `{"input": "..."}` as it
comes, and answers that are nothing but such an input.

Refuses to know: requests, formats of calls.
"""

from __future__ import annotations

import json
import re

from quire.text.segments import CallArguments, CallBegun, Segment

INPUT = "input"  # the one argument of such a tool

_BEGIN = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_UNITS = re.compile(r'(?:[^"\\]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*')
_HALF = re.compile(r"(?:^|[^\\])(?:\\\\)*(\\u[dD][89abAB][0-9a-fA-F]{2})$")  # of a surrogate pair


class TextInput:
    """The value of the one argument, read from the pieces of a call's JSON."""

    def __init__(self) -> None:
        self._held = ""
        self._begun = self._over = False

    def push(self, piece: str) -> str:
        """The characters that are certain now."""
        if self._over:
            return ""
        self._held += piece
        if not self._begun:
            begin = _BEGIN.match(self._held)
            if begin is None:
                return ""
            self._begun, self._held = True, self._held[begin.end() :]
        match = _UNITS.match(self._held)
        assert match is not None
        whole = match[0]
        if not self._held.startswith('"', len(whole)) and (half := _HALF.search(whole)):
            whole = whole[: half.start(1)]
        self._held = self._held[len(whole) :]
        self._over = self._held.startswith('"')
        text = str(json.loads(f'"{whole}"', strict=False))
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def input_of(arguments: str) -> str:
    """The same of a whole call; a call that has no such argument is its own input."""
    reader = TextInput()
    text = reader.push(arguments)
    return text if reader._begun else arguments


class TextCallReader:
    """Reads an answer that a grammar has made the input of one tool, as a call of it."""

    def __init__(self, name: str):
        self._name = name
        self._begun = False

    def push(self, text: str) -> list[Segment]:
        out: list[Segment] = []
        if not self._begun:
            self._begun = True
            out = [CallBegun(0, self._name), CallArguments(0, '{"input": "')]
        return [*out, CallArguments(0, json.dumps(text, ensure_ascii=False)[1:-1])] if text else out

    def end(self) -> list[Segment]:
        return [*self.push(""), CallArguments(0, '"}')]
