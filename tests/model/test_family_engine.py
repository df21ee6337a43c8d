"""Families under the engine: greedy answers are transformers', alone, batched, chunked, on a prefix hit, preempted."""

from __future__ import annotations

import pytest
import torch
from tiny_engine import TOKENS, Engine
from tiny_models import prompts, tiny

FAMILIES = ["llama3", "gpt2", "olmo2", "gemma3", "cohere2", "qwen3-moe", "llama4", "gemma4", "qwen3-next"]
MORE = [
    "qwen2-mixed-windows",
    "gemma2",
    "granite",
    "smollm3",
    "granite-hybrid",
    "lfm2",
    "ministral",
    "ministral3",
    "olmo3",
    "phi3",
    "glm4",
    "falcon-7b",
    "falcon-40b",
    "mixtral",
    "qwen2-moe",
    "granite-moe",
    "glm4-moe",
    "gpt-oss",
    "deepseek-v2",
    "deepseek-v3",
    "qwen3.5",
    "qwen3.5-moe",
    "granite-hybrid-dense",
    "nemotron-h",
    "nemotron-h-moe",
    "lfm2-moe",
    "llama4-variations",
    "gemma4-moe",
]
NEAR_TIE = 1e-3  # of the two best logits: which of them is drawn is not promised


@pytest.fixture(scope="module")
def family(request, tmp_path_factory):
    """(files, prompts, their greedy answers by transformers, how far apart the two best logits were at each)"""
    theirs = tiny(request.param)
    path = tmp_path_factory.mktemp(request.param)
    theirs.save_pretrained(path)
    asked = prompts(33, 21, 40, 5)
    answers, gaps = [], []
    for prompt in asked:
        known, apart = list(prompt), []
        for _ in range(TOKENS):
            with torch.inference_mode():
                best = theirs(torch.tensor([known])).logits[0, -1].topk(2)
            known.append(int(best.indices[0]))
            apart.append(float(best.values[0] - best.values[1]))
        answers.append(known[len(prompt) :])
        gaps.append(apart)
    return path, asked, answers, gaps


def same(got, answers, gaps):
    """Up to the first near-tie, behind which answers may part; most tokens are compared."""
    compared = 0
    for said, wanted, apart in zip(got, answers, gaps, strict=True):
        sure = next((i for i, gap in enumerate(apart) if gap < NEAR_TIE), TOKENS)
        assert len(said) == TOKENS and said[:sure] == wanted[:sure]
        compared += sure
    assert len(got) == 1 or compared > TOKENS * len(got) / 2


@pytest.mark.parametrize(
    "family", [*FAMILIES, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)], indirect=True
)
def test_answers_do_not_depend_on_how_they_are_computed(family):
    path, asked, answers, gaps = family
    engine = Engine(path, kv_pages=200, prefix_cache=False)
    for i, prompt in enumerate(asked):
        same(engine.answers([prompt]), answers[i : i + 1], gaps[i : i + 1])
    same(engine.answers(asked), answers, gaps)
    same(engine.answers(asked, preempt=5), answers, gaps)
    assert engine.core.scheduler.stats.preemptions >= 4
    same(Engine(path, kv_pages=36).answers(asked), answers, gaps)  # not enough for all at once
    same(Engine(path, kv_pages=200, prefill_chunk=7).answers(asked), answers, gaps)
    cached = Engine(path, kv_pages=200)
    for _ in range(2):
        same(cached.answers(asked), answers, gaps)
    assert cached.core.scheduler.stats.cached_tokens >= 64
