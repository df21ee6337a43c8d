"""Thoughts apart from the answer: `<think>` ... `</think>` at the beginning of what a model writes.

    push("<think>Hm") → Thought("Hm")      push(".</think>\n\nYes") → Thought("."), Said("Yes")

Refuses to know: tools, requests.
"""

from __future__ import annotations

from quire.text.segments import Said, Segment, Thought, overlap

OPEN, CLOSE = "<think>", "</think>"


class ReasoningReader:
    """One answer, read as it comes. `inside`: the prompt itself ended with the opening tag."""

    def __init__(self, inside: bool = False):
        self._step = self._think if inside else self._begin
        self._held = ""
        self._trim = inside  # white space is dropped before the first thought and the first word

    def push(self, text: str) -> list[Segment]:
        if self._step == self._say and not self._trim:
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
        if OPEN.startswith(text):  # nothing yet, or a part of the tag
            if text != OPEN:
                return False
        elif not text.startswith(OPEN):
            self._step = self._say
            return True
        self._held, self._step, self._trim = text.removeprefix(OPEN), self._think, True
        return True

    def _think(self, out: list[Segment]) -> bool:
        if not self._trimmed():
            return False
        thought, tag, rest = self._held.partition(CLOSE)
        if tag:
            self._held, self._step, self._trim = rest, self._say, True
            thought = thought.rstrip()
        else:
            # The tag may have begun; white space before it belongs to neither side.
            keep = overlap(thought, CLOSE)
            body = thought[: len(thought) - keep].rstrip()
            self._held, thought = thought[len(body) :], body
        if thought:
            out.append(Thought(thought))
        return bool(tag)

    def _say(self, out: list[Segment]) -> bool:
        if self._trimmed():
            out.append(Said(self._held))
            self._held = ""
        return False

    def _trimmed(self) -> bool:
        """Whether anything is left after leading white space is dropped, where it is to be."""
        if self._trim:
            self._held = self._held.lstrip()
            self._trim = not self._held
        return bool(self._held)
