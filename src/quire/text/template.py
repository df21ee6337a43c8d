"""Chat templates: messages to the one text a model was trained to continue.

A template comes with the model and is a program, so it runs in the sandbox. Everything that goes wrong in it is
the caller's to know: the messages did not suit it, or it is broken; neither may hurt the server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

from quire.types.errors import InputError

if TYPE_CHECKING:
    from jinja2 import Template

    from quire.text.sandbox import Sandbox

MAX_TEMPLATE = 256 << 10
MAX_DEPTH = 64  # of what a caller puts into messages and tools

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
PLAIN = (
    "{% for message in messages %}{{ message['role'] | capitalize + ': ' + message['content'] + '\\n\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)


@cache
def _sandbox() -> Sandbox:
    from quire.text.sandbox import Sandbox
    from quire.text.template_tools import filters, functions

    return Sandbox(filters(), functions())


class ChatTemplate:
    """One template. `named` are the special tokens it may write (bos_token, eos_token, ...)."""

    def __init__(self, source: str, named: Mapping[str, str] | None = None):
        self.source = source
        self._named = dict(named or {})

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The text of a conversation; raises InputError if template and messages do not suit each other."""
        if not messages:
            raise InputError("messages is empty; send at least one", param="messages")
        known: dict[str, Any] = {"documents": None, **self._named, **variables}
        known |= {"messages": list(messages), "tools": list(tools) if tools else None}
        known["add_generation_prompt"] = add_generation_prompt
        plain = {name: _plain(value, MAX_DEPTH) for name, value in known.items()}
        template = self._template
        try:
            return _sandbox().run(template, plain)
        except Exception as error:  # a template is a program: anything may come out of it
            reason = str(error) or type(error).__name__
            raise InputError(f"the model's chat template refused the messages: {reason}", param="messages") from error

    @cached_property
    def _template(self) -> Template:
        if len(self.source) > MAX_TEMPLATE:
            raise InputError(
                f"the model's chat template has {len(self.source)} characters, more than {MAX_TEMPLATE}; "
                "render the conversation yourself and use completions"
            )
        try:
            return _sandbox().compile_text(self.source)
        except Exception as error:  # syntax errors, nesting too deep for Python's own compiler, ...
            raise InputError(
                f"the model's chat template cannot be read: {error or type(error).__name__}; "
                "render the conversation yourself and use completions"
            ) from error


def _plain(value: Any, depth: int) -> Any:
    """The value rebuilt of JSON's types, so that a template meets no object with ideas of its own."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if depth == 0:
        raise InputError(f"messages and tools may be nested {MAX_DEPTH} levels deep at most", param="messages")
    if isinstance(value, Mapping):
        if not all(type(key) is str for key in value):
            raise InputError("objects in messages and tools must have text keys", param="messages")
        return {key: _plain(item, depth - 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, depth - 1) for item in value]
    if isinstance(value, str):  # an enumeration or the like
        return str.__str__(value)
    raise InputError(f"messages and tools may hold JSON values only, not {type(value).__name__}", param="messages")
