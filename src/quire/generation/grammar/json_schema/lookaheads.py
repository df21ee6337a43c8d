"""Patterns with lookaheads at their beginning as several patterns without, all of which must fit.

    ^(?=X)(?!Y)Z$   ──►   ^X   and   what does not begin with Y   and   ^Z$

What does not begin with Y is told of a few simple forms: words, one character, all of a kind, something anywhere.
Refuses to know: schemas, lookaheads elsewhere.
"""

from __future__ import annotations

import re
from typing import Any

ATOM = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|.", re.DOTALL)
CHARACTER = r"(\\[^\w\s]|[\w\s!\"#%&',/:;<=>@`~-])"  # that means itself
MINUS = {"-": r"\-"}  # no range
KIND = r"(\[(?:\\.|[^\]\\^])(?:\\.|[^\]\\])*\])"  # [...], not [^...]


def without_lookaheads(pattern: str) -> list[str]:
    """Patterns that together mean the same; the pattern itself where that is not known."""
    rest = pattern.removeprefix("^")
    found: list[str] = []
    while rest.startswith(("(?=", "(?!")) and pattern.startswith("^"):
        inner, end = _group(rest)
        made = f"^(?:{inner})" if rest[2] == "=" else _not_at_first(inner.removeprefix("^"))
        if made is None:
            return [pattern]
        found.append(made)
        rest = rest[end:]
    if not found or _alternates(rest) or any("(?" in re.sub(r"\(\?:", "", one) for one in (rest, *found)):
        return [pattern]
    return [*found, f"^{rest}"]


def _group(text: str) -> tuple[str, int]:
    """What is in the lookahead that a text begins with, and where it ends."""
    depth = 0
    for atom in ATOM.finditer(text):
        depth += {"(": 1, ")": -1}.get(atom[0], 0)
        if depth == 0:
            return text[3 : atom.start()], atom.end()
    return "", len(text)


def _alternates(text: str) -> bool:
    depth = 0
    for atom in ATOM.finditer(text):
        depth += {"(": 1, ")": -1}.get(atom[0], 0)
        if atom[0] == "|" and depth == 0:
            return True
    return False


def _not_at_first(pattern: str) -> str | None:
    """A pattern for texts that do not begin with what fits another; None: it is not known."""
    if match := re.fullmatch(KIND + r"([*+])\$", pattern):  # not all of a kind
        other = f"[^{match[1][1:]}"
        return other if match[2] == "*" else f"^$|{other}"
    if match := re.fullmatch(KIND, pattern):
        return f"^$|^[^{match[1][1:]}"
    if match := re.fullmatch(r"\\([dws])", pattern, re.IGNORECASE):
        return rf"^$|^\{match[1].swapcase()}"
    if match := re.fullmatch(rf"\.\*{CHARACTER}(?:\.\*)?", pattern):  # nowhere
        return f"^{_none_of([match[1]])}*$"
    if match := re.fullmatch(rf"\.\*{CHARACTER}{CHARACTER}(?:\.\*)?", pattern):
        a, b = match[1], match[2]
        no_a = _none_of([a])
        return f"^(?:{no_a}|{a}{no_a})*{a}?$" if a == b else f"^(?:{no_a}|{a}+{_none_of([a, b])})*{a}*$"
    words, whole = (pattern[:-1], True) if pattern.endswith("$") else (pattern, False)
    match = re.fullmatch(r"\((?:\?:)?([^()]*)\)", words)
    if match or not whole:  # of `a|b$` only b is the whole text
        words = match[1] if match else words
    elif "|" in words:
        return None
    if not re.fullmatch(rf"(?:{CHARACTER}|\|)+", words) or not all(words.split("|")):
        return None
    trie: dict[str, Any] = {}
    for word in words.split("|"):
        at = trie
        for character in re.findall(CHARACTER, word):
            at = at.setdefault(character, {})
        at[""] = {}
    return f"^{_other(trie, whole)}"


def _other(trie: dict[str, Any], whole: bool) -> str:
    """What is none of the words, or begins with none, from here on."""
    nexts = [character for character in trie if character]
    options = [_none_of(nexts) if nexts else r"[\s\S]"]
    if "" not in trie:
        options.append("$")
    options += [c + _other(trie[c], whole) for c in nexts if whole or "" not in trie[c]]
    return f"(?:{'|'.join(options)})"


def _none_of(characters: list[str]) -> str:
    return f"[^{''.join(MINUS.get(one, one) for one in characters)}]"
