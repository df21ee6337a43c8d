"""Streamed Markdown on a terminal: the same however it arrives in pieces."""

from __future__ import annotations

import random
import re

import pytest

from quire.cli.terminal_markdown import TerminalMarkdown

ANSWER = """# A title

Some **bold words** and *slanted* and `code here`, in a sentence: 2 * 3 = 6, snake_case_name, long enough to be wrapped.

- first item that is long enough to be wrapped on a narrow terminal
- second
  1. numbered
> quoted

```python
def f(x):
    return x * 2  # **not bold**, and a line that is much too long for the terminal stays one line
```
Done: **unfinished"""


def shown(text: str, *, pieces: int = 0, width: int = 40, markdown: bool = True, thought: str = "") -> str:
    out: list[str] = []
    view = TerminalMarkdown(out.append, lambda: width, markdown=markdown)
    rng, at = random.Random(pieces), 0
    if thought:
        view.thought(thought)
    while at < len(text):
        size = rng.randint(1, pieces) if pieces else len(text)
        view.said(text[at : at + size])
        at += size
    view.end()
    return "".join(out)


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[\d;]*m", "", text)


@pytest.mark.parametrize("pieces", [1, 2, 3, 7, 20])
def test_pieces_do_not_matter(pieces: int) -> None:
    assert shown(ANSWER, pieces=pieces) == shown(ANSWER)


def test_what_marks_become() -> None:
    text = shown(ANSWER)
    for styled in ("\x1b[1;4mtitle\x1b[0m", "\x1b[1mbold\x1b[0m", "\x1b[3mslanted\x1b[0m", "\x1b[36mcode\x1b[0m"):
        assert styled in text
    assert "• first" in text and "\n  " in text and "2 * 3 = 6" in plain(text) and "snake_case_name" in plain(text)
    assert "# **not bold**, and a line" in plain(text) and "unfinished" in plain(text)
    assert "**bold" not in plain(text) and "`code" not in plain(text)


def test_words_are_wrapped_and_none_is_lost() -> None:
    lines = plain(shown(ANSWER)).split("\n")
    assert all(len(line) <= 40 for line in lines if "much too long" not in line)
    words = re.findall(r"\w+", ANSWER)
    assert re.findall(r"\w+", plain(shown(ANSWER))) == words
    wide = plain(shown("漢字 " * 30, width=20)).split("\n")
    assert max(map(len, wide)) * 2 <= 26  # two columns each


def test_without_markdown_marks_stay() -> None:
    text = shown(ANSWER, markdown=False)
    assert "\x1b[" not in text and "**bold words**" in text and "# A title" in text and "```python" in text


def test_thoughts_are_dimmed_and_apart() -> None:
    text = shown("So **it** is.", thought="Let me see.\nHm", pieces=2)
    assert text.startswith("\x1b[2mLet\x1b[0m") and "\x1b[2mHm\x1b[0m\n\nSo " in text
    assert "\x1b[1mit\x1b[0m" in text


def test_no_escape_sequence_of_a_model_reaches_the_terminal() -> None:
    text = shown("a \x1b]0;title\x07 b \x1b[31mred\x9b2J c\r\nd\x00", markdown=False)
    assert "\x1b" not in text and "\x9b" not in text and "\x07" not in text and "\r" not in text
    assert plain(text).split() == ["a", "]0;title", "b", "[31mred2J", "c", "d"]
