"""The default model through a KV budget: what it says of a long text, and what it finds in one."""

from __future__ import annotations

import math

import pytest

from quire import LLM, SamplingParams
from quire.bench.evict import compare, long_text, needles, perplexity, rows
from quire.types.errors import ContextLengthError, InputError
from quire.types.sampling_params import EVICTION


@pytest.fixture(scope="module")
def forgetful(default_model):
    """The compiled decoder, with room for tokens beyond what it was trained on."""
    with LLM("smollm2-135m", kv_memory="256M", max_model_len=20_000) as llm:
        yield llm


@pytest.mark.parametrize(
    "eviction", [name if name == "h2o" else pytest.param(name, marks=pytest.mark.slow) for name in EVICTION]
)
def test_a_text_through_a_quarter_of_its_length(forgetful, eviction):
    text = long_text(forgetful, 640)
    window = perplexity(forgetful, text, "recompute", 160, 60)
    stream = perplexity(forgetful, text, eviction, 160, 60)
    worst = 1.5 if eviction == "h2o" else 1.25  # old pages have had longest to collect attention: few of ten are recent
    assert math.isfinite(stream) and stream < worst * window
    out = forgetful.generate(text, SamplingParams(temperature=0.0, max_tokens=20, kv_budget=160, kv_eviction=eviction))
    assert out[0].outputs[0].evicted_tokens >= 640 - 160
    assert len(out[0].outputs[0].token_ids) == 20


@pytest.mark.slow
def test_what_the_question_attends_to_stays(forgetful):
    """Of 512 tokens 192 keep their KV: enough for those who look, not for those who do not."""
    text = long_text(forgetful, 2000)
    assert needles(forgetful, "full", 0, 512, 5, text) == 1.0
    assert needles(forgetful, "snapkv", 256, 512, 5, text) >= 0.8
    assert needles(forgetful, "sinks", 256, 512, 5, text) <= 0.4


def test_limits(forgetful):
    info = forgetful.info
    assert (info.max_model_len, info.stream_len) == (8192, 20_000)
    with pytest.raises(ContextLengthError, match=r"holds 8192.*kv_budget"):
        forgetful.generate([5] * 9000, SamplingParams(max_tokens=1))
    with pytest.raises(ContextLengthError, match=r"holds 20000.*max_model_len"):
        forgetful.generate([5] * 20_000, SamplingParams(max_tokens=1, kv_budget=512))
    with pytest.raises(InputError, match="from 64"):
        forgetful.generate([5] * 10, SamplingParams(max_tokens=1, kv_budget=32))


def test_the_command_compares_all_ways(forgetful):
    found = compare(
        forgetful, ("full", "recompute", "sinks"), budget=64, inside=200, beyond=260, tail=24, haystack=100, num=1
    )
    table = rows(found, 200, 260)
    assert [line[0] for line in table] == ["way", "full", "recompute", "sinks"]
    assert found["full"]["beyond"] is None and found["sinks"]["beyond"] > 1


@pytest.mark.slow
def test_a_stream_of_16k_tokens_through_1k(forgetful):
    """Twice what the model was trained on: finite, and about as good as a window computed anew."""
    text = long_text(forgetful, 16_384)
    stream = perplexity(forgetful, text, "sinks", 1024, 1024)
    window = perplexity(forgetful, text, "recompute", 1024, 1024)
    assert math.isfinite(stream) and stream < 1.2 * window
