"""Processed logits and drawn distributions against transformers' logits processors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from quire.generation.sampling import logit_processors as processors
from quire.generation.sampling.sampler import Sampler
from quire.generation.sampling.slot_params import PAD, Params

CPU = torch.device("cpu")


def numbers(count: int, **given: float) -> Params:
    """Neutral parameters for `count` rows, some of them replaced."""
    neutral = {
        "stream": 0, "top_k": 1 << 30, "prompt_len": 0, "top_p": math.inf, "temperature": 1.0,
        "log_min_p": -math.inf, "repetition": 1.0, "presence": 0.0, "frequency": 0.0,
    }  # fmt: skip
    return Params(**{name: torch.full((count, 1), value) for name, value in {**neutral, **given}.items()})


@pytest.mark.parametrize("penalty", [0.6, 1.0, 1.3, 5.0])
def test_repetition_penalty(penalty: float) -> None:
    torch.manual_seed(0)
    logits, history = torch.randn(5, 200), torch.randint(0, 200, (5, 64), dtype=torch.int32)
    want = RepetitionPenaltyLogitsProcessor(penalty)(history.long(), logits.clone())
    params, positions = numbers(5, repetition=penalty), torch.full((5,), 64)
    processors.apply_penalties(logits, torch.arange(5), params, history, positions, counts=None)
    assert torch.equal(logits, want)


def test_bad_words() -> None:
    torch.manual_seed(1)
    history = torch.randint(0, 4, (20, 9), dtype=torch.int32)  # four tokens only: many partial matches
    words = [[7], [1, 2], [0, 3, 1], [2, 2, 2, 2], [3, 1, 0, 2, 9], [1] * 12 + [4]]
    logits = torch.randn(20, 30)
    want = NoBadWordsLogitsProcessor(words)(history.long(), logits.clone())
    starts = torch.tensor([[PAD] * (12 - len(w) + 1) + w[:-1] for w in words], dtype=torch.int32).expand(20, -1, -1)
    ends = torch.tensor([w[-1] for w in words]).expand(20, -1)
    tails = processors.last_tokens(history, torch.arange(20), torch.full((20,), 9), 12)
    processors.apply_bad_words(logits, torch.arange(20), starts, ends, tails)
    assert torch.equal(logits, want)
    assert 20 < torch.isinf(want).sum() < 80  # some matched, most did not


@pytest.mark.parametrize("produced", [0, 3, 4, 5])
def test_min_tokens(produced: int, admit: Any) -> None:
    prompt, minimum, stops = 6, 4, [11, 12]
    logits = torch.zeros(1, 20)
    logits[0, 11], logits[0, 12], logits[0, 5] = 9.0, 8.0, 7.0
    known = torch.ones(1, prompt + produced, dtype=torch.int64)
    want = MinNewTokensLengthLogitsProcessor(prompt, minimum, torch.tensor(stops))(known, logits.clone())
    sampler = Sampler(slots=1, vocab_size=20, device=CPU)
    admit(sampler, 0, temperature=0.0, min_tokens=minimum, prompt_len=prompt, stop_ids=stops)
    drawn = sampler.sample(logits, [0], [prompt + produced], torch.ones(1, 16, dtype=torch.int32)).token_ids
    assert drawn.tolist() == want.argmax(-1).tolist() == [5 if produced < minimum else 11]


@pytest.mark.parametrize(
    ("params", "warpers"),
    [
        ({}, []),
        ({"temperature": 0.6}, [TemperatureLogitsWarper(0.6)]),
        ({"top_k": 7}, [TopKLogitsWarper(7)]),
        ({"top_p": 0.8}, [TopPLogitsWarper(0.8)]),
        ({"top_p": 0.01}, [TopPLogitsWarper(0.01)]),
        ({"min_p": 0.1}, [MinPLogitsWarper(0.1)]),
        ({"temperature": 1.7, "min_p": 0.05}, [TemperatureLogitsWarper(1.7), MinPLogitsWarper(0.05)]),
        ({"top_k": 12, "top_p": 0.7}, [TopKLogitsWarper(12), TopPLogitsWarper(0.7)]),
        ({"temperature": 2.0, "top_p": 0.9}, [TemperatureLogitsWarper(2.0), TopPLogitsWarper(0.9)]),
        (
            {"temperature": 1.4, "min_p": 0.08, "top_k": 9, "top_p": 0.9},
            [TemperatureLogitsWarper(1.4), MinPLogitsWarper(0.08), TopKLogitsWarper(9), TopPLogitsWarper(0.9)],
        ),
        ({"min_p": 0.03, "top_p": 0.85}, [MinPLogitsWarper(0.03), TopPLogitsWarper(0.85)]),
    ],
)
@pytest.mark.parametrize("vocab", [40, 700])  # the larger one is too big for the shortest path of top-p
def test_draws_follow_the_warped_distribution(
    params: dict[str, Any], warpers: list[Any], vocab: int, device: torch.device, admit: Any
) -> None:
    """20,000 seeded draws of one distribution: nothing outside the kept set, chi-square within five sigma."""
    draws, batch = 20_000, 4000
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(vocab)).mul(2.0)
    warped = logits.clone()
    for warper in warpers:
        warped = warper(torch.zeros(1, 1, dtype=torch.int64), warped)
    chances = warped.softmax(-1)[0].double()
    sampler = Sampler(slots=batch, vocab_size=vocab, device=device)
    for slot in range(batch):
        admit(sampler, slot, seed=slot, **params)
    tokens, rows = torch.zeros(batch, 8, dtype=torch.int32, device=device), logits.to(device).expand(batch, -1)
    counts = torch.zeros(vocab, dtype=torch.int64)
    for position in range(1, 1 + draws // batch):
        drawn = sampler.sample(rows, list(range(batch)), [position] * batch, tokens).token_ids
        counts += torch.bincount(drawn.cpu(), minlength=vocab)
    assert counts.sum() == draws
    assert counts[chances == 0].sum() == 0, "drew a token outside the kept set"
    expected = chances * draws
    common = expected >= 5
    assert (counts[expected >= 25] > 0).all(), "never drew a token of the kept set"
    observed = torch.cat([counts[common].double(), counts[~common].sum().double().view(1)])
    wanted = torch.cat([expected[common], expected[~common].sum().view(1)]).clamp(min=1e-9)
    freedom = len(wanted) - 1 if expected[~common].sum() > 0 else len(wanted) - 2
    chi2 = float(((observed - wanted) ** 2 / wanted).sum())
    assert chi2 <= freedom + 5 * math.sqrt(2 * freedom) if freedom else chi2 < 1e-6


def test_top_p_keeps_the_smallest_set_that_reaches_p(admit: Any) -> None:
    """Probabilities with exact sums: 1/2, 1/4, 1/8, 1/16, 1/16; and ten equals, where float32 0.1 would keep two."""
    halves = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.0625]).log2().mul(math.log(2))
    for logits, top_p, kept in (
        (halves, 0.5, {0}),
        (halves, 0.50001, {0, 1}),
        (halves, 0.75, {0, 1}),
        (halves, 0.76, {0, 1, 2}),
        (torch.zeros(10), 0.1, {0}),
        (torch.zeros(10), 0.3, {0, 1, 2}),
        (torch.zeros(10), 0.31, {0, 1, 2, 3}),
    ):
        sampler = Sampler(slots=400, vocab_size=len(logits), device=CPU)
        for slot in range(400):
            admit(sampler, slot, seed=slot, top_p=top_p)
        drawn = sampler.sample(logits.expand(400, -1), list(range(400)), [1] * 400, torch.zeros(400, 4).int()).token_ids
        assert set(drawn.tolist()) == kept, top_p
