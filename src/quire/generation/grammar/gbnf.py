"""GBNF (llama.cpp's notation, and EBNF as XGrammar takes it) as Lark. Refuses to know: what a grammar means."""

from __future__ import annotations

import re

TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#[^\n]*|\s+(?=\|)', re.DOTALL)
ESCAPE = re.compile(r"\\x([0-9A-Fa-f]{2})|\\u([0-9A-Fa-f]{4})|\\U([0-9A-Fa-f]{8})|\\(.)", re.DOTALL)
KEPT = 'nrt\\"[]'  # escapes that mean the same in both


class GbnfError(Exception):
    """With the reason."""


def lark_of(source: str) -> str:
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(TOKEN.sub(_plain, source))
    except RecursionError:
        raise GbnfError("it is nested too deeply") from None
    except Exception as error:  # of no kind of its own
        raise GbnfError(str(error)) from None


def _plain(found: re.Match[str]) -> str:
    """A literal or a class whose characters are written as they are, where that can be; nothing for a comment."""
    text = found[0]
    if text[0] == "#" or text.isspace():  # a line may begin with another alternative
        return " "
    in_class = text[0] == "["

    def char(escape: re.Match[str]) -> str:
        code = next((digits for digits in escape.groups()[:3] if digits), None)
        if code is None:
            return escape[0] if escape[4] in KEPT else escape[4]
        value = int(code, 16)
        if value in (10, 13, 9):
            return {10: "\\n", 13: "\\r", 9: "\\t"}[value]
        if in_class and value < 256:
            return f"\\x{value:02X}"
        if value < 32 or value == 127 or 0xD800 <= value < 0xE000:
            raise GbnfError(f"a literal with the character U+{value:04X} cannot be used")
        return "\\" + chr(value) if chr(value) in '"\\[]' else chr(value)

    return text[0] + ESCAPE.sub(char, text[1:-1]) + text[-1]
