"""Messages of Anthropic's API and the blocks they are made of, as strict structs, and what they are to a chat template.

Refuses to know: requests around them, how an answer is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from quire.serve.core.turns import plain_call


class CacheControl(msgspec.Struct):
    """Accepted everywhere without effect: equal prefixes are found without it."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class _Block(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    cache_control: CacheControl | None = None


class TextBlock(_Block, tag="text"):
    text: str
    citations: list[Any] | None = None  # of an answer that is sent back


class PlainSource(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    data: str
    media_type: Literal["text/plain"] | None = None


class BlocksSource(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="content"):
    content: str | list[TextBlock]


class DocumentBlock(_Block, tag="document"):
    source: PlainSource | BlocksSource
    title: str | None = None
    context: str | None = None
    citations: Any = None

    @property
    def text(self) -> str:
        body = self.source.data if isinstance(self.source, PlainSource) else text_of(self.source.content)
        return "\n".join(part for part in (self.title, self.context, body) if part)


class SearchResultBlock(_Block, tag="search_result"):
    source: str
    title: str
    content: list[TextBlock]
    citations: Any = None

    @property
    def text(self) -> str:
        return "\n".join([self.title, self.source, text_of(self.content)])


class ToolReference(_Block, tag="tool_reference"):
    tool_name: str

    @property
    def text(self) -> str:
        return self.tool_name


class ToolUseBlock(_Block, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]
    caller: Any = None


class ToolResultBlock(_Block, tag="tool_result"):
    tool_use_id: str
    content: str | list[TextBlock | DocumentBlock | SearchResultBlock | ToolReference] | None = None
    is_error: bool | None = None
    toolset_name: str | None = None

    def references(self) -> list[str]:
        """Deferred tools that a search of the caller's own has found."""
        parts = self.content if isinstance(self.content, list) else ()
        return [part.tool_name for part in parts if isinstance(part, ToolReference)]


class ThinkingBlock(_Block, tag="thinking"):
    thinking: str
    signature: str = ""


class RedactedThinkingBlock(_Block, tag="redacted_thinking"):
    data: str


class CompactionBlock(_Block, tag="compaction"):
    """What a conversation so far was summed up as, elsewhere."""

    content: str | None = None


class ServerToolUse(_Block, tag="server_tool_use"):
    id: str
    name: str
    input: dict[str, Any]
    caller: Any = None


class McpToolUse(ServerToolUse, tag="mcp_tool_use"):
    server_name: str = ""


class _ServerResult(_Block):
    tool_use_id: str
    content: Any = None
    caller: Any = None

    def references(self) -> list[str]:
        return []

    def words(self, tools: Tools) -> str:
        return self.content if isinstance(self.content, str) else msgspec.json.encode(self.content).decode()


class SearchOutcome(msgspec.Struct, kw_only=True):
    """What a search for tools found, or why it failed."""

    type: str
    tool_references: list[ToolReference] = []
    error_code: str = ""


def found_words(outcome: SearchOutcome, tools: Tools) -> str:
    """What the model reads of a search."""
    if outcome.error_code:
        return f"The search failed: {outcome.error_code}."
    return text_of(outcome.tool_references, tools) or "No tool was found."


def tool_message(id: str, words: str) -> dict[str, Any]:
    return {"role": "tool", "content": words, "tool_call_id": id}


class ToolSearchResult(_ServerResult, tag="tool_search_tool_result"):
    content: SearchOutcome

    def references(self) -> list[str]:
        return [reference.tool_name for reference in self.content.tool_references]

    def words(self, tools: Tools) -> str:
        return found_words(self.content, tools)


class McpToolResult(_ServerResult, tag="mcp_tool_result"):
    is_error: bool | None = None


class WebSearchResult(_ServerResult, tag="web_search_tool_result"):
    pass


class WebFetchResult(_ServerResult, tag="web_fetch_tool_result"):
    pass


class CodeResult(_ServerResult, tag="code_execution_tool_result"):
    pass


class BashCodeResult(_ServerResult, tag="bash_code_execution_tool_result"):
    pass


class EditorCodeResult(_ServerResult, tag="text_editor_code_execution_tool_result"):
    pass


ServerResult = (
    ToolSearchResult | McpToolResult | WebSearchResult | WebFetchResult | CodeResult | BashCodeResult | EditorCodeResult
)


Tools = Mapping[str, str]  # what deferred tools are, in words, by name


def text_of(content: Any, tools: Tools | None = None) -> str:
    """The words of what a message or a result holds; a tool that it refers to is described in its place."""
    if not isinstance(content, list):
        return content or ""
    return "\n".join((tools or {}).get(getattr(block, "tool_name", ""), block.text) for block in content)


class AnthropicSystem(msgspec.Struct, forbid_unknown_fields=True, tag_field="role", tag="system"):
    content: str | list[TextBlock]

    def plain(self, tools: Tools) -> list[dict[str, Any]]:
        return [{"role": "system", "content": text_of(self.content)}]

    def references(self) -> list[str]:
        return []


class AnthropicUser(msgspec.Struct, forbid_unknown_fields=True, tag_field="role", tag="user"):
    content: str | list[TextBlock | DocumentBlock | SearchResultBlock | ToolResultBlock]

    def plain(self, tools: Tools) -> list[dict[str, Any]]:
        """What tools returned comes first, each a message of its own."""
        if isinstance(self.content, str):
            return [{"role": "user", "content": self.content}]
        results = [block for block in self.content if isinstance(block, ToolResultBlock)]
        texts = [block for block in self.content if not isinstance(block, ToolResultBlock)]
        out = [tool_message(block.tool_use_id, text_of(block.content, tools)) for block in results]
        return out + ([{"role": "user", "content": text_of(texts)}] if texts or not out else [])

    def references(self) -> list[str]:
        blocks = self.content if isinstance(self.content, list) else ()
        return [name for block in blocks if isinstance(block, ToolResultBlock) for name in block.references()]


_AssistantBlock = (
    TextBlock
    | ToolUseBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | CompactionBlock
    | ServerToolUse
    | McpToolUse
    | ServerResult
)


class AnthropicAssistant(msgspec.Struct, forbid_unknown_fields=True, tag_field="role", tag="assistant"):
    content: str | list[_AssistantBlock]

    def plain(self, tools: Tools) -> list[dict[str, Any]]:
        """One message, or several where the server that answered ran tools itself."""
        if isinstance(self.content, str):
            return [{"role": "assistant", "content": self.content}]
        out: list[dict[str, Any]] = []
        part: list[_AssistantBlock] = []
        for block in self.content:
            if isinstance(block, _ServerResult):
                out += [*_assistant(part), tool_message(block.tool_use_id, block.words(tools))]
                part = []
            else:
                part.append(block)
        return out + (_assistant(part) if part or not out else [])

    def references(self) -> list[str]:
        blocks = self.content if isinstance(self.content, list) else ()
        return [name for block in blocks if isinstance(block, _ServerResult) for name in block.references()]


def _assistant(blocks: list[_AssistantBlock]) -> list[dict[str, Any]]:
    texts = [block.text for block in blocks if isinstance(block, TextBlock)]
    texts += [block.content or "" for block in blocks if isinstance(block, CompactionBlock)]
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if thoughts := [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls := [block for block in blocks if isinstance(block, ToolUseBlock | ServerToolUse)]:
        message["tool_calls"] = [plain_call(call.id, call.name, call.input) for call in calls]
    return [message]


AnthropicInput = AnthropicUser | AnthropicAssistant | AnthropicSystem
Messages = Annotated[list[AnthropicInput], Meta(min_length=1)]
