"""Greedy output is transformers' output, and does not depend on how the engine got there."""

import random

import msgspec
import pytest
from near_ties import Comparison
from prompts import forty

from quire import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def comparison(oracle):
    found = Comparison(oracle)
    yield found
    found.report()


@pytest.fixture(scope="module")
def prompts(llm):
    """Some of each kind."""
    return forty(llm)[1::7]


@pytest.fixture(scope="module")
def alone(llm, prompts):
    """Each prompt by itself, no prefix to hit."""
    outputs = []
    for prompt in prompts:
        llm.reset()
        outputs.append(tokens(llm.generate(prompt, SHORT)[0]))
    return outputs


def tokens(result):
    return result.outputs[0].token_ids


def test_each_alone_equals_transformers(prompts, alone, comparison):
    for prompt, output in zip(prompts, alone, strict=True):
        assert len(output) == 24
        comparison.follows(prompt, output, "transformers")


@pytest.mark.slow
def test_forty_prompts_together_equal_transformers(llm, comparison):
    prompts = forty(llm)
    for prompt, result in zip(prompts, llm.generate(prompts, GREEDY), strict=True):
        assert len(tokens(result)) == 64
        comparison.follows(prompt, tokens(result), "transformers")


@pytest.mark.parametrize("longest", [25, pytest.param(200, marks=pytest.mark.slow)])
def test_in_a_batch_of_64(llm, prompts, alone, comparison, longest):
    """More than a step's tokens, so that prompts are computed beside answers; the others leave one by one."""
    rng = random.Random(3)
    others = [[rng.randrange(1000, 40000) for _ in range(rng.randint(1, longest))] for _ in range(64 - len(prompts))]
    leaving = [msgspec.structs.replace(SHORT, max_tokens=rng.randint(1, 24)) for _ in others]
    llm.reset()
    results = llm.generate(prompts + others, [*[SHORT] * len(prompts), *leaving])
    for prompt, expected, result in zip(prompts, alone, results, strict=False):
        comparison.equal(prompt, expected, tokens(result), "batch of 64")


def test_on_a_prefix_hit(llm, prompts, alone, comparison):
    llm.reset()
    llm.generate(prompts, SHORT)
    results = llm.generate(prompts, SHORT)
    assert sum(r.cached_tokens for r in results) > 100
    for prompt, expected, result in zip(prompts, alone, results, strict=True):
        comparison.equal(prompt, expected, tokens(result), "prefix hit")


@pytest.mark.parametrize(
    ("what", "options"),
    [
        ("small chunks and pages", {"prefill_chunk": 7, "page_size": 5}),
        ("preemption, two steps in flight", {"kv_pages": 16, "max_model_len": 224, "depth": 2}),
        pytest.param("process", {"process": True}, marks=pytest.mark.slow),
    ],
)
def test_other_ways_to_run(prompts, alone, comparison, what, options):
    short = [(p, a) for p, a in zip(prompts, alone, strict=True) if len(p) + 24 < 224]
    room = {} if "kv_pages" in options else {"kv_memory": "256M"}
    with LLM("smollm2-135m", dtype="float32", **room, **options) as other:
        results = other.generate([p for p, _ in short], SHORT)
        stats = other.stats()
    assert stats.running == stats.waiting == stats.pages_used == 0
    assert stats.preemptions > 0 or "kv_pages" not in options
    for (prompt, expected), result in zip(short, results, strict=True):
        comparison.equal(prompt, expected, tokens(result), what)
