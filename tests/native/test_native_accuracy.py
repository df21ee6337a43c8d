"""The compiled path against the fp32 path on the same weights: perplexity of a text written for it, greedy choices."""

import math
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.kernels.cpu import library

TEXT = Path(__file__).parent / "data" / "text.txt"
TOKENS = 2000
ASK = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)


def scored(engine: LLM, prompt: list[int]):
    """(perplexity, the likeliest token after each position)."""
    entries = engine.generate([prompt], ASK)[0].prompt_logprobs
    assert len(entries) == TOKENS - 1
    return math.exp(-sum(e.logprob for e in entries) / len(entries)), [e.top_ids[0] for e in entries]


def test_perplexity_is_that_of_fp32(llm, capsys):
    if reason := library.available():
        pytest.skip(reason)
    prompt = llm.text.tokenizer.encode(TEXT.read_text(encoding="utf-8"))[:TOKENS]
    assert len(prompt) == TOKENS
    plain, choices = scored(llm, prompt)
    with LLM(kv_memory="128M") as compiled:
        assert any("compiled" in reason for reason in compiled.info.reasons)
        fast, fast_choices = scored(compiled, prompt)
    same = sum(a == b for a, b in zip(choices, fast_choices, strict=True)) / len(choices)
    with capsys.disabled():
        print(f"\nperplexity: fp32 {plain:.3f}, compiled {fast:.3f}, ratio {fast / plain:.4f}; same greedy {same:.1%}")
    assert abs(fast / plain - 1) < 0.01
    assert same > 0.9
