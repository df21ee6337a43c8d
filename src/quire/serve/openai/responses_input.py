"""What a response answers: items as they are sent, referred to and kept, and as messages for the chat template.

Refuses to know: how an answer is made.
"""

from __future__ import annotations

from typing import Any

import msgspec

from quire.serve.core.context import current
from quire.serve.core.turns import ToolChoice
from quire.serve.openai.carried_thoughts import thought_in
from quire.serve.openai.responses_bodies import (
    AllowedFunctions,
    ConversationId,
    InputItem,
    NamedCustomTool,
    NamedFunction,
    Part,
    ResponseRequest,
)
from quire.serve.openai.responses_items import item_id
from quire.serve.openai.responses_store import Kept
from quire.text import Tool
from quire.types.errors import InputError

_PREFIX = {
    "message": "msg", "function_call": "fc", "function_call_output": "fco", "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco", "reasoning": "rs",
}  # fmt: skip


def items_of(
    given: str | list[InputItem] | None, kept: Kept | None, owner: str, param: str = "input"
) -> list[InputItem]:
    """The items of a body, each with an id; references followed and thoughts that were sent back read."""
    if given is None:
        return []
    if isinstance(given, str):
        given = [InputItem(role="user", content=[Part("input_text", given)])]
    return [_settled(item, kept, owner, f"{param}[{number}]") for number, item in enumerate(given)]


def _settled(item: InputItem, kept: Kept | None, owner: str, param: str) -> InputItem:
    if item.kind == "item_reference":
        found = kept.item(item.id or "", owner) if kept else None
        if found is None:
            raise InputError(
                f"no stored item {(item.id or '')[:64]!r}; it was never kept or has made room", param=param
            )
        return found
    item.type = item.type or "message"
    item.id = item.id or item_id(_PREFIX[item.type])
    if isinstance(item.content, str):
        said = item.role == "assistant"
        item.content = [Part("output_text" if said else "input_text", item.content, annotations=[] if said else None)]
    if item.encrypted_content and not item.content:
        thought = thought_in(item.encrypted_content)
        if thought is None:
            raise InputError(
                "encrypted_content is not what a response had",
                param=f"{param}.encrypted_content",
                code="invalid_encrypted_content",
            )
        item.content = [Part("reasoning_text", thought)]
    return item


def earlier_items(body: ResponseRequest, kept: Kept | None, owner: str) -> list[InputItem]:
    """What was said before, by the response or the conversation that this one goes on from."""
    if body.previous_response_id is not None and body.conversation is not None:
        raise InputError("a response goes on from a response or a conversation, not both", param="conversation")
    if body.previous_response_id is not None:
        return (kept or Kept()).before(body.previous_response_id, owner)
    if (id := conversation_of(body)) is not None:
        record = (kept or Kept()).conversation(id, owner)
        return msgspec.convert(record.items, list[InputItem])
    return []


def conversation_of(body: ResponseRequest) -> str | None:
    given = body.conversation
    return given.id if isinstance(given, ConversationId) else given


def messages_of(items: list[InputItem]) -> list[dict[str, Any]]:
    """As chat templates want them; calls and thoughts that follow each other are one turn of the assistant's."""
    out: list[dict[str, Any]] = []
    for number, item in enumerate(items):
        message = item.plain(number)
        last = out[-1] if out else None
        if last and last["role"] == message["role"] == "assistant" and ("tool_calls" in message or not last["content"]):
            last["content"] = last["content"] or message["content"]
            if calls := last.get("tool_calls", []) + message.get("tool_calls", []):
                last["tool_calls"] = calls
        else:
            out.append(message)
    return out


def tools_of(body: ResponseRequest) -> list[Tool]:
    """The tools that the model is told of; others are named among what was ignored."""
    out = []
    for number, given in enumerate(body.tools or ()):
        tool = given.tool(number)
        if tool is None:
            current().ignored.add(f"tools[].{given.type}")
        else:
            out.append(tool)
    return out


def choice_of(body: ResponseRequest) -> ToolChoice:
    given, parallel = body.tool_choice, body.parallel_tool_calls is not False
    if isinstance(given, NamedFunction | NamedCustomTool):
        return ToolChoice(required=True, only=[given.name], parallel=parallel)
    if isinstance(given, AllowedFunctions):
        names = [tool.name for tool in given.tools]
        return ToolChoice(required=given.mode == "required", only=names, parallel=parallel)
    return ToolChoice(required=given == "required", none=given == "none", parallel=parallel)
