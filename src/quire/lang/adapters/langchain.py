"""LangChain over Quire: `ChatQuire(model="smollm2-135m") | parser`, `.with_structured_output(Schema)`, `.batch([...])`.

Refuses to know: chains, parsers, memory, which are LangChain's business.
"""

from __future__ import annotations

import json
from typing import Any

from langchain_core.callbacks import CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, convert_to_openai_messages
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.runnables import Runnable, RunnableLambda
from pydantic import PrivateAttr

from quire.lang.adapters import Chats, shape_of, usage_of


class ChatQuire(BaseChatModel):
    """A chat model for LangChain. `model` is a Model, or what makes one: a model's name, an LLM, a server's address."""

    model: Any = "smollm2-135m"
    temperature: float = 0.0
    max_tokens: int = 512
    n: int = 1
    top_p: float | None = None
    seed: int | None = None
    _chats: Chats = PrivateAttr()

    def model_post_init(self, context: Any, /) -> None:
        super().model_post_init(context)
        self._chats = Chats(self.model)

    @property
    def _llm_type(self) -> str:
        return "quire"

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **given: Any,
    ) -> ChatResult:
        wanted = {name: getattr(self, name) for name in ("n", "temperature", "max_tokens", "top_p", "seed")} | given
        shape = wanted.pop("shape", None) or shape_of(wanted.pop("response_format", None))
        branches = self._chats.answer(_plain(messages), shape=shape, stop=stop, **wanted)
        usage = usage_of(branches)
        counts = {
            "input_tokens": usage["prompt_tokens"],
            "output_tokens": usage["completion_tokens"],
            "total_tokens": usage["total_tokens"],
        }
        first = AIMessage(content=branches[0].text, usage_metadata=counts)
        others = [AIMessage(content=branch.text) for branch in branches[1:]]
        return ChatResult(
            generations=[ChatGeneration(message=message) for message in (first, *others)],
            llm_output={"token_usage": usage},
        )

    def with_structured_output(self, schema: Any, *, include_raw: bool = False, **given: Any) -> Runnable[Any, Any]:
        """Answers of a shape: a JSON schema, of which they are a dictionary, or a pydantic model. The grammar sees to
        it, so there is nothing to go wrong in parsing."""
        read = getattr(schema, "model_validate_json", json.loads)

        def parsed(message: AIMessage) -> Any:
            value = read(str(message.content))
            return {"raw": message, "parsed": value, "parsing_error": None} if include_raw else value

        return self.bind(shape=schema, **given) | RunnableLambda(parsed)


def _plain(messages: list[BaseMessage]) -> list[dict[str, Any]]:
    found = convert_to_openai_messages(messages)
    return found if isinstance(found, list) else [found]
