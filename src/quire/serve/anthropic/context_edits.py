"""`context_management`: old tool results and thoughts leave a conversation before the model reads it.

Works on messages as chat templates take them. Refuses to know: how tokens are counted (it is given a function), HTTP.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

CLEARED = "[cleared to save context]"  # what stands where a result was
TRIGGER, KEPT_USES, KEPT_TURNS = 100_000, 3, 1  # as published
Number = Annotated[int, Meta(ge=0, le=1 << 30)]
Conversation = list[dict[str, Any]]
Count = Callable[[Conversation], Awaitable[int]]


class InputTokenLimit(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="input_tokens"):
    value: Number


class ToolUses(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="tool_uses"):
    value: Number


class ThinkingTurns(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="thinking_turns"):
    value: Annotated[int, Meta(ge=1, le=1 << 30)]


class AllTurns(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="all"):
    pass


class ClearToolUses(
    msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="clear_tool_uses_20250919"
):
    trigger: InputTokenLimit | ToolUses | None = None
    keep: ToolUses | None = None
    clear_at_least: InputTokenLimit | None = None
    exclude_tools: list[str] | None = None
    clear_tool_inputs: bool | list[str] | None = None


class ClearThinking(
    msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="clear_thinking_20251015"
):
    keep: ThinkingTurns | AllTurns | Literal["all"] | None = None


class Compact(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="compact_20260112"):
    """Accepted without effect: nothing is summed up here."""

    trigger: InputTokenLimit | None = None
    instructions: str | None = None
    pause_after_compaction: bool | None = None


class ContextManagement(msgspec.Struct, forbid_unknown_fields=True):
    edits: list[ClearToolUses | ClearThinking | Compact] = []


class AppliedEdit(msgspec.Struct, kw_only=True):
    type: str
    cleared_input_tokens: int
    cleared_tool_uses: int | UnsetType = UNSET
    cleared_thinking_turns: int | UnsetType = UNSET


class Edited(msgspec.Struct):
    """What the model will read, and what became of the rest."""

    messages: Conversation
    original_tokens: int = 0
    applied: list[AppliedEdit] = []


async def edited(messages: Conversation, management: ContextManagement | None, count: Count) -> Edited:
    """Carry out the edits, one after another."""
    if management is None:
        return Edited(messages)
    tokens = await count(messages)
    out = Edited(messages, tokens)
    for edit in management.edits:
        if isinstance(edit, Compact) or (isinstance(edit, ClearToolUses) and not _triggered(edit, messages, tokens)):
            continue
        changed, gone = _cleared_uses(edit, messages) if isinstance(edit, ClearToolUses) else _unthought(edit, messages)
        if not gone:
            continue
        left = await count(changed)
        least = edit.clear_at_least if isinstance(edit, ClearToolUses) else None
        if least is not None and tokens - left < least.value:
            continue
        applied = AppliedEdit(type=str(edit.__struct_config__.tag), cleared_input_tokens=max(0, tokens - left))
        if isinstance(edit, ClearToolUses):
            applied.cleared_tool_uses = gone
        else:
            applied.cleared_thinking_turns = gone
        out.applied.append(applied)
        messages, tokens = changed, left
    out.messages = messages
    return out


def _triggered(edit: ClearToolUses, messages: Conversation, tokens: int) -> bool:
    if isinstance(edit.trigger, ToolUses):
        return sum(message["role"] == "tool" for message in messages) > edit.trigger.value
    return tokens > (TRIGGER if edit.trigger is None else edit.trigger.value)


def _cleared_uses(edit: ClearToolUses, messages: Conversation) -> tuple[Conversation, int]:
    """(the conversation without the oldest results, how many went)."""
    names = {call["id"]: call["function"]["name"] for m in messages for call in m.get("tool_calls", ())}
    results = [m["tool_call_id"] for m in messages if m["role"] == "tool"]
    keep = KEPT_USES if edit.keep is None else edit.keep.value
    spared = set(results[-keep:]) if keep else set()
    spared |= {id for id in results if names.get(id) in (edit.exclude_tools or ())}
    going = {m["tool_call_id"] for m in messages if m["role"] == "tool" and m["content"] != CLEARED} - spared
    what = edit.clear_tool_inputs or []
    emptied = {id for id in going if what is True or (isinstance(what, list) and names.get(id) in what)}

    def changed(message: dict[str, Any]) -> dict[str, Any]:
        if message["role"] == "tool" and message["tool_call_id"] in going:
            return {**message, "content": CLEARED}
        if any(call["id"] in emptied for call in message.get("tool_calls", ())):
            return {**message, "tool_calls": [_emptied(c) if c["id"] in emptied else c for c in message["tool_calls"]]}
        return message

    return [changed(message) for message in messages], len(going)


def _emptied(call: dict[str, Any]) -> dict[str, Any]:
    return {**call, "function": {**call["function"], "arguments": {}}}


def _unthought(edit: ClearThinking, messages: Conversation) -> tuple[Conversation, int]:
    """(the conversation without the thoughts of older turns, of how many turns). A turn lasts from one message of the
    user's to the next, calls and their results included."""
    if edit.keep == "all" or isinstance(edit.keep, AllTurns):
        return messages, 0
    turn, turns = 0, []
    for message in messages:
        turn += message["role"] == "user"
        turns.append(turn)
    thoughtful = sorted({turn for turn, m in zip(turns, messages, strict=True) if m.get("reasoning_content")})
    keep = edit.keep.value if isinstance(edit.keep, ThinkingTurns) else KEPT_TURNS
    going = set(thoughtful[: max(0, len(thoughtful) - keep)])
    out = [
        {name: value for name, value in m.items() if name != "reasoning_content"} if turn in going else m
        for turn, m in zip(turns, messages, strict=True)
    ]
    return out, len(going)
