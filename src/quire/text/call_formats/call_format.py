"""What a tool-call format is: how calls are written, how one is read as it comes, and how a grammar writes one.

    OPEN call SEPARATOR call CLOSE          <tool_call>\n{...}\n</tool_call>\n<tool_call>\n{...}\n</tool_call>

Refuses to know: which formats there are, requests.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from quire.text.segments import Segment
from quire.text.tool_spec import Tool
from quire.types.errors import InputError
from quire.types.grammar import CLOSED

Schemas = Mapping[str, Mapping[str, Any]]  # of the tools' parameters, by name
SpecialId = Callable[[str], int | None]  # of a text that is one special token
ANY_TEXT = r"/(.|\n)*/"
ANY_NAME = r"/[A-Za-z_][A-Za-z0-9_]{0,63}/"  # of an argument


class CallReader(Protocol):
    """One call, as it comes."""

    index: int

    @property
    def raw(self) -> str:
        """What was read of it."""
        ...

    @property
    def begun(self) -> bool:
        """Its name is known, and that of a tool."""
        ...

    @property
    def done(self) -> bool: ...

    @property
    def failed(self) -> bool:
        """It is none."""
        ...

    def push(self, text: str) -> tuple[list[Segment], str]:
        """(what is new, what of `text` lies behind the end of the call)."""
        ...


class RuleWriter:
    """The rules of a Lark grammar. Special tokens are no text, so that they are named by their ids."""

    def __init__(self, special_id: SpecialId, marks: Sequence[str] = ()):
        """`marks`: texts that may be special tokens."""
        self.rules: list[str] = []
        self._ids = {mark: found for mark in marks if (found := special_id(mark)) is not None}
        self._marks = _any_of(marks)
        self._special = _any_of(self._ids)

    def special(self, mark: str) -> bool:
        return mark in self._ids

    def text(self, text: str) -> str:
        """An expression for exactly this text."""
        parts = self._special.split(text)
        written = [f"<[{self._ids[part]}]>" if part in self._ids else quoted(part) for part in parts if part]
        return " ".join(written) or '""'

    def pieces(self, text: str) -> list[str]:
        """A text in marks and what is between them."""
        return [piece for piece in self._marks.split(text) if piece]

    def rule(self, body: str, *, options: str = "", terminal: bool = False) -> str:
        """A rule (or a terminal) of its own; its name."""
        name = f"{'T' if terminal else 'r'}{len(self.rules)}"
        self.rules.append(f"{name}{options}: {body}")
        return name

    def until(self, close: str, text: str = ANY_TEXT) -> str:
        """Text (of the terminal expression `text`) up to and with what closes it."""
        head = next((mark for mark in self._ids if close.startswith(mark)), None)
        if head is not None:  # no text spells it
            return f"{self.rule(text, terminal=True)} {self.text(close)}"
        return self.rule(f"{self.rule(text, terminal=True)} {quoted(close)}", options="[lazy]")

    def json(self, schema: Any) -> str:
        return self.rule("%json " + json.dumps(schema, ensure_ascii=False))

    def listed(self, parts: Sequence[tuple[str, bool]], separator: str) -> str:
        """Parts in order with a separator between them; those that are not required may be missing."""
        tails, after = [], '""'  # what may follow each
        for part, required in reversed(parts):
            tails.append(after)
            more = self.rule(f"{self.text(separator)} {part} {after}")
            after = more if required else self.rule(f"{more} | {after}")
        first = []
        for (part, required), tail in zip(parts, reversed(tails), strict=True):
            first.append(f"{part} {tail}")
            if required:
                return self.rule(" | ".join(first))
        return self.rule(" | ".join([*first, '""']))


class ToolFormat:
    """A format as data, where it can be; subclasses say how a call is read, spelled and held to a schema."""

    name: str
    aliases: tuple[str, ...] = ()  # what vLLM and SGLang call it
    open: str = ""  # written before the first call
    separator: str = ""  # between calls
    close: str = ""  # after the last
    lead: str = ""  # written before an answer that is no call
    marks: tuple[str, ...] = ()  # any of these begins calls
    inner: tuple[str, ...] = ()  # may follow them, before each call
    ends: tuple[str, ...] = ()  # may follow a call
    kept: tuple[str, ...] = ()  # of the marks, those that are a part of the call itself
    special: tuple[str, ...] = ()  # other texts of the format that may be special tokens
    repeats: bool = False  # calls may follow each other without a mark
    lists: bool = False  # calls may stand in brackets, separated by commas
    bare: str = ""  # an answer that begins with one of these characters is a call without a mark
    parallel: bool = True  # whether one answer may have several calls

    @property
    def mark(self) -> str:
        """What calls begin with where a model writes them."""
        return self.marks[0] if self.marks else ""

    def suits(self, template: str) -> bool:
        """Whether a chat template writes calls so."""
        return bool(self.mark) and self.mark in template

    def call_id(self, name: str, index: int) -> str:
        return f"call_{secrets.token_hex(12)}"

    def call(self, index: int, tools: Schemas, text: str) -> CallReader | None:
        """A reader of the call that begins with `text`; None: no call begins so."""
        raise NotImplementedError

    def spell(self, name: str, arguments: Mapping[str, Any]) -> str:
        """One call, without what stands around it."""
        raise NotImplementedError

    def rule(self, tool: Tool, number: int, write: RuleWriter) -> str:
        """An expression for a call of the tool, its arguments bound by its schema."""
        raise NotImplementedError

    def spelled(self, *calls: tuple[str, Any]) -> str:
        """Calls as the model would write them."""
        return self.open + self.separator.join(self.spell(name, arguments) for name, arguments in calls) + self.close

    def writer(self, special_id: SpecialId) -> RuleWriter:
        return RuleWriter(special_id, self.all_marks())

    def all_marks(self) -> list[str]:
        """Texts of the format that may be special tokens."""
        return [*self.marks, *self.inner, *self.ends, *self.special]


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    words = sorted(map(re.escape, texts), key=len, reverse=True)
    return re.compile(f"({'|'.join(words) or '(?!)'})")


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


# ---- schemas of arguments -------------------------------------------------------------------------------------


def parameters_schema(tool: Tool, number: int) -> Any:
    """The schema of a tool's arguments, as the definition `tool{number}` of a schema around it."""
    if not tool.bound:
        return {"type": "object"}
    schema = {CLOSED: tool.closed} | (tool.parameters or {"type": "object", "properties": {}})
    alone = {key: value for key, value in schema.items() if key not in ("$id", "$schema")}  # it is part of another now
    return _moved(alone, f"#/$defs/tool{number}", 64)


def embedded(tool: Tool, number: int, schema: Any = None) -> dict[str, Any]:
    """A schema that may refer to the tool's parameters; without one, these."""
    schema = {"$ref": f"#/$defs/tool{number}"} if schema is None else schema
    return {**schema, "$defs": {f"tool{number}": parameters_schema(tool, number)}}


def _moved(schema: Any, base: str, depth: int) -> Any:
    """The schema with its references to itself pointing to where it now lies."""
    if depth == 0:
        raise InputError("a tool's parameters are nested too deeply", param="tools")
    if isinstance(schema, dict):
        moved = {key: _moved(value, base, depth - 1) for key, value in schema.items()}
        if isinstance(reference := schema.get("$ref"), str) and reference.startswith("#"):
            moved["$ref"] = base + reference[1:]
        return moved
    return [_moved(item, base, depth - 1) for item in schema] if isinstance(schema, list) else schema
