"""Calls of tools in an answer, found while it is being written.

A call is shown as soon as its name is known, its arguments as they come. What looks like a call and is none (no
such tool, no JSON) is text, as it was written. Refuses to know: requests, schemas, what a call does.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Container

from quire.text.segments import CallArguments, CallBegun, Said, Segment, Thought, overlap
from quire.text.tool_formats import ToolFormat

MAX_NAME = 128
_HEAD = re.compile(r"\s*([\w.-]{1,128})\s*(?:\[CALL_ID\]\s*\w{1,64}\s*)?(?:\[ARGS\]\s*)?(?={)")
_ARGUMENTS = ("arguments", "parameters")


class JsonCall:
    """One JSON object that should be a call, as it comes. With `name` given it is the arguments alone."""

    def __init__(self, index: int, names: Container[str], name: str = ""):
        self.raw = ""
        self.done = self.failed = False
        self.begun = bool(name)
        self.index = index
        self._names = names
        self._alone = bool(name)
        self._key = _ARGUMENTS[0] if name else ""
        self._depth = 0
        self._quoted = self._escaped = False
        self._start = 0  # in raw, of the key or value being read
        self._sent = 0  # characters of the arguments that are out
        self._early = ""  # arguments that came before the name

    def push(self, text: str) -> tuple[list[Segment], str]:
        """(what is new, what of `text` lies behind the end of the object)."""
        out: list[Segment] = []
        before = len(self.raw)
        self.raw += text
        for at in range(before, len(self.raw)):
            self._read(self.raw[at], at, out)
            if self.done or self.failed:
                rest, self.raw = self.raw[at + 1 :], self.raw[: at + 1]
                return out, rest
        self._stream(len(self.raw), out)
        return out, ""

    def _read(self, character: str, at: int, out: list[Segment]) -> None:
        if self._quoted:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._quoted = False
        elif character == '"':
            self._quoted = True
        elif character in "{[":
            self._depth += 1
            if self._depth == 1 and not self._alone:
                self._start = at + 1
        elif character in "}]":
            self._depth -= 1
            if self._depth == 0:
                self._close(at, out)
        elif self._depth == 1 and not self._alone and character in ":,":
            if character == ":":
                self._key = str(_loaded(self.raw[self._start : at]))
            else:
                self._value(at, out)
                self._key = ""
            self._start = at + 1

    def _close(self, at: int, out: list[Segment]) -> None:
        if self._alone:
            self._stream(at + 1, out)
        elif self._key:
            self._value(at, out)
        self.done, self.failed = self.begun, not self.begun
        if self.done and not self._sent:
            out.append(CallArguments(self.index, "{}"))

    def _value(self, at: int, out: list[Segment]) -> None:
        """The value of the current key ends before `at`."""
        if self._key == "name" and not self.begun:
            name = _loaded(self.raw[self._start : at])
            self.failed = not isinstance(name, str) or name not in self._names
            self.begun = not self.failed
            if self.begun:
                out.append(CallBegun(self.index, str(name)))
                self._send(self._early, out)
        elif self._key in _ARGUMENTS and not self._sent:
            part = self.raw[self._start : at].strip()
            if part.startswith('"'):  # JSON within a string
                part = str(_loaded(part))
            if self.begun:
                self._send(part, out)
            else:
                self._early = part
        else:
            self._stream(at, out)

    def _stream(self, end: int, out: list[Segment]) -> None:
        """Let out what is new of arguments under way. A string is understood only when complete."""
        if not self.begun or self._key not in _ARGUMENTS:
            return
        while self._start < end and self.raw[self._start].isspace():
            self._start += 1
        if self.raw[self._start : self._start + 1] != '"':
            self._send(self.raw[self._start + self._sent : end].rstrip(), out)

    def _send(self, text: str, out: list[Segment]) -> None:
        if text:
            out.append(CallArguments(self.index, text))
            self._sent += len(text)


class ToolReader:
    """One answer against the names of the tools offered. Without `parallel` only the first call counts."""

    def __init__(self, format: ToolFormat, names: Container[str], parallel: bool = True):
        self.calls = 0
        self._format = format
        self._names = names
        self._parallel = parallel
        self._held = ""
        self._head = ""  # what was read since the text ended, in case it turns out to be text
        self._array = False
        self._call: JsonCall | None = None
        self._step = self._begin if format.bare else self._say

    def push(self, text: str) -> list[Segment]:
        self._held += text
        out: list[Segment] = []
        while self._step(out):
            pass
        return self._wanted(out)

    def end(self) -> list[Segment]:
        """What is left when the answer is over. A call cut short stays as far as it came."""
        out: list[Segment] = []
        if self._step == self._python_call:
            self._finish_python(out)
        elif self._step == self._between:
            pass  # the beginning of a mark
        elif self._call is None:
            out.append(Said(self._head + self._held))
        elif not self._call.begun:
            out.append(Said(self._head + self._call.raw))
        self._held = self._head = ""
        self._call, self._step = None, self._say
        return self._wanted(out)

    def _wanted(self, out: list[Segment]) -> list[Segment]:
        """Without empty texts, and without calls that nobody wants."""
        return [
            segment
            for segment in out
            if (segment.text if isinstance(segment, Said | Thought) else self._parallel or segment.index == 0)
        ]

    # ---- where the reader is; each takes from what is held and says whether there is more to do -----------------

    def _begin(self, out: list[Segment]) -> bool:
        text = self._held.lstrip()
        if not text:
            return False
        self._step = self._open if text[0] in "{[" else self._say
        return True

    def _say(self, out: list[Segment]) -> bool:
        marker = self._format.marker
        text, found, rest = self._held.partition(marker) if marker else (self._held, "", "")
        if found:
            out.append(Said(text.rstrip()))
            self._held, self._head, self._step = rest, marker, self._open
            return True
        # White space before a call belongs to neither.
        safe = text[: len(text) - overlap(text, marker)].rstrip()
        out.append(Said(safe))
        self._held = text[len(safe) :]
        return False

    def _open(self, out: list[Segment]) -> bool:
        text = self._held.lstrip()
        if not text:
            return False
        if text[0] == "[" and not self._array:
            self._array = True
            self._head += self._held[: len(self._held) - len(text) + 1]
            self._held = text[1:]
        elif text[0] == "{":
            self._call, self._step = JsonCall(self.calls, self._names), self._read_call
            self._held = text
        elif self._format.headed and not self._array:
            self._step = self._name_first
        elif self._format.python and not self._array:
            self._step = self._python_call
        else:
            self._give_up(out)
        return True

    def _name_first(self, out: list[Segment]) -> bool:
        if match := _HEAD.match(self._held):
            if match[1] not in self._names:
                self._give_up(out)
                return True
            out.append(CallBegun(self.calls, match[1]))
            self._call, self._step = JsonCall(self.calls, self._names, match[1]), self._read_call
            self._held = self._held[match.end() :]
            return True
        if "{" in self._held or len(self._held) > 2 * MAX_NAME:
            self._give_up(out)
            return True
        return False

    def _read_call(self, out: list[Segment]) -> bool:
        assert self._call is not None
        if not self._held:
            return False
        segments, self._held = self._call.push(self._held)
        out += segments
        if self._call.failed:
            self._head += self._call.raw
            self._give_up(out)
            return True
        if self._call.begun:
            self.calls = self._call.index + 1
            self._head = ""
        if self._call.done:
            self._call, self._step = None, self._between
        return self._call is None

    def _between(self, out: list[Segment]) -> bool:
        """After a call: the end of what began it, another call, or text again."""
        format = self._format
        text = self._held = self._held.lstrip()
        if not text:
            return False
        for mark, step in ((format.close, self._between), (format.marker, self._open)):
            if mark and text.startswith(mark):
                self._held, self._step = text[len(mark) :], step
                self._head = mark if step == self._open else ""
                return True
            if mark and mark.startswith(text):
                return False
        if text[0] in ",;" and (self._array or format.bare):
            self._held, self._step = text[1:], self._between
        elif text[0] == "]" and self._array:
            self._held, self._array = text[1:], False
        elif text[0] == "{" and (self._array or format.bare):
            self._step = self._open
        else:
            self._step, self._array = self._say, False
        return True

    def _python_call(self, out: list[Segment]) -> bool:
        return False  # understood when it is complete

    def _finish_python(self, out: list[Segment]) -> None:
        found = python_call(self._held)
        if found is None or found[0] not in self._names:
            out.append(Said(self._head + self._held))
            return
        out.append(CallBegun(self.calls, found[0]))
        out.append(CallArguments(self.calls, found[1]))
        self.calls += 1

    def _give_up(self, out: list[Segment]) -> None:
        """It was no call: what was taken for one is text."""
        out.append(Said(self._head))
        self._head, self._call, self._array = "", None, False
        self._step = self._say


def python_call(text: str) -> tuple[str, str] | None:
    """`name.call(key="value")` or `name(key="value")`, of constants only → the name and its arguments as JSON."""
    try:
        call = ast.parse(text.strip(), mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        name = ast.unparse(call.func).removesuffix(".call")
        arguments = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords if word.arg}
        return name, json.dumps(arguments, ensure_ascii=False)
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return None


def _loaded(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return None
