"""Greedy output is transformers' output, and does not depend on how the engine got there."""

import random

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
    return forty(llm)


@pytest.fixture(scope="module")
def alone(llm, prompts):
    """Each prompt by itself, no prefix to hit."""
    outputs = []
    for prompt in prompts[:12]:
        llm.reset()
        outputs.append(tokens(llm.generate(prompt, SHORT)[0]))
    return outputs


def tokens(result):
    return result.outputs[0].token_ids


def test_forty_prompts_equal_transformers(llm, prompts, comparison):
    for prompt, result in zip(prompts, llm.generate(prompts, GREEDY), strict=True):
        assert len(tokens(result)) == 64
        comparison.follows(prompt, tokens(result), "transformers")


def test_in_a_batch_of_64(llm, prompts, alone, comparison):
    rng = random.Random(3)
    others = [[rng.randrange(1000, 40000) for _ in range(rng.randint(1, 200))] for _ in range(52)]
    llm.reset()
    results = llm.generate(prompts[:12] + others, SHORT)
    for prompt, expected, result in zip(prompts, alone, results, strict=False):
        comparison.equal(prompt, expected, tokens(result), "batch of 64")


def test_on_a_prefix_hit(llm, prompts, alone, comparison):
    llm.reset()
    llm.generate(prompts[:12], SHORT)
    results = llm.generate(prompts[:12], SHORT)
    assert sum(r.cached_tokens for r in results) > 100
    for prompt, expected, result in zip(prompts, alone, results, strict=False):
        comparison.equal(prompt, expected, tokens(result), "prefix hit")


@pytest.mark.parametrize(
    ("what", "options"),
    [
        ("prefill chunk 7", {"prefill_chunk": 7}),
        ("preemption", {"kv_pages": 24, "max_model_len": 256}),
        ("two steps in flight", {"depth": 2}),
        ("page size 5", {"page_size": 5}),
        ("process", {"process": True}),
    ],
)
def test_other_ways_to_run(prompts, alone, comparison, what, options):
    short = [(p, a) for p, a in zip(prompts, alone, strict=False) if len(p) + 24 < 256]
    with LLM("smollm2-135m", dtype="float32", **{"kv_memory": "256M", **options}) as other:
        results = other.generate([p for p, _ in short], SHORT)
        stats = other.stats()
    assert stats.running == stats.waiting == stats.pages_used == 0
    if what == "preemption":
        assert stats.preemptions > 0
    for (prompt, expected), result in zip(short, results, strict=True):
        comparison.equal(prompt, expected, tokens(result), what)
