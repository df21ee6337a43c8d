"""Drafts expand a step's rows: what other rows of that step return still reaches whoever asked for it."""

import numpy as np
import pytest

from quire import LLM, SamplingParams
from quire.types.grammar import GrammarSpec

REPETITIVE = "red green blue, " * 12
SCORED = "The capital of France is Paris, and the capital of Italy is Rome. " * 3
LONG = "All work and no play makes a dull page of text. " * 8
GREEDY = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)


def make(**options):
    return LLM("smollm2-135m", kv_memory="128M", max_model_len=512, prefix_cache=False, prefill_chunk=8, **options)


@pytest.fixture(scope="module")
def plain(default_model):
    with make() as engine:
        yield engine


ONE = {"draft_tokens": 1, "draft_adapt": False}


@pytest.fixture(scope="module", params=[pytest.param(ONE, marks=pytest.mark.slow), {}], ids=["one", "default"])
def drafting(default_model, request):
    with make(speculation="ngram", **request.param) as engine:
        yield engine


def beside_a_stream(engine, work):
    """`work` done while a repetitive answer is streamed; that answer too."""
    stream = engine.stream(REPETITIVE, GREEDY)
    tokens = []
    while len(tokens) < 20:
        tokens += next(stream).token_ids
    done = work(engine)
    tokens += [token for delta in stream for token in delta.token_ids]
    assert engine.stats().pages_used == 0 and not engine.stats().finished.get("error")
    return tokens, done


def scored(engine):
    """Prompt log-probabilities of the second of two requests, beside one that asked for none."""
    params = [GREEDY, SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=0)]
    other, asking = engine.generate([REPETITIVE, SCORED], params)
    assert other.prompt_logprobs is None
    return other.outputs[0].token_ids, [entry.logprob for entry in asking.prompt_logprobs]


def evicting(engine):
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, kv_budget=64, kv_eviction="snapkv")
    _, result = engine.generate([REPETITIVE, LONG], [GREEDY, params])
    return result.outputs[0].token_ids


def test_prompt_logprobs(plain, drafting):
    expected, (other, logprobs) = beside_a_stream(plain, scored)
    tokens, (others, found) = beside_a_stream(drafting, scored)
    assert tokens == expected and others == other and found == pytest.approx(logprobs, abs=1e-4)


def test_embeddings(plain, drafting):
    def embeddings(engine):
        return engine.embed([SCORED, LONG])

    expected, vectors = beside_a_stream(plain, embeddings)
    tokens, found = beside_a_stream(drafting, embeddings)
    assert tokens == expected and np.allclose(found, vectors, atol=1e-4)


def test_attention_scored_eviction(plain, drafting):
    expected, answer = beside_a_stream(plain, evicting)
    assert beside_a_stream(drafting, evicting) == (expected, answer)


def test_forced_tokens_are_the_same_ones(plain, drafting):
    """What a grammar forces is in the draft too, here: it counts as forced, and has the tokens it has without one."""
    said = '{"temperature": 21, "description": "mild", "temperature": 21, "description": "mild"}'
    source = '"{\\"temperature\\": " /[0-9]{2}/ ", \\"description\\": \\"" ("mild"|"cold") "\\"}"'
    params = SamplingParams(temperature=0, max_tokens=60, grammar=GrammarSpec("lark", f"start: {source}"))
    answers = [engine.generate(f"{said}\n" * 4, params)[0].outputs[0] for engine in (plain, drafting)]
    expected, found = answers
    assert found.token_ids == expected.token_ids and found.forced_tokens == expected.forced_tokens > 5
