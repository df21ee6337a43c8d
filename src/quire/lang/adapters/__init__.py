"""Other frameworks' programs over Quire's prompts: `adapters.dspy`, `adapters.langchain`. Each imports its framework.

Several answers become branches of one request, a wanted shape becomes a grammar, and a conversation that comes back
goes on from its exact tokens. Refuses to know: engines, HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.lang.conversations import Conversations
from quire.lang.model import Model
from quire.lang.pieces import gen
from quire.lang.prompt import Forks
from quire.lang.state import Usage
from quire.types.errors import InputError

ANY_OBJECT = {"type": "object"}


class Chats:
    """What both adapters do: a list of messages and OpenAI's words for how to answer, to branches of a prompt."""

    def __init__(self, model: Model | str | Any):
        self.model = model if isinstance(model, Model) else Model(model)
        self._conversations = Conversations(self.model)

    def answer(
        self, messages: Sequence[Mapping[str, Any]], *, n: int | None = None, shape: Any = None, **sampling: Any
    ) -> Forks:
        """`shape` is a JSON schema or a type that has one."""
        plain = [{"role": message["role"], "content": _text(message.get("content"))} for message in messages]
        given = {name: value for name, value in sampling.items() if value is not None}
        return self._conversations.answer(plain, gen(schema=shape, **given), n or 1)


def shape_of(response_format: Any) -> Any:
    """OpenAI's response_format as what the answer must look like; None: anything."""
    if not isinstance(response_format, Mapping):
        return response_format
    kind = response_format.get("type")
    if kind == "json_schema":
        return response_format["json_schema"]["schema"]
    return ANY_OBJECT if kind == "json_object" else None


def usage_of(branches: Forks) -> dict[str, int]:
    """What a call has cost, in OpenAI's words. Branches share what came before them, so only the last calls count."""
    spent = sum((branch.last_usage for branch in branches), Usage())
    return {
        "prompt_tokens": spent.prompt_tokens,
        "completion_tokens": spent.output_tokens,
        "total_tokens": spent.prompt_tokens + spent.output_tokens,
    }


def _text(content: Any) -> str:
    """A message's content as one text."""
    if isinstance(content, str) or content is None:
        return content or ""
    parts: list[Any] = [part.get("text") if isinstance(part, Mapping) else part for part in content]
    if not all(isinstance(part, str) for part in parts):
        raise InputError("a message may hold text only, no images or other media", param="messages")
    return "\n".join(parts)
