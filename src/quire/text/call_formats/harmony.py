"""gpt-oss's harmony format: messages in channels, marked by special tokens.

    <|channel|>analysis<|message|>THOUGHT<|end|><|start|>assistant<|channel|>final<|message|>ANSWER<|return|>
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>

A message in the commentary channel to nobody is said. Refuses to know: requests.
"""

from __future__ import annotations

import re

from quire.text.call_formats.call_format import Schemas
from quire.text.call_formats.json_call import HeadedFormat, JsonCall
from quire.text.segments import CallBegun, Said, Segment, Thought, overlap

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ANALYSIS = f"{CHANNEL}analysis{MESSAGE}"
NEXT = f"<|end|>{START}assistant"  # ends a message, and begins another
FINAL = f"{CHANNEL}final{MESSAGE}"
_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_BREAKS = (*_ENDS, START, CHANNEL)  # what ends the content of a message
_TO = re.compile(r"\bto=functions\.([\w.-]{1,128})")
_KIND = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")


class HarmonyFormat(HeadedFormat):
    """Calls end an answer: there is one of them."""

    name = "harmony"
    aliases = ("openai", "gpt-oss")
    open = f"{CHANNEL}commentary to=functions."
    separator = f"<|call|>{START}assistant{CHANNEL}commentary to=functions."
    lead = FINAL
    marks = (CHANNEL,)
    special = (MESSAGE, CONSTRAIN, START, *_ENDS)
    after_name = f" {CONSTRAIN}json{MESSAGE}"
    head = re.compile("(?!)")  # read by HarmonyReader
    parallel = False

    def suits(self, template: str) -> bool:
        return CHANNEL in template and MESSAGE in template


class HarmonyReader:
    """One answer: thoughts, words and calls. `thoughts`: whether those are told apart."""

    def __init__(self, tools: Schemas, parallel: bool = True, *, thoughts: bool = True, header: str = ""):
        """`header`: the beginning of a message that the prompt ends with."""
        self.calls = 0
        self._tools = tools
        self._parallel = parallel
        self._thoughts = thoughts
        self._held = header
        self._call: JsonCall | None = None
        self._kind = ""
        self._step = self._header if header else self._first

    def push(self, text: str) -> list[Segment]:
        self._held += text
        out: list[Segment] = []
        while self._step(out):
            pass
        return self._wanted(out)

    def end(self) -> list[Segment]:
        out: list[Segment] = []
        if self._step == self._content or self._step == self._first:
            self._let_out(self._held, out)  # a header that is cut short says nothing
        self._held = ""
        return self._wanted(out)

    def _wanted(self, out: list[Segment]) -> list[Segment]:
        return [
            one for one in out if (one.text if isinstance(one, Said | Thought) else self._parallel or one.index == 0)
        ]

    def _first(self, out: list[Segment]) -> bool:
        """An answer need not begin with a header."""
        text = self._held.lstrip()
        if any(mark.startswith(text) and mark != text for mark in (START, CHANNEL)):
            return False
        self._step = self._header if text.startswith((START, CHANNEL)) else self._content
        return True

    def _header(self, out: list[Segment]) -> bool:
        header, found, rest = self._held.partition(MESSAGE)
        if not found:
            return False
        kind, to = _KIND.search(header), _TO.search(header)
        self._kind, self._call = kind[1] if kind else "final", None
        if to is not None and to[1] in self._tools:
            self._kind, self._call = "call", JsonCall(self.calls, self._tools, to[1])
            out.append(CallBegun(self.calls, to[1]))
            self.calls += 1
        self._held, self._step = rest, self._content
        return True

    def _content(self, out: list[Segment]) -> bool:
        text = self._held
        found = min(((at, mark) for mark in _BREAKS if (at := text.find(mark)) >= 0), default=None)
        if found is None:
            keep = max(overlap(text, mark) for mark in _BREAKS)
            self._let_out(text[: len(text) - keep], out)
            self._held = text[len(text) - keep :]
            return False
        at, mark = found
        self._let_out(text[:at], out)
        self._held = text[at + len(mark) :] if mark in _ENDS else text[at:]
        self._step = self._header
        return True

    def _let_out(self, text: str, out: list[Segment]) -> None:
        if self._call is not None:
            if not self._call.done:
                out += self._call.push(text)[0]
        elif self._kind == "analysis" and self._thoughts:
            out.append(Thought(text))
        else:
            out.append(Said(text))


HARMONY = HarmonyFormat()
