"""What an answer must look like, as the APIs ask for it, as one grammar. Refuses to know: how it is enforced."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from quire.serve.core.generation import naming
from quire.types.errors import InputError
from quire.types.grammar import CLOSED, GrammarKind, GrammarSpec

ANY_JSON = GrammarSpec("json_object")
GBNF_RULE = re.compile(r"^\s*[A-Za-z_][\w-]*\s*::=", re.MULTILINE)


def grammar(kind: GrammarKind, source: str, param: str) -> GrammarSpec:
    """A grammar from the field `param`, which errors name."""
    with naming(constraint=param):
        return GrammarSpec(kind, source)


def context_free(source: str, param: str) -> GrammarSpec:
    """A grammar in Lark's notation, or in GBNF (`root ::= ...`)."""
    return grammar("gbnf" if GBNF_RULE.search(source) else "lark", source, param)


def json_schema(
    schema: dict[str, Any] | str | None, param: str, *, strict: bool | None = None, whitespace: str | None = None
) -> GrammarSpec:
    """An answer that keeps to the schema (which may be given as text); without one, any JSON object. Objects have no
    properties but those declared, unless the schema says otherwise, or `strict` is false. `whitespace`: a pattern for
    what may stand between the parts, instead of one space."""
    if isinstance(schema, str):
        try:
            schema = msgspec.json.decode(schema)
        except msgspec.DecodeError as error:
            raise InputError(f"{param} is no JSON: {error}", param=param, code="invalid_grammar") from None
        if not isinstance(schema, dict):
            raise InputError(f"{param} must be a JSON schema, which is an object", param=param, code="invalid_grammar")
    if not schema:
        return ANY_JSON
    made = {CLOSED: strict is not False} | schema
    if whitespace is not None:
        separators = {"item_separator": ",", "key_separator": ":"}
        made["x-guidance"] = {"whitespace_pattern": whitespace} | separators
    return grammar("json_schema", msgspec.json.encode(made).decode(), param)


def choice(options: list[str], param: str) -> GrammarSpec:
    if not options or not all(options):
        raise InputError(f"{param} needs at least one choice, and none that is empty", param=param)
    return grammar("choice", msgspec.json.encode(options).decode(), param)
