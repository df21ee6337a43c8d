"""DSPy over Quire: `dspy.configure(lm=QuireLM("smollm2-135m"), adapter=dspy.JSONAdapter())`.

A signature's types reach the engine as a grammar, several completions are branches of one request. Refuses to know:
how signatures are written into prompts, which is DSPy's business.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import dspy

from quire.lang.adapters import Chats, shape_of, usage_of
from quire.lang.model import Model

PARAMETERS = ("temperature", "max_tokens", "n", "stop", "seed", "top_p", "presence_penalty", "frequency_penalty")


class QuireLM(dspy.BaseLM):
    """A language model for DSPy. `model` is a Model, or what makes one: a model's name, an LLM, a server's address."""

    def __init__(
        self,
        model: Model | str | Any = "smollm2-135m",
        *,
        temperature: float = 0.0,
        max_tokens: int = 512,
        **defaults: Any,
    ):
        name = model if isinstance(model, str) else "quire"
        super().__init__(model=name, temperature=temperature, max_tokens=max_tokens, cache=False, **defaults)
        self.chats = Chats(model)

    @property
    def supports_response_schema(self) -> bool:
        return True

    @property
    def supported_params(self) -> set[str]:
        return {*PARAMETERS, "response_format"}

    def forward(
        self, prompt: str | None = None, messages: list[dict[str, Any]] | None = None, **given: Any
    ) -> SimpleNamespace:
        """An answer in the shape of OpenAI's chat completions."""
        wanted = {**self.kwargs, **given}
        branches = self.chats.answer(
            messages or [{"role": "user", "content": prompt or ""}],
            shape=shape_of(wanted.get("response_format")),
            **{name: wanted.get(name) for name in PARAMETERS},
        )
        choices = [
            SimpleNamespace(index=index, finish_reason="stop", message=_message(branch.text))
            for index, branch in enumerate(branches)
        ]
        return SimpleNamespace(choices=choices, usage=usage_of(branches), model=self.model)

    async def aforward(
        self, prompt: str | None = None, messages: list[dict[str, Any]] | None = None, **given: Any
    ) -> SimpleNamespace:
        return await asyncio.to_thread(self.forward, prompt, messages, **given)


def _message(text: str) -> SimpleNamespace:
    return SimpleNamespace(role="assistant", content=text)
