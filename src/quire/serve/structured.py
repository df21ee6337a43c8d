"""What an answer must look like, as the APIs ask for it, as one grammar. Refuses to know: how it is enforced."""

from __future__ import annotations

from typing import Any

import msgspec

from quire.serve.schema import (
    GenerationRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    StructuredOutputs,
    TextFormat,
)
from quire.types.errors import InputError
from quire.types.grammar import GrammarSpec

ANY_JSON = GrammarSpec("json_object")


def json_schema(schema: dict[str, Any] | None) -> GrammarSpec:
    """An answer that keeps to the schema; without one, any JSON object."""
    return GrammarSpec("json_schema", msgspec.json.encode(schema).decode()) if schema else ANY_JSON


def choice(options: list[str], param: str) -> GrammarSpec:
    if not options or not all(options):
        raise InputError(f"{param} needs at least one choice, and none that is empty", param=param)
    return GrammarSpec("choice", msgspec.json.encode(options).decode())


def grammar_of(
    body: GenerationRequest, format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None = None
) -> tuple[str, GrammarSpec | None]:
    """The one constraint among all fields that may hold one, and the field that holds it."""
    found: dict[str, GrammarSpec] = {}
    if isinstance(format, JsonObjectFormat):
        found["response_format"] = ANY_JSON
    elif isinstance(format, JsonSchemaFormat):
        found["response_format"] = json_schema(format.json_schema.schema)
    if body.guided_json is not None:
        found["guided_json"] = json_schema(body.guided_json)
    if body.guided_regex is not None:
        found["guided_regex"] = GrammarSpec("regex", body.guided_regex)
    if body.guided_choice is not None:
        found["guided_choice"] = choice(body.guided_choice, "guided_choice")
    if body.guided_grammar is not None:
        found["guided_grammar"] = GrammarSpec("lark", body.guided_grammar)
    if body.structured_outputs is not None:
        found |= {f"structured_outputs.{name}": spec for name, spec in _structured(body.structured_outputs).items()}
    if len(found) > 1:
        names = " and ".join(found)
        raise InputError(f"an answer takes one constraint, not {names}; leave the others out", param=[*found][-1])
    return next(iter(found.items()), ("", None))


def _structured(outputs: StructuredOutputs) -> dict[str, GrammarSpec]:
    found: dict[str, GrammarSpec] = {}
    if outputs.json is not None:
        found["json"] = json_schema(outputs.json)
    if outputs.json_object:
        found["json_object"] = ANY_JSON
    if outputs.regex is not None:
        found["regex"] = GrammarSpec("regex", outputs.regex)
    if outputs.choice is not None:
        found["choice"] = choice(outputs.choice, "structured_outputs.choice")
    if outputs.grammar is not None:
        found["grammar"] = GrammarSpec("lark", outputs.grammar)
    return found
