"""An answer on a terminal as it streams: words wrapped, Markdown shown by colours and weights, thoughts dimmed.

A word is written when it is complete, so that marks that arrive in pieces are read whole and nothing is drawn twice.
Control characters that a model writes do not reach the terminal. Refuses to know: models, conversations.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from rich.cells import cell_len

BOLD, DIM, ITALIC, CODE, HEADING, RESET = "1", "2", "3", "36", "1;4", "\x1b[0m"
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_BEGINNING = re.compile(r"(\s*)(#{1,6}|[-*+]|\d{1,9}[.)]|>)? ?")
_FENCE = re.compile(r"\s*(```+|~~~+)")
_MARK = re.compile(r"\*\*|\*|`")


class TerminalMarkdown:
    """`write` takes text for the terminal; `width` says how many columns it has now. Not `markdown`: words are wrapped
    and nothing else is done to them."""

    def __init__(self, write: Callable[[str], object], width: Callable[[], int], *, markdown: bool = True):
        self._write = write
        self._width = width
        self._markdown = markdown
        self._held = ""  # what is not written yet: the beginning of a line, or of a word
        self._at_start = True  # of a line of the source
        self._column = 0
        self._space = ""  # before the next word, unless that begins a line
        self._indent = 0  # of wrapped lines
        self._fence = ""
        self._styles: set[str] = set()  # inside a line
        self._line_style = ""
        self._dim = False

    def thought(self, text: str) -> None:
        self._turn(dim=True)
        self._feed(text)

    def said(self, text: str) -> None:
        self._turn(dim=False)
        self._feed(text)

    def end(self) -> None:
        """Write what is held, and end the line."""
        self._flush()
        if self._column:
            self._newline()

    def _turn(self, *, dim: bool) -> None:
        """From thoughts to words, or back: an empty line between them."""
        if dim == self._dim:
            return
        self._flush()
        if self._column:
            self._newline()
            self._write("\n")
        self._dim, self._fence, self._styles, self._line_style, self._at_start = dim, "", set(), "", True

    def _feed(self, text: str) -> None:
        self._held += _CONTROL.sub("", text)
        while "\n" in self._held:
            line, self._held = self._held.split("\n", 1)
            self._line(line, whole=True)
        if not self._fence and not self._at_start_of_mark():
            self._line(self._held, whole=False)

    def _at_start_of_mark(self) -> bool:
        """Whether the line may still turn out to be of another kind."""
        return self._at_start and not re.match(r"\s*[^\s#*+\-\d>`~][\S]*\s|\s*\S+\s+\S", self._held)

    def _flush(self) -> None:
        held, self._held = self._held, ""
        if held:
            self._words(self._begin(held) if self._at_start else held)

    def _line(self, text: str, *, whole: bool) -> None:
        rest = self._begin(text) if self._at_start else text
        if whole:
            self._words(rest)
            self._newline()
            self._at_start, self._indent, self._styles, self._line_style = True, 0, set(), ""
            return
        words, space, last = rest.rpartition(" ")
        self._words(words + space)
        self._held = last

    def _begin(self, text: str) -> str:
        """Write what a line begins with; returns the rest. Lines of code are written as they are."""
        if self._markdown and (fence := _FENCE.match(text)) and (not self._fence or fence[1].startswith(self._fence)):
            self._fence = "" if self._fence else fence[1]
            self._styled(text, DIM)
            return ""
        if self._fence:
            self._styled(text, CODE)
            return ""
        self._at_start = False
        match = _BEGINNING.match(text) if self._markdown else None
        if match is None or not match[2] or not text[match.end(2) :].startswith(" "):
            return text
        if match[2].startswith("#"):
            self._line_style = HEADING
            return text[match.end() :]
        mark = "•" if match[2] in "-*+" else "│" if match[2] == ">" else match[2]
        self._indent = cell_len(match[1] + mark) + 1
        self._styled(f"{match[1]}{mark} ", DIM if mark == "│" else "")
        return text[match.end() :]

    def _words(self, text: str) -> None:
        for piece in re.findall(r"\s+|\S+", text):
            if piece.isspace():
                self._space = piece.replace("\t", "    ")
                continue
            shown = self._space + (_MARK.sub("", piece) if self._markdown else piece)
            if self._column > self._indent and self._column + cell_len(shown) >= self._width():
                self._newline()
                self._space = " " * self._indent
            self._styled(self._space)
            self._space = ""
            self._word(piece)

    def _word(self, word: str) -> None:
        """A word with the marks in it, each of which begins a style or ends it."""
        at = 0
        for mark in _MARK.finditer(word) if self._markdown else ():
            style = {"**": BOLD, "*": ITALIC, "`": CODE}[mark[0]]
            after = word[mark.end() : mark.end() + 1]
            if (CODE in self._styles and style != CODE) or (style not in self._styles and not after):
                continue  # inside code, or a lone star: as it is
            self._styled(word[at : mark.start()])
            at = mark.end()
            self._styles ^= {style}
        self._styled(word[at:])

    def _styled(self, text: str, style: str | None = None) -> None:
        if not text:
            return
        found = [style] if style is not None else [self._line_style, *sorted(self._styles)]
        codes = ";".join(code for code in ([DIM] if self._dim else []) + found if code)
        self._write(f"\x1b[{codes}m{text}{RESET}" if codes else text)
        self._column += cell_len(text)

    def _newline(self) -> None:
        self._write("\n")
        self._column, self._space = 0, ""
