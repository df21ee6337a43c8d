"""Long documents: each part is read on its own, all at once, and what was found is put together, in rounds.

Refuses to know: engines, tokens; lengths are counted in characters, which every backend can.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from quire.lang.pieces import gen, user
from quire.lang.prompt import Prompt
from quire.lang.reasoning import Start
from quire.types.errors import InputError


@dataclass(frozen=True)
class Reduced:
    answer: str
    rounds: list[list[str]]  # what each part had to say, then what the parts' parts had, up to the last round
    prompt: Prompt


def map_reduce(
    start: Start,
    document: str,
    question: str,
    *,
    chunk: int = 4000,
    max_tokens: int = 128,
    temperature: float = 0.0,
) -> Reduced:
    """Answer a question about a document of any length. It is read in parts of up to `chunk` characters; notes on them
    are condensed, as many together as fit into a part, until they fit into one."""

    def ask(task: str) -> Callable[[str], Prompt]:
        # The task comes first, so that all parts share its pages.
        return lambda part: (
            start + user(task, "\n\n", part) + gen("note", max_tokens=max_tokens, temperature=temperature)
        )

    note = ask(f"Write down what this part of a document says about: {question}")
    reading = [note(part) for part in split(document, chunk)]
    rounds: list[list[str]] = []
    while True:
        rounds.append([prompt["note"] for prompt in reading])
        groups = _groups(rounds[-1], chunk)
        if len(groups) == 1 or len(groups) == len(rounds[-1]):  # they fit, or no two of them do
            break
        reading = [ask(f"Put these notes together, as far as they are about: {question}")(group) for group in groups]
    last = ask(f"From these notes on a document, answer: {question}")("\n\n".join(groups))
    return Reduced(last["note"], rounds, last)


def split(document: str, size: int) -> list[str]:
    """A text in parts of up to `size` characters, divided between paragraphs if it can be, else lines, sentences or
    words, and inside a word only if that is longer than a part."""
    if size < 1:
        raise InputError(f"parts must have at least one character, not {size}", param="chunk")
    if not document.strip():
        raise InputError("the document is empty", param="document")
    parts = [document]
    for border in (r"(?<=\n\n)", r"(?<=\n)", r"(?<=[.!?] )", r"(?<= )"):
        parts = [piece for part in parts for piece in ([part] if len(part) <= size else re.split(border, part))]
    whole = [part[i : i + size] for part in parts for i in range(0, len(part), size)]
    packed = [""]
    for part in whole:
        if len(packed[-1]) + len(part) > size:
            packed.append("")
        packed[-1] += part
    return [part for part in packed if part]


def _groups(notes: list[str], size: int) -> list[str]:
    """Notes gathered into texts of up to `size` characters, in their order."""
    groups: list[str] = []
    for note in notes:
        if groups and len(groups[-1]) + len(note) + 2 <= size:
            groups[-1] += "\n\n" + note
        else:
            groups.append(note)
    return groups
