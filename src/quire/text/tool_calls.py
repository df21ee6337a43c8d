"""Tools offered to a model: how it is told of them, and grammars that make it call them.

Refuses to know: how answers are read (tool_reader), who offers the tools.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from quire.text.call_formats.call_format import ANY_TEXT, RuleWriter, SpecialId, ToolFormat
from quire.text.tool_spec import Tool
from quire.types.errors import InputError
from quire.types.grammar import GrammarSpec

MAX_CALLS = 16  # in one answer whose calls are required


def required_grammar(
    tools: Sequence[Tool], format: ToolFormat, special_id: SpecialId, *, parallel: bool
) -> GrammarSpec:
    """A call of one of the tools in the model's own format, or with `parallel` several."""
    write = format.writer(special_id)
    calls = _calls(tools, format, write, MAX_CALLS if parallel else 1)
    return GrammarSpec("lark", _whole(write, f"{_text(write, format.open)}{calls}"))


def strict_grammar(
    tools: Sequence[Tool], format: ToolFormat, special_id: SpecialId, answer: GrammarSpec | None = None
) -> GrammarSpec:
    """Free text (or `answer`), or calls in the model's own format, their arguments bound by the tools' schemas."""
    write = format.writer(special_id)
    mark = format.mark
    opening = format.open.removeprefix(mark)  # of calls behind their mark
    calls = _calls(tools, format, write, 1 if mark and mark in format.separator else MAX_CALLS)
    if answer is None and format.lead:
        text = write.rule(ANY_TEXT, terminal=True)
        return GrammarSpec(
            "lark", _whole(write, f"{write.text(format.lead)} {text} | {write.text(format.open)} {calls}")
        )
    if answer is not None:
        if answer.kind not in ("json_object", "json_schema"):
            raise InputError(f"tools and a constraint of kind {answer.kind} cannot be combined", param="tools")
        said = write.rule("%json " + (answer.source or '{"type": "object"}'))
        start = f"{_text(write, format.lead)}{said} | {_text(write, format.open)}{calls}"
        return GrammarSpec("lark", _whole(write, start))
    bound = write.rule(f"{_text(write, opening)}{calls}")
    if not format.bare:
        text = write.rule(_text_without(mark, ANY_TEXT, write), terminal=True)
        return GrammarSpec("lark", _whole(write, f"{_marked(write, mark, text, ANY_TEXT, bound)}* {text}?"))
    # An answer that begins like a call is one, whatever else there is.
    first = "".join("\\" + character for character in format.bare)
    free = rf"/([^{first}\s](.|\n)*)?/"
    text = write.rule(_text_without(mark, free, write), terminal=True)
    bare = write.rule(f"{_text(write, format.open)}{calls}")
    marked = f" | {_marked(write, mark, text, free, bound)}" if format.open.startswith(mark) or not format.open else ""
    return GrammarSpec("lark", _whole(write, f"{bare}{marked} | {text}"))


def tool_grammar(tool: Tool, format: ToolFormat, special_id: SpecialId) -> GrammarSpec:
    """A call of one tool alone."""
    return required_grammar([tool], format, special_id, parallel=False)


def _calls(tools: Sequence[Tool], format: ToolFormat, write: RuleWriter, most: int) -> str:
    """So many calls at most, without what begins them, with what ends them."""
    one = write.rule(" | ".join(format.rule(tool, number, write) for number, tool in enumerate(tools)))
    # What ends a call whether or not another follows comes first: of two texts that begin alike, the compiler's lexer
    # would take the longer.
    separator, close = write.pieces(format.separator), write.pieces(format.close)
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(separator, close, strict=False)))
    both, between, last = (write.text("".join(some)) for some in (close[:same], separator[same:], close[same:]))
    more = f"({between} {one} {both}){{0,{most - 1}}}" if most > 1 and format.parallel else ""
    return f"{one} {both} {more} {last}"


def _text(write: RuleWriter, text: str) -> str:
    return f"{write.text(text)} " if text else ""


def _text_without(mark: str, text: str, write: RuleWriter) -> str:
    """A terminal for text in which nothing begins a call."""
    return text if write.special(mark) else rf"{text} & ~({ANY_TEXT} {json.dumps(mark)} {ANY_TEXT})"


def _marked(write: RuleWriter, mark: str, text: str, free: str, bound: str) -> str:
    """Text, a mark, and calls."""
    if write.special(mark):
        return write.rule(f"{text}? {write.text(mark)} {bound}")
    return write.rule(f"{write.until(mark, free)} {bound}")


def _whole(write: RuleWriter, start: str) -> str:
    return "\n".join([f"start: {start}", *write.rules])


def spell_out(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], format: ToolFormat
) -> list[dict[str, Any]]:
    """The conversation for a template that knows no tools: they are described in the system message, calls are
    written as the model is asked to write them, and results come from the user."""
    out: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            out.append({"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"})
            continue
        plain = {key: value for key, value in message.items() if key != "tool_calls"}
        if calls := [call["function"] for call in message.get("tool_calls") or ()]:
            spelled = format.spelled(*((call["name"], call["arguments"]) for call in calls))
            plain["content"] = f"{plain['content']}\n{spelled}" if plain["content"] else spelled
        out.append(plain)
    if tools:
        system = _introduction(tools, format)
        if out and out[0]["role"] == "system":
            out[0]["content"] = f"{out[0]['content']}\n\n{system}"
        else:
            out.insert(0, {"role": "system", "content": system})
    return out


def _introduction(tools: Sequence[Mapping[str, Any]], format: ToolFormat) -> str:
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    example = format.spelled(("the function's name", {"parameter": "value"}))
    return (
        f"You can call these functions, each described by its name and the JSON schema of its parameters:\n{lines}\n\n"
        f"To call a function, answer with\n{example}\nand nothing else. What it returns follows between "
        "<tool_response> and </tool_response>. If no function helps, answer in plain words."
    )
