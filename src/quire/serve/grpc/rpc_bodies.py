"""Messages of the gRPC contract as what the server works with: turns, tools, sampling parameters.

Refuses to know: servers, how an answer is made.
"""

from __future__ import annotations

from typing import Any

import msgspec

from quire.serve.core.constraints import ANY_JSON, choice, grammar
from quire.serve.core.turns import ToolChoice, Turn, plain_call
from quire.text import Tool
from quire.types.blend import BlendParams
from quire.types.errors import InputError
from quire.types.grammar import GrammarSpec
from quire.types.sampling_params import SamplingParams

CONSTRAINT = "sampling.grammar"
ROLES = ("system", "user", "assistant", "tool")


def params_of(sampling: Any) -> SamplingParams:
    """Fields that were set, under the names both sides use."""
    given = {field.name: value for field, value in sampling.ListFields()}
    for name in ("stop", "stop_token_ids", "bad_words"):
        if name in given:
            given[name] = list(given[name])
    if "logit_bias" in given:
        given["logit_bias"] = dict(given["logit_bias"])
    if "grammar" in given:
        given["grammar"] = grammar_of(given["grammar"])
    return SamplingParams(**given)


def grammar_of(given: Any) -> GrammarSpec | None:
    kind = given.WhichOneof("kind")
    if kind is None:
        raise InputError("a grammar needs one of json_schema, json_object, regex, choice and lark", param=CONSTRAINT)
    if kind == "json_object":
        return ANY_JSON if given.json_object else None
    if kind == "choice":
        return choice(list(given.choice.options), CONSTRAINT)
    return grammar(kind, getattr(given, kind), CONSTRAINT)


def blend_of(body: Any) -> BlendParams | None:
    """Fields that were set, under the names both sides use."""
    if not body.HasField("blend"):
        return None
    given = {field.name: value for field, value in body.blend.ListFields()}
    given["chunks"] = [(span.start, span.end) for span in body.blend.chunks]
    if not given["chunks"] and body.WhichOneof("input") != "tokens":
        del given["chunks"]  # of a text, a separator is wanted; of token ids, it says that there are none
    return BlendParams(**given)


def turn_of(chat: Any, params: SamplingParams) -> Turn:
    if not chat.messages:
        raise InputError("a chat needs messages", param="chat")
    modes = {0: {}, 1: {"none": True}, 2: {"required": True}}
    if chat.tool_choice.mode not in modes:
        raise InputError(f"tool_choice.mode must be 0, 1 or 2, got {chat.tool_choice.mode}", param="tool_choice")
    return Turn(
        messages=[message_of(message) for message in chat.messages],
        params=params,
        tools=[tool_of(tool, number) for number, tool in enumerate(chat.tools)],
        choice=ToolChoice(
            only=list(chat.tool_choice.only) or None,
            parallel=not chat.tool_choice.single,
            **modes[chat.tool_choice.mode],
        ),
        variables=parsed(chat.template_variables, "template_variables") if chat.template_variables else {},
        messages_param="chat",
        constraint=CONSTRAINT,
    )


def message_of(message: Any) -> dict[str, Any]:
    if message.role not in ROLES:
        raise InputError(f"role must be one of {', '.join(ROLES)}, got {message.role[:64]!r}", param="chat")
    out: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.role == "tool":
        out["tool_call_id"] = message.tool_call_id
    if message.reasoning:
        out["reasoning_content"] = message.reasoning
    if message.tool_calls:
        out["tool_calls"] = [plain_call(call.id, call.name, call.arguments or "{}") for call in message.tool_calls]
    return out


def tool_of(tool: Any, number: int) -> Tool:
    if not tool.name:
        raise InputError(f"tools[{number}] needs a name", param="tools")
    schema = parsed(tool.parameters, f"tools[{number}].parameters") if tool.parameters else {}
    return Tool(name=tool.name, description=tool.description, parameters=schema, strict=tool.strict)


def parsed(text: str, param: str) -> dict[str, Any]:
    """A JSON object in a field of text."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise InputError(f"{param} must be a JSON object: {error}", param=param) from None
