"""Pooled hidden states: equal to transformers', however the prompt is cut, cached or preempted."""

import math

import numpy as np
import pytest
import torch

from quire import LLM, AsyncLLM
from quire.types.errors import ContextLengthError, InputError

TEXTS = ["The capital of France is Paris.", "Paris is where the French government sits.", "def add(a, b): return a + b"]
LONG = "All work and no play makes a dull page of text. " * 12


STATES = {}  # text → transformers' hidden states


def theirs(oracle, tokenizer, text, pooling):
    if text not in STATES:
        with torch.no_grad():
            STATES[text] = oracle.model(torch.tensor([tokenizer.encode(text)])).last_hidden_state[0]
    states = STATES[text]
    vector = states.mean(0) if pooling == "mean" else states[-1]
    return (vector / vector.norm()).numpy()


def close(ours, expected, tolerance):
    assert math.isclose(float(np.dot(ours, ours)), 1.0, abs_tol=1e-5)
    assert float(np.dot(ours, expected)) > 1 - tolerance


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_equal_to_transformers(llm, oracle, pooling):
    texts = [*TEXTS, LONG]
    for text, ours in zip(texts, llm.embed(texts, pooling), strict=True):
        expected = theirs(oracle, llm.text.tokenizer, text, pooling)
        close(ours, expected, 1e-5)
        assert np.allclose(ours, expected, atol=2e-4)


@pytest.fixture(scope="module")
def cut(default_model):
    """The compiled path, prompts in pieces of 20 tokens, and few pages."""
    with LLM("smollm2-135m", kv_pages=24, max_model_len=300, prefill_chunk=20, depth=2) as engine:
        yield engine


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_in_pieces_and_under_pressure(cut, oracle, pooling):
    texts = [*TEXTS, LONG, LONG + TEXTS[0]] * 2
    for text, ours in zip(texts, cut.embed(texts, pooling), strict=True):
        close(ours, theirs(oracle, cut.text.tokenizer, text, pooling), 0.01)  # its activations are quantised


def test_only_the_last_state_may_come_from_the_cache(cut):
    cut.reset()
    (first,), (again,) = cut.embed(LONG, "last"), cut.embed(LONG, "last")
    assert np.allclose(first, again, atol=1e-5) and cut.stats().cached_tokens > 100
    cached = cut.stats().cached_tokens
    (first,), (again,) = cut.embed(LONG), cut.embed(LONG)
    assert np.allclose(first, again, atol=1e-5) and cut.stats().cached_tokens == cached
    assert cut.stats().pages_used == 0


def test_what_cannot_be_embedded_is_refused(cut):
    with pytest.raises(InputError, match="pooling must be"):
        cut.embed("x", "max")
    with pytest.raises(ContextLengthError):
        cut.embed(LONG * 10)
    with pytest.raises(InputError, match="empty"):
        cut.embed([[]])


async def test_the_async_form_counts_tokens():
    async with await AsyncLLM.open("smollm2-135m", kv_memory="128M") as engine:
        vector, count = await engine.embed(TEXTS[0])
        assert count == len(engine.text.tokenizer.encode(TEXTS[0])) and math.isclose(math.hypot(*vector), 1.0)
