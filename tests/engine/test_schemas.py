"""Answers under JSON schemas of many kinds: those that finish are valid, by the judgement of `jsonschema`, and most
finish. A sample here, all 300 in the slow suite."""

import json

import jsonschema
import pytest

from quire import LLM
from quire.bench.schemas import by_hand, schemas
from quire.bench.structured_output import answer
from quire.types.request import FinishReason


@pytest.fixture(scope="module")
def engine(default_model):
    with LLM("smollm2-135m", kv_memory="1G") as llm:
        yield llm


def judge(many, results):
    """Which finished; all that did are valid."""
    finished = []
    for schema, result in zip(many, results, strict=True):
        output = result.outputs[0]
        if output.finish_reason is FinishReason.STOP:
            jsonschema.validate(json.loads(output.text), schema, jsonschema.Draft202012Validator)
            finished.append(schema)
    return finished


def test_the_schemas_are_valid_repeatable_and_varied():
    many = schemas(300)
    assert many == schemas(300) and many != schemas(300, seed=2) and many[: len(by_hand())] == by_hand()
    assert len({json.dumps(s) for s in many}) == 300
    for schema in many:
        jsonschema.Draft202012Validator.check_schema(schema)
    words = json.dumps(many)
    for keyword in (
        "$ref", "anyOf", "oneOf", "allOf", "enum", "const", "pattern", "format", "prefixItems", "additionalProperties",
        "minItems", "maxLength", "minimum", "multipleOf", "maxProperties",
    ):  # fmt: skip
        assert f'"{keyword}":' in words, keyword


def test_a_sample_of_schemas(engine):
    engine.reset()
    many = schemas(300)[::30]
    # Nine in ten of all 300 finish; of ten, by the luck of the draw, now and then only seven.
    assert len(judge(many, answer(engine, many))) >= 7
    assert engine.stats().forced_tokens > 0.2 * engine.stats().output_tokens


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_three_hundred_schemas(engine):
    many = schemas(300)
    finished = judge(many, answer(engine, many))
    print(f"{len(finished)} of 300 finished; {engine.stats().forced_tokens} of {engine.stats().output_tokens} forced")
    assert len(finished) >= 270
