"""What OpenAI's generation bodies ask of the sampler: checks, parameters, the one grammar.

Refuses to know: how a request is carried out.
"""

from __future__ import annotations

from typing import Any

from quire.serve.core.constraints import ANY_JSON, choice, grammar, json_schema
from quire.serve.core.fields import refuse_unsupported
from quire.serve.core.generation import Serving, hold_session
from quire.serve.openai.request_bodies import (
    GenerationRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    StructuredOutputs,
    TextFormat,
)
from quire.types.errors import InputError
from quire.types.grammar import GrammarSpec
from quire.types.sampling_params import SamplingParams

# Fields of a body that mean the same, under the same name, to the sampler.
_SHARED = [name for name in GenerationRequest.__struct_fields__ if name in SamplingParams.__struct_fields__]


def check(serving: Serving, body: GenerationRequest) -> None:
    """Refuse, before any work, what can be seen from the body alone."""
    serving.check_model(body.model)
    refuse_unsupported(body)
    hold_session(body.session_id, body.session_ttl)
    if body.stream_options is not None and not body.stream:
        raise InputError("stream_options needs stream to be true", param="stream_options")
    if body.stream and body.prompt_logprobs is not None:
        raise InputError("prompt_logprobs cannot be streamed; set stream to false", param="prompt_logprobs")


def sampling_params(body: GenerationRequest, **changes: Any) -> SamplingParams:
    """The sampler's view of a body; `changes` are what the route decides for itself."""
    given = {name: value for name in _SHARED if (value := getattr(body, name)) is not None}
    if isinstance(body.stop, str):
        given["stop"] = [body.stop]
    return SamplingParams(**(given | changes))


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
