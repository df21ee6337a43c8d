"""The compiled path against the fp32 path on the same weights: perplexity of a text written for it, greedy choices; and
what smaller KV pages cost."""

import math
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.kernels.cpu import shared_object as library

TEXT = Path(__file__).parent / "data" / "text.txt"
ASK = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)


@pytest.fixture(scope="module", params=[400, pytest.param(2000, marks=pytest.mark.slow)])
def tokens(request):
    """Of the text, so many."""
    return request.param


def scored(engine: LLM, tokens: int):
    """(perplexity, the likeliest token after each position)."""
    prompt = engine.text.tokenizer.encode(TEXT.read_text(encoding="utf-8"))[:tokens]
    entries = engine.generate([prompt], ASK)[0].prompt_logprobs
    assert len(entries) == tokens - 1
    return math.exp(-sum(e.logprob for e in entries) / len(entries)), [e.top_ids[0] for e in entries]


def compiled(tokens: int, kv_dtype: str = "auto"):
    if reason := library.available():
        pytest.skip(reason)
    with LLM(kv_memory="128M", kv_dtype=kv_dtype) as engine:
        assert any("compiled" in reason for reason in engine.info.reasons)
        return scored(engine, tokens)


@pytest.fixture(scope="module")
def plain(llm, tokens):
    return scored(llm, tokens)


@pytest.fixture(scope="module")
def fast(default_model, tokens):
    return compiled(tokens)


def same(a, b):
    return sum(x == y for x, y in zip(a[1], b[1], strict=True)) / len(a[1])


def test_perplexity_is_that_of_fp32(plain, fast, capsys):
    ratio, alike = fast[0] / plain[0], same(fast, plain)
    with capsys.disabled():
        print(f"\nperplexity: fp32 {plain[0]:.3f}, compiled {fast[0]:.3f}, ratio {ratio:.4f}; same greedy {alike:.1%}")
    assert abs(ratio - 1) < 0.01
    assert alike > 0.9


@pytest.mark.parametrize(
    ("kind", "within"),
    [
        ("int8", 0.01),
        pytest.param("int8-kivi", 0.01, marks=pytest.mark.slow),
        pytest.param("fp8", 0.02, marks=pytest.mark.slow),
        pytest.param("int4", 0.1, marks=pytest.mark.slow),
        pytest.param("kivi4", 0.02, marks=pytest.mark.slow),
        pytest.param("kivi2", 0.25, marks=pytest.mark.slow),
    ],
)
def test_perplexity_over_smaller_pages(plain, fast, tokens, kind, within, capsys):
    small = compiled(tokens, kind)
    with capsys.disabled():
        print(f"\nperplexity: {kind} pages {small[0]:.3f}, {small[0] / fast[0] - 1:+.2%} of fp16's; "
              f"{small[0] / plain[0] - 1:+.2%} of fp32's; same greedy {same(small, fast):.1%}")  # fmt: skip
    assert abs(small[0] / fast[0] - 1) < within
    assert abs(small[0] / plain[0] - 1) < within + 0.005
    assert same(small, fast) > {"int4": 0.8, "kivi2": 0.7}.get(kind, 0.9)
