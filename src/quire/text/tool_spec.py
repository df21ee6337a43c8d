"""A tool as it is offered to a model. Refuses to know: how calls of it are written."""

from __future__ import annotations

from typing import Any

import msgspec

from quire.types.grammar import GrammarSpec


class Tool(msgspec.Struct, kw_only=True):
    """A function the model may ask its caller to run."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = {}
    strict: bool = False
    takes_text: bool = False  # its one argument is a text (text_inputs.py)
    grammar: GrammarSpec | None = None  # ... which keeps to this, where the tool must be called and no other may be
    closed: bool = True  # bound by its schema wherever calls are, and no other arguments than those declared
    bound: bool = True  # whether its schema can be kept to

    def described(self) -> dict[str, Any]:
        """As chat templates expect it."""
        parameters = self.parameters or {"type": "object", "properties": {}}
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": parameters},
        }
