"""Custom tools: tools that take plain text, perhaps in a grammar, offered to the model as functions of one argument.

A regular expression binds that argument wherever calls are bound. A Lark grammar binds it where the tool must be called
and no other may be; elsewhere the model is told of it. Refuses to know: bodies, how calls are written.
"""

from __future__ import annotations

from quire.text import Tool
from quire.text.text_inputs import INPUT
from quire.types.grammar import GrammarSpec


def custom_tool(name: str, description: str, grammar: tuple[str, str] | None) -> Tool:
    """`grammar`: its syntax (lark or regex) and its definition."""
    text: dict[str, str] = {"type": "string"}
    bound = None
    if grammar is not None:
        syntax, definition = grammar
        description = f"{description}\nThe input must keep to this {syntax} grammar:\n{definition}".strip()
        if syntax == "regex":
            text["pattern"] = f"^(?:{definition})$"
        else:
            bound = GrammarSpec("lark", definition)
    schema = {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}
    return Tool(
        name=name, description=description, parameters=schema, strict="pattern" in text, takes_text=True, grammar=bound
    )
