"""Families under the engine: greedy answers are transformers', alone, batched, chunked, preempted, on a prefix hit,
with drafts, and in an engine of another process. `scripts/model_table.py` makes a table of what these tests find."""

from __future__ import annotations

import pytest
import torch
from tiny_engine import GREEDY, TOKENS, Engine, KnowingProposer
from tiny_models import prompts, tiny

from quire.engine.link import open_link
from quire.generation.drafting.speculation import Speculation
from quire.types.config import EngineOptions
from quire.types.messages import Events, Submit
from quire.types.request import Request

FAMILIES = ["llama3", "gpt2", "qwen3-moe", "llama4", "gemma4", "qwen3-next"]
MORE = [
    "olmo2",
    "gemma3",
    "cohere2",
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
    "gemma4-unified",
    "mistral-window",
    "qwen3",
    "glm",
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


EVERY = [*FAMILIES, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)]
every_family = pytest.mark.parametrize("family", EVERY, indirect=True)
slow_family = pytest.mark.parametrize(
    "family", [pytest.param(name, marks=pytest.mark.slow) for name in [*FAMILIES, *MORE]], indirect=True
)


@pytest.fixture(scope="module")
def engine(family):
    return Engine(family[0], kv_pages=200, prefix_cache=False)


@every_family
def test_alone(family, engine):
    _, asked, answers, gaps = family
    for i, prompt in enumerate(asked):
        same(engine.answers([prompt]), answers[i : i + 1], gaps[i : i + 1])


@every_family
def test_batched(family, engine):
    _, asked, answers, gaps = family
    same(engine.answers(asked), answers, gaps)


@every_family
def test_preempted(family, engine):
    path, asked, answers, gaps = family
    before = engine.core.scheduler.stats.preemptions
    same(engine.answers(asked, preempt=5), answers, gaps)
    assert engine.core.scheduler.stats.preemptions >= before + 4
    same(Engine(path, kv_pages=36).answers(asked), answers, gaps)  # not enough for all at once


@every_family
def test_chunked(family):
    path, asked, answers, gaps = family
    same(Engine(path, kv_pages=200, prefill_chunk=7).answers(asked), answers, gaps)


@every_family
def test_prefix_hit(family):
    path, asked, answers, gaps = family
    cached = Engine(path, kv_pages=200)
    for _ in range(2):
        same(cached.answers(asked), answers, gaps)
    assert cached.core.scheduler.stats.cached_tokens >= 64


@every_family
def test_speculation(family):
    path, asked, answers, gaps = family
    engine = Engine(path, kv_pages=300, speculation="ngram", draft_tokens=4, draft_adapt=False)
    engine.core.executor._head.speculate(
        Speculation(KnowingProposer([[*prompt, *answer] for prompt, answer in zip(asked, answers, strict=True)]))
    )
    same(engine.answers(asked), answers, gaps)
    stats = engine.core.scheduler.stats
    assert stats.accepted_tokens > 20 and stats.waste["draft"] > 2


@slow_family
def test_two_engines(family):
    """In a process of its own, as in this one."""
    path, asked, answers, gaps = family
    options = EngineOptions.of(model=str(path), dtype="float32", page_size=4, max_model_len=64, max_seqs=4, threads=1)
    link, said = open_link(options, process=True), {str(i): [] for i in range(len(asked))}
    try:
        for name, prompt in zip(said, asked, strict=True):
            link.send(Submit(Request(id=name, prompt=prompt, params=GREEDY)))
        open_ = set(said)
        while open_:
            for event in (e for message in link.receive(None) if isinstance(message, Events) for e in message.events):
                assert not event.message, event.message
                said[event.request] += event.tokens
                open_ -= {event.request} if event.finish is not None else set()
    finally:
        link.close()
    same(list(said.values()), answers, gaps)
