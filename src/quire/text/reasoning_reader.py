"""Thoughts apart from the answer: `<think>` ... `</think>`, or other marks, at the beginning of what a model writes.

    push("<think>Hm") → Thought("Hm")      push(".</think>\n\nYes") → Thought("."), Said("Yes")

Refuses to know: tools, requests, which marks a model has.
"""

from __future__ import annotations

from quire.text.reasoning_formats import THINK, ReasoningFormat
from quire.text.segments import Said, Segment, Thought, overlap


class ReasoningReader:
    """One answer, read as it comes. `inside`: the prompt itself ended with the opening mark."""

    def __init__(self, inside: bool = False, format: ReasoningFormat = THINK):
        self._format = format
        self._step = self._think if inside else self._begin
        self._held = ""
        self._trim = inside  # white space is dropped before the first thought and the first word

    def push(self, text: str) -> list[Segment]:
        if self._step == self._say and not self._trim and not self._format.drops:
            return [Said(text)] if text else []
        self._held += text
        out: list[Segment] = []
        while self._step(out):
            pass
        return out

    def end(self) -> list[Segment]:
        held, self._held = self._held, ""
        if not held:
            return []
        return [Thought(held)] if self._step == self._think else [Said(held)]

    def _begin(self, out: list[Segment]) -> bool:
        text = self._held.lstrip()
        for mark in self._format.opens:
            if text.startswith(mark):
                self._held, self._step, self._trim = text.removeprefix(mark), self._think, True
                return True
        if any(mark.startswith(text) for mark in self._format.opens):  # nothing yet, or a part of it
            return False
        self._step = self._say
        return True

    def _think(self, out: list[Segment]) -> bool:
        if not self._trimmed():
            return False
        thought, mark, rest = _parted(self._held, self._format.closes)
        if mark:
            self._held, self._step, self._trim = rest, self._say, True
            thought = thought.rstrip()
        else:
            # The mark may have begun; white space before it belongs to neither side.
            body = _certain(thought, self._format.closes).rstrip()
            self._held, thought = thought[len(body) :], body
        if thought:
            out.append(Thought(thought))
        return bool(mark)

    def _say(self, out: list[Segment]) -> bool:
        if not self._trimmed():
            return False
        said, mark, rest = _parted(self._held, self._format.drops)
        if not mark:
            said = _certain(said, self._format.drops)
            rest = self._held[len(said) :]
        else:
            said = said.rstrip()
            self._trim = True
        if said:
            out.append(Said(said))
        self._held = rest
        return bool(mark)

    def _trimmed(self) -> bool:
        """Whether anything is left after leading white space is dropped, where it is to be."""
        if self._trim:
            self._held = self._held.lstrip()
            self._trim = not self._held
        return bool(self._held)


def _parted(text: str, marks: tuple[str, ...]) -> tuple[str, str, str]:
    """The text around the first of the marks; without one, the text."""
    found = min(((at, mark) for mark in marks if (at := text.find(mark)) >= 0), default=None)
    return (text, "", "") if found is None else (text[: found[0]], found[1], text[found[0] + len(found[1]) :])


def _certain(text: str, marks: tuple[str, ...]) -> str:
    """What of it cannot be the beginning of a mark."""
    return text[: len(text) - max((overlap(text, mark) for mark in marks), default=0)]
