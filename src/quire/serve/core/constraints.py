"""What an answer must look like, as the APIs ask for it, as one grammar. Refuses to know: how it is enforced."""

from __future__ import annotations

from typing import Any

import msgspec

from quire.serve.core.generation import naming
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
