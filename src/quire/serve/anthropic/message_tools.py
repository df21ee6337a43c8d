"""Tools of Anthropic's API: the caller's own, those it defines, and those it would run itself.

What only Anthropic's servers can run (web search, code, MCP connectors) is left out, and the answer's headers name it.
Refuses to know: messages, how tools are described to a model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from quire.serve.anthropic.message_blocks import AnthropicInput, CacheControl
from quire.serve.anthropic.tool_search import search_tool
from quire.serve.core.context import current
from quire.serve.core.fields import JsonSchema, ToolName, unused
from quire.text import Tool
from quire.types.errors import InputError

MAX_TOOLS = 10_000  # most of them deferred
MAX_NAMED = 32  # things left out that the header names
_UNPRINTABLE = re.compile(r"[^\x21-\x7e]|,")
SEARCH = "tool_search_tool_"
_THEIRS = "for tools that Anthropic's servers run"


def _object(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


_TEXT, _LINE = {"type": "string"}, {"type": "integer"}
_COMMANDS = ["view", "create", "str_replace", "insert"]
_EDITOR = {
    "path": _TEXT,
    "file_text": _TEXT,
    "old_str": _TEXT,
    "new_str": _TEXT,
    "insert_line": _LINE,
    "insert_text": _TEXT,
    "view_range": {"type": "array", "items": _LINE},
}
# Tools that Anthropic defines and callers run: what the beginning of `type` says of their parameters.
DEFINED: dict[str, tuple[str, dict[str, Any]]] = {
    "bash_": ("Runs a command in a shell that stays open.", _object([], command=_TEXT, restart={"type": "boolean"})),
    "text_editor_": (
        "Views, creates and edits files.",
        _object(["command", "path"], command={"enum": [*_COMMANDS, "undo_edit"]}, **_EDITOR),
    ),
    "memory_": (
        "Views, creates and edits files under /memories, which outlive the conversation.",
        _object(
            ["command"],
            command={"enum": [*_COMMANDS, "delete", "rename"]},
            **_EDITOR,
            old_path=_TEXT,
            new_path=_TEXT,
        ),
    ),
}


class AnthropicTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A tool of the caller's own (`custom`, with an `input_schema`) or one that `type` stands for."""

    name: ToolName | None = None
    input_schema: JsonSchema | None = None
    description: str | None = None
    type: str | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None
    input_examples: list[dict[str, Any]] | None = None
    defer_loading: bool | None = None
    eager_input_streaming: Annotated[bool, unused("arguments are streamed as they come")] | None = None
    allowed_callers: Annotated[Any, unused(_THEIRS)] = None

    max_characters: Annotated[Any, unused("the caller's own business")] = None
    max_uses: Annotated[Any, unused(_THEIRS)] = None
    max_content_tokens: Annotated[Any, unused(_THEIRS)] = None
    allowed_domains: Annotated[Any, unused(_THEIRS)] = None
    blocked_domains: Annotated[Any, unused(_THEIRS)] = None
    user_location: Annotated[Any, unused(_THEIRS)] = None
    citations: Annotated[Any, unused(_THEIRS)] = None
    use_cache: Annotated[Any, unused(_THEIRS)] = None
    model: Annotated[Any, unused(_THEIRS)] = None
    mcp_server_name: Annotated[Any, unused(_THEIRS)] = None
    default_config: Annotated[Any, unused(_THEIRS)] = None
    configs: Annotated[Any, unused(_THEIRS)] = None
    display_width_px: Annotated[Any, unused(_THEIRS)] = None
    display_height_px: Annotated[Any, unused(_THEIRS)] = None
    display_number: Annotated[Any, unused(_THEIRS)] = None
    enable_zoom: Annotated[Any, unused(_THEIRS)] = None

    @property
    def searches(self) -> bool:
        return (self.type or "").startswith(SEARCH)

    def tool(self, number: int) -> Tool | None:
        """What the model may be told of; None: nothing here can run it, and no caller would."""
        if self.type not in (None, "custom"):
            if self.searches and self.name is not None:
                return search_tool(self.name)
            defined = next((found for kind, found in DEFINED.items() if (self.type or "").startswith(kind)), None)
            if defined is None or self.name is None:
                return None
            return Tool(name=self.name, description=defined[0], parameters=defined[1], strict=bool(self.strict))
        for name in ("name", "input_schema"):
            if getattr(self, name) is None:
                param = f"tools[{number}].{name}"
                raise InputError(f"{param}: a tool needs it", param=param, code="missing_required_parameter")
        assert self.name is not None and self.input_schema is not None
        description = self.description or ""
        if self.input_examples:
            examples = "\n".join(msgspec.json.encode(example).decode() for example in self.input_examples)
            description = f"{description}\n\nExamples of its input:\n{examples}".strip()
        return Tool(
            name=self.name,
            description=description,
            parameters=self.input_schema,
            strict=bool(self.strict),
            closed=self.strict is not False,
        )


class Toolbox:
    """The tools of a request: those told at once, those that must be found, and those found so far."""

    def __init__(self, given: list[AnthropicTool], messages: list[AnthropicInput], forced: str | None):
        """`forced`: the tool that must be called, which is told at once whatever it says itself."""
        self.told: list[Tool] = []
        self.deferred: dict[str, Tool] = {}
        self.searches: set[str] = set()
        for number, entry in enumerate(given):
            tool = entry.tool(number)
            if tool is None:
                _leave_out(entry.type or "")
            elif entry.defer_loading and not entry.searches and tool.name != forced:
                self.deferred[tool.name] = tool
            else:
                self.told.append(tool)
                self.searches |= {tool.name} if entry.searches else set()
        if self.deferred and not self.told:
            raise InputError("all tools have defer_loading; at least one must not", param="tools")
        self.found: dict[str, Tool] = {}
        self.find(name for message in messages for name in message.references())

    def find(self, names: Iterable[str]) -> list[Tool]:
        """Make deferred tools callable; returns those that are new."""
        new = [self.deferred[name] for name in names if name in self.deferred and name not in self.found]
        self.found.update({tool.name: tool for tool in new})
        return new


def _leave_out(kind: str) -> None:
    ignored, name = current().ignored, _UNPRINTABLE.sub("?", f"tools[{kind[:40]}]")
    if len(ignored) < MAX_NAMED or name in ignored:
        ignored.add(name)


Tools = Annotated[list[AnthropicTool], Meta(max_length=MAX_TOOLS)]
