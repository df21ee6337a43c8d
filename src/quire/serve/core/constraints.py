"""What an answer must look like, as the APIs ask for it, as one grammar. Refuses to know: how it is enforced."""

from __future__ import annotations

from typing import Any

import msgspec

from quire.serve.core.generation import naming
from quire.serve.openai.request_bodies import (
    GenerationRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    StructuredOutputs,
    TextFormat,
)
from quire.types.errors import InputError
from quire.types.grammar import GrammarKind, GrammarSpec

ANY_JSON = GrammarSpec("json_object")


def grammar(kind: GrammarKind, source: str, param: str) -> GrammarSpec:
    """A grammar from the field `param`, which errors name."""
    with naming(constraint=param):
        return GrammarSpec(kind, source)


def json_schema(schema: dict[str, Any] | None, param: str) -> GrammarSpec:
    """An answer that keeps to the schema; without one, any JSON object."""
    return grammar("json_schema", msgspec.json.encode(schema).decode(), param) if schema else ANY_JSON


def choice(options: list[str], param: str) -> GrammarSpec:
    if not options or not all(options):
        raise InputError(f"{param} needs at least one choice, and none that is empty", param=param)
    return grammar("choice", msgspec.json.encode(options).decode(), param)


def grammar_of(
    body: GenerationRequest, format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None = None
) -> tuple[str, GrammarSpec | None]:
    """The one constraint among all fields that may hold one, and the field that holds it."""
    found: dict[str, GrammarSpec] = {}
    if isinstance(format, JsonObjectFormat):
        found["response_format"] = ANY_JSON
    elif isinstance(format, JsonSchemaFormat):
        found["response_format"] = json_schema(format.json_schema.schema, "response_format")
    if body.guided_json is not None:
        found["guided_json"] = json_schema(body.guided_json, "guided_json")
    if body.guided_regex is not None:
        found["guided_regex"] = grammar("regex", body.guided_regex, "guided_regex")
    if body.guided_choice is not None:
        found["guided_choice"] = choice(body.guided_choice, "guided_choice")
    if body.guided_grammar is not None:
        found["guided_grammar"] = grammar("lark", body.guided_grammar, "guided_grammar")
    if body.structured_outputs is not None:
        found |= _structured(body.structured_outputs)
    if len(found) > 1:
        names = " and ".join(found)
        raise InputError(f"an answer takes one constraint, not {names}; leave the others out", param=[*found][-1])
    return next(iter(found.items()), ("", None))


def _structured(outputs: StructuredOutputs, field: str = "structured_outputs") -> dict[str, GrammarSpec]:
    found: dict[str, GrammarSpec] = {}
    if outputs.json is not None:
        found[f"{field}.json"] = json_schema(outputs.json, f"{field}.json")
    if outputs.json_object:
        found[f"{field}.json_object"] = ANY_JSON
    if outputs.regex is not None:
        found[f"{field}.regex"] = grammar("regex", outputs.regex, f"{field}.regex")
    if outputs.choice is not None:
        found[f"{field}.choice"] = choice(outputs.choice, f"{field}.choice")
    if outputs.grammar is not None:
        found[f"{field}.grammar"] = grammar("lark", outputs.grammar, f"{field}.grammar")
    return found
