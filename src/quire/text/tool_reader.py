"""Calls of tools in an answer, found while it is being written.

A call is shown as soon as its name is known, its arguments as they come. What looks like a call and is none (no
such tool, no JSON) is text, as it was written. Refuses to know: requests, how one call is written (`call_formats`).
"""

from __future__ import annotations

from quire.text.call_formats.call_format import CallReader, Schemas, ToolFormat
from quire.text.segments import Said, Segment, Thought, overlap


class ToolReader:
    """One answer against the tools offered. Without `parallel` only the first call counts."""

    def __init__(self, format: ToolFormat, tools: Schemas, parallel: bool = True):
        self.calls = 0
        self._format = format
        self._tools = tools
        self._parallel = parallel
        self._held = ""
        self._head = ""  # what was read since the text ended, in case it turns out to be text
        self._certain = 0  # characters of it that are text if there is no call
        self._array = False
        self._call: CallReader | None = None
        self._step = self._begin if format.bare else self._say

    def push(self, text: str) -> list[Segment]:
        self._held += text
        out: list[Segment] = []
        while self._step(out):
            pass
        return self._wanted(out)

    def end(self) -> list[Segment]:
        """What is left when the answer is over. A call cut short stays as far as it came; behind a mark or another
        call, one whose name did not come says nothing."""
        out: list[Segment] = []
        if self._step in (self._say, self._begin) or not (self._certain or self.calls):
            out.append(Said(self._head + (self._call.raw if self._call is not None else "") + self._held))
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
        self._step = self._open if text[0] in self._format.bare else self._say
        return True

    def _say(self, out: list[Segment]) -> bool:
        text, marks = self._held, self._format.marks
        found = min((at, -len(mark), mark) for mark in (*marks, "") if (at := _find(text, mark)) >= 0)
        if found[2]:
            mark = found[2]
            said = text[: found[0]].rstrip()
            out.append(Said(said))
            begun = found[0] if mark in self._format.kept else found[0] + len(mark)
            self._head, self._held, self._step = text[len(said) : begun], text[begun:], self._open
            self._certain = found[0] + len(mark) - len(said)
            return True
        # White space before a call belongs to neither.
        safe = text[: len(text) - max((overlap(text, mark) for mark in marks), default=0)].rstrip()
        out.append(Said(safe))
        self._held = text[len(safe) :]
        return False

    def _open(self, out: list[Segment]) -> bool:
        """Behind a mark: a call, or what may stand before it."""
        text = self._held.lstrip()
        if not text:
            return False
        for mark in self._format.inner:
            if text.startswith(mark):
                self._take(len(self._held) - len(text) + len(mark))
                return True
            if mark.startswith(text):
                return False
        if text[0] == "[" and self._format.lists and not self._array:
            self._array = True
            self._take(len(self._held) - len(text) + 1)
            return True
        self._call = self._format.call(self.calls, self._tools, text)
        if self._call is None:
            self._give_up(out, "")
        else:
            self._step = self._read_call
        return True

    def _take(self, count: int) -> None:
        self._head, self._held = self._head + self._held[:count], self._held[count:]

    def _read_call(self, out: list[Segment]) -> bool:
        assert self._call is not None
        if not self._held:
            return False
        segments, self._held = self._call.push(self._held)
        out += segments
        if self._call.failed:
            self._give_up(out, self._call.raw)
            return True
        if self._call.begun:
            self.calls = self._call.index + 1
            self._head, self._certain = "", 0
        if self._call.done:
            self._call, self._step = None, self._between
        return self._call is None

    def _between(self, out: list[Segment]) -> bool:
        """After a call: the end of what began it, another call, or text again."""
        format = self._format
        text = self._held = self._held.lstrip()
        if not text:
            return False
        for mark in (*format.ends, *format.inner, *format.marks):
            if text.startswith(mark):
                if mark in format.ends:
                    self._held = text[len(mark) :]
                else:
                    begun = 0 if mark in format.kept else len(mark)
                    self._head, self._held, self._step = text[:begun], text[begun:], self._open
                    self._certain = len(mark)
                return True
        if any(mark.startswith(text) for mark in (*format.ends, *format.inner, *format.marks)):
            return False
        if text[0] in ",;" and (self._array or format.bare):
            self._held = text[1:]
        elif text[0] == "]" and self._array:
            self._held, self._array = text[1:], False
        elif self._array or (text[0] == "{" and format.bare) or format.repeats:
            self._step = self._open
        else:
            self._step = self._say
        return True

    def _give_up(self, out: list[Segment], read: str) -> None:
        """It was no call: what was taken for one is text, in which others may begin."""
        text = self._head + read + self._held
        out.append(Said(text[: self._certain]))
        self._held = text[self._certain :]
        self._head, self._certain, self._call, self._array = "", 0, None, False
        self._step = self._say


def _find(text: str, mark: str) -> int:
    return text.find(mark) if mark else len(text)
