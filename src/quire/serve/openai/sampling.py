"""What OpenAI's generation bodies ask of the sampler: checks, parameters, the one grammar.

Refuses to know: how a request is carried out.
"""

from __future__ import annotations

from typing import Any

import msgspec

from quire.serve.core.constraints import ANY_JSON, choice, context_free, grammar, json_schema
from quire.serve.core.fields import refuse_unsupported
from quire.serve.core.generation import Serving, hold_session, set_targets
from quire.serve.core.structural_tags import structural_tag
from quire.serve.openai.chat_parts import JsonObjectFormat, JsonSchemaFormat, ResponseFormat, StructuralTagFormat
from quire.serve.openai.request_bodies import GenerationRequest, SamplingFields, StructuredOutputs
from quire.types.beam import BeamParams
from quire.types.errors import InputError
from quire.types.grammar import GrammarSpec
from quire.types.sampling_params import SamplingParams

# Fields of a body that mean the same, under the same name, to the sampler.
_SHARED = [name for name in GenerationRequest.__struct_fields__ if name in SamplingParams.__struct_fields__]

BEAM_TOKENS = 64  # of an answer that beam search is to find, where the caller does not say
# What beam search, which draws nothing and knows no grammars, cannot do.
_NOT_IN_BEAMS = (
    *("logprobs", "prompt_logprobs", "logit_bias", "bad_words", "allowed_token_ids", "min_tokens", "presence_penalty"),
    *("top_logprobs", "frequency_penalty", "repetition_penalty", "kv_budget", "sparse_pages", "blend"),
)


async def check(serving: Serving, body: GenerationRequest) -> None:
    """Refuse, before any work, what can be seen from the body alone; then have its model ready."""
    serving.find_model(body.model)
    refuse_unsupported(body)
    hold_session(body.session_id, body.session_ttl)
    set_targets(body.slo)
    if body.stream_options is not None and not body.stream:
        raise InputError("stream_options needs stream to be true", param="stream_options")
    if body.stream and body.best_of not in (None, body.n or 1):
        raise InputError("which choice is best is known at the end: best_of cannot be streamed", param="best_of")
    if body.stream and body.prompt_logprobs is not None:
        raise InputError("prompt_logprobs cannot be streamed; set stream to false", param="prompt_logprobs")
    await serving.use_model(body.model)


def sampling_params(body: SamplingFields, **changes: Any) -> SamplingParams:
    """The sampler's view of a body; `changes` are what the route decides for itself."""
    given = {name: value for name in _SHARED if (value := getattr(body, name, None)) is not None}
    if isinstance(body.stop, str):
        given["stop"] = [body.stop]
    if body.top_k == -1:
        given["top_k"] = 0
    if given.get("best_of") == (given.get("n") or 1):
        del given["best_of"]
    return SamplingParams(**(given | {"include_stop": bool(body.include_stop_str_in_output)} | changes))


def beam_of(body: GenerationRequest, params: SamplingParams) -> BeamParams | None:
    """The search that a body asks for, if it does."""
    if not body.use_beam_search:
        for name, neutral in (("length_penalty", 1.0), ("early_stopping", False)):  # as vLLM's clients may send them
            if getattr(body, name) not in (None, neutral):
                raise InputError(f"{name} is of beam search; set use_beam_search to true", param=name)
        return None
    if params.grammar is not None:
        raise InputError("beam search knows no grammars", param="use_beam_search")
    for name in _NOT_IN_BEAMS:
        if getattr(body, name, None) not in (None, False):
            raise InputError(f"beam search cannot be combined with {name}", param=name)
    options = {
        name: value for name in ("length_penalty", "early_stopping") if (value := getattr(body, name)) is not None
    }
    return BeamParams(
        beams=params.best_of or params.n,
        n=params.n,
        max_tokens=params.max_tokens or BEAM_TOKENS,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        **options,
    )


def grammar_of(body: SamplingFields, format: ResponseFormat | None = None) -> tuple[str, GrammarSpec | None]:
    """The one constraint among all fields that may hold one, and the field that holds it."""
    found: dict[str, GrammarSpec] = {}
    if isinstance(format, JsonObjectFormat):
        found["response_format"] = ANY_JSON
    elif isinstance(format, JsonSchemaFormat):
        schema = format.json_schema
        found["response_format"] = json_schema(schema.schema, "response_format", strict=schema.strict)
    elif isinstance(format, StructuralTagFormat):
        found["response_format"] = structural_tag(msgspec.to_builtins(format), "response_format")
    if body.guided_json is not None:
        whitespace = body.guided_whitespace_pattern
        found["guided_json"] = json_schema(body.guided_json, "guided_json", whitespace=whitespace)
    if body.guided_regex is not None:
        found["guided_regex"] = grammar("regex", body.guided_regex, "guided_regex")
    if body.guided_choice is not None:
        found["guided_choice"] = choice(body.guided_choice, "guided_choice")
    if body.guided_grammar is not None:
        found["guided_grammar"] = context_free(body.guided_grammar, "guided_grammar")
    if body.structured_outputs is not None:
        found |= _structured(body.structured_outputs)
    if len(found) > 1:
        names = " and ".join(found)
        raise InputError(f"an answer takes one constraint, not {names}; leave the others out", param=[*found][-1])
    return next(iter(found.items()), ("", None))


def _structured(outputs: StructuredOutputs, field: str = "structured_outputs") -> dict[str, GrammarSpec]:
    found: dict[str, GrammarSpec] = {}
    if outputs.json is not None:
        found[f"{field}.json"] = json_schema(
            outputs.json,
            f"{field}.json",
            strict=False if outputs.disable_additional_properties is False else None,
            whitespace=outputs.whitespace_pattern,
        )
    if outputs.json_object:
        found[f"{field}.json_object"] = ANY_JSON
    if outputs.regex is not None:
        found[f"{field}.regex"] = grammar("regex", outputs.regex, f"{field}.regex")
    if outputs.choice is not None:
        found[f"{field}.choice"] = choice(outputs.choice, f"{field}.choice")
    if outputs.grammar is not None:
        found[f"{field}.grammar"] = context_free(outputs.grammar, f"{field}.grammar")
    if outputs.structural_tag is not None:
        found[f"{field}.structural_tag"] = structural_tag(outputs.structural_tag, f"{field}.structural_tag")
    return found
