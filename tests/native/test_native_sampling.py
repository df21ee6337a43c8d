"""Compiled sampling against its plain twins: the same tokens from the same logits, for every way of drawing, and equal
log-probabilities."""

import math

import numpy as np
import pytest
import torch

from quire.generation.sampling.sampler import Sampler
from quire.kernels.cpu import NativeSampling
from quire.kernels.cpu.shared_object import native
from quire.types.plan import Admit
from quire.types.sampling_params import SamplingParams

CPU = torch.device("cpu")
WAYS = [
    {"temperature": 0.0}, {}, {"temperature": 0.3}, {"temperature": 5.0}, {"temperature": 1e-30},
    {"min_p": 0.02}, {"min_p": 1.0}, {"min_p": 0.3, "temperature": 2.0},
    {"top_k": 1}, {"top_k": 2}, {"top_k": 50, "temperature": 0.8}, {"top_k": 1100}, {"top_k": 10**6},
    {"top_k": 50, "top_p": 0.9}, {"top_k": 900, "top_p": 0.8, "min_p": 0.001, "temperature": 3.0},
    {"top_p": 0.1}, {"top_p": 0.95, "temperature": 0.8}, {"top_p": 0.999, "temperature": 4.0},
    {"top_p": 0.9, "min_p": 0.1}, {"top_p": 1e-9},
]  # fmt: skip


@pytest.fixture(scope="module")
def pool():
    pool = native().quire_pool(2)
    yield pool
    native().quire_pool_free(pool)


def sampler(vocab: int, native: NativeSampling | None) -> Sampler:
    made = Sampler(slots=len(WAYS), vocab_size=vocab, device=CPU, native=native)
    for slot, way in enumerate(WAYS):
        params = SamplingParams(**way)
        made.admit(Admit(slot, f"r{slot}", [], 1, params, seed=slot * 7919, branch=slot % 3, stop_ids=[]))
    return made


def logits_of(kind: str, rows: int, vocab: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(vocab)
    x = torch.randn(rows, vocab, generator=generator)
    if kind == "peaked":
        return x * 4 + 10
    if kind == "flat":
        return x * 0.1
    if kind == "ties":
        return (x * 2).round()
    return x.masked_fill(torch.rand(rows, vocab, generator=generator) < 0.9, -math.inf)  # most forbidden


@pytest.mark.parametrize("kind", ["peaked", "flat", "ties", "masked"])
@pytest.mark.parametrize("vocab", [1, 7, 64, 1500, 49152])
def test_draws_what_the_twin_draws(isa, pool, kind, vocab):
    plain, fast = sampler(vocab, None), sampler(vocab, NativeSampling(pool, 2, isa))
    slots, tokens = list(range(len(WAYS))), torch.zeros(len(WAYS), 1, dtype=torch.int32)
    logits = logits_of(kind, len(WAYS), vocab)
    logits[:, 0] = logits[:, 0].clamp(min=-30)  # something is always allowed
    different = 0
    rounds = 40 if vocab < 49152 else 8
    for position in range(rounds):
        want = plain.sample(logits, slots, [position] * len(slots), tokens).token_ids
        got = fast.sample(logits, slots, [position] * len(slots), tokens).token_ids
        different += int((want != got).sum())
    assert different <= 1, f"{different} of {rounds * len(slots)} draws differ"  # one may be decided by rounding


def test_a_row_of_a_wider_tensor(isa, pool):
    wide = torch.full((len(WAYS), 80), 99.0)
    wide[:, :75] = logits_of("peaked", len(WAYS), 75)
    slots, tokens = list(range(len(WAYS))), torch.zeros(len(WAYS), 1, dtype=torch.int32)
    drawer = NativeSampling(pool, 2, isa)
    got = sampler(75, drawer).sample(wide[:, :75], slots, slots, tokens).token_ids
    assert torch.equal(got, sampler(75, drawer).sample(wide[:, :75].contiguous(), slots, slots, tokens).token_ids)
    assert (got < 75).all()


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_odd_numbers_give_a_token(isa, pool, odd):
    logits = logits_of("peaked", len(WAYS), 100)
    logits[:, 40:60] = odd
    logits[-3:] = odd
    slots, tokens = list(range(len(WAYS))), torch.zeros(len(WAYS), 1, dtype=torch.int32)
    got = sampler(100, NativeSampling(pool, 2, isa)).sample(logits, slots, slots, tokens).token_ids
    assert ((got >= 0) & (got < 100)).all()
    inside = (got[:-3] >= 40) & (got[:-3] < 60)
    assert inside.all() if odd == math.inf else not inside.any()


def test_no_rows(isa, pool):
    empty = np.zeros(0, np.int64)
    numbers = torch.zeros(1, 11, dtype=torch.int64)
    drawn = NativeSampling(pool, 2, isa).sample(torch.empty(0, 10), numbers, empty, empty)[0]
    assert drawn.shape == (0,)


def test_follows_the_distribution(isa, pool):
    """Frequencies of drawn tokens are softmax probabilities, renormalised over what truncation keeps."""
    vocab, draws = 40, 20000
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(3)) * 2
    made = Sampler(slots=1, vocab_size=vocab, device=CPU, native=NativeSampling(pool, 2, isa))
    made.admit(Admit(0, "r", [], 1, SamplingParams(temperature=0.7, top_p=0.9), seed=5, branch=0, stop_ids=[]))
    got = made.sample(logits.expand(draws, -1), [0] * draws, list(range(draws)), torch.zeros(1, 1, dtype=torch.int32))
    p = (logits / 0.7).softmax(-1)
    ordered, at = p.sort(descending=True)
    p[at[ordered.cumsum(-1) - ordered >= 0.9]] = 0
    found = torch.bincount(got.token_ids, minlength=vocab) / draws
    assert (found[p == 0] == 0).all()
    assert (found - p / p.sum()).abs().max() < 0.015


# What rows may ask for besides a token, alone and together; stop ids are 1 and 3.
ASKED = [
    {"logit_bias": {0: 5.0, 2: -100.0, 99: 1.5}}, {"min_tokens": 9}, {"min_tokens": 2},
    {"repetition_penalty": 1.3}, {"repetition_penalty": 0.7, "top_k": 5}, {"presence_penalty": 1.5},
    {"frequency_penalty": 0.8, "temperature": 0.0}, {"frequency_penalty": -2.0, "presence_penalty": -1.0},
    {"logprobs": 0}, {"logprobs": 7, "top_p": 0.8}, {"logprobs": 64, "temperature": 0.0}, {"temperature": 0.0},
    {"logit_bias": {5: 3.0}, "min_tokens": 9, "repetition_penalty": 1.2, "presence_penalty": 0.5,
     "frequency_penalty": 0.5, "logprobs": 3, "temperature": 0.6},
]  # fmt: skip


def asking(vocab: int, native: NativeSampling | None) -> Sampler:
    made = Sampler(slots=len(ASKED), vocab_size=vocab, device=CPU, native=native)
    for slot, way in enumerate(ASKED):
        made.admit(Admit(slot, f"r{slot}", [], 4, SamplingParams(**way), seed=slot, branch=0, stop_ids=[1, 3]))
    return made


@pytest.mark.parametrize("kind", ["peaked", "flat", "ties"])
@pytest.mark.parametrize("vocab", [100, 4999])
def test_what_rows_ask_for_is_done_as_the_twins_do_it(isa, pool, kind, vocab):
    plain, fast = asking(vocab, None), asking(vocab, NativeSampling(pool, 2, isa))
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 100, (len(ASKED), 60), generator=generator, dtype=torch.int32)
    logits = logits_of(kind, len(ASKED), vocab)
    before = logits.clone()
    for position in (4, 5, 12, 60):  # as many tokens are known: of the prompt alone, short of the minimum, beyond it
        rows = torch.randperm(len(ASKED), generator=generator).tolist()
        args = logits[rows], rows, [position] * len(rows), tokens
        want, got = plain.sample(*args), fast.sample(*args)
        assert got.token_ids.tolist() == want.token_ids.tolist()
        assert want.logprobs is not None and got.logprobs is not None
        for one, other in zip(got.logprobs.to_host(), want.logprobs.to_host(), strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                assert (one.token, one.rank, one.top_ids) == (other.token, other.rank, other.top_ids)
                assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
                assert one.top_logprobs == pytest.approx(other.top_logprobs, abs=1e-5)
    assert torch.equal(logits, before)


def test_logits_are_left_as_they_are(isa, pool):
    made = asking(100, NativeSampling(pool, 2, isa))
    logits = logits_of("peaked", len(ASKED), 100)
    before = logits.clone()
    made.sample(logits, list(range(len(ASKED))), [20] * len(ASKED), torch.ones(len(ASKED), 60, dtype=torch.int32))
    assert torch.equal(logits, before)


def test_rows_that_share_their_logits(isa, pool):
    """What one is penalised for, another is not."""
    made = Sampler(slots=64, vocab_size=50, device=CPU, native=NativeSampling(pool, 2, isa))
    for slot in range(64):
        params = SamplingParams(temperature=0.0, repetition_penalty=100.0 if slot % 2 else 1.0, logprobs=1)
        made.admit(Admit(slot, f"r{slot}", [], 1, params, seed=0, branch=0, stop_ids=[]))
    logits = torch.arange(50.0).expand(64, -1)
    tokens = torch.full((64, 5), 49, dtype=torch.int32)
    assert made.sample(logits, list(range(64)), [5] * 64, tokens).token_ids.tolist() == [49, 48] * 32


def test_tokens_beyond_the_vocabulary_are_passed_over(isa, pool):
    made = asking(100, NativeSampling(pool, 2, isa))
    tokens = torch.full((len(ASKED), 60), 1 << 20, dtype=torch.int32)
    tokens[:, ::2] = -1
    drawn = made.sample(torch.zeros(len(ASKED), 100), list(range(len(ASKED))), [60] * len(ASKED), tokens).token_ids
    assert ((drawn >= 0) & (drawn < 100)).all()


@pytest.mark.parametrize("vocab", [1, 7, 1500, 49152])
@pytest.mark.parametrize("kind", ["peaked", "flat", "ties", "masked"])
def test_given_tokens_are_scored_as_the_twin_does(isa, pool, kind, vocab):
    logits = logits_of(kind, 20, vocab)
    logits[:, 0] = logits[:, 0].clamp(min=-30)
    targets = torch.randint(0, vocab, (20,), generator=torch.Generator().manual_seed(2))
    for top in (0, 1, 20):
        want, got = (sampler(vocab, n).score(logits, targets, top) for n in (None, NativeSampling(pool, 2, isa)))
        for one, other in zip(got.to_host(), want.to_host(), strict=True):
            assert (one.token, one.rank, one.top_ids) == (other.token, other.rank, other.top_ids)
            assert one.logprob == pytest.approx(other.logprob, abs=2e-5)
            assert one.top_logprobs == pytest.approx(other.top_logprobs, abs=2e-5)


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_odd_numbers_are_scored_somehow(isa, pool, odd):
    logits = logits_of("peaked", 4, 100)
    logits[:2, 40:60] = odd
    logits[2] = odd
    scores = sampler(100, NativeSampling(pool, 2, isa)).score(logits, torch.tensor([3, 50, 7, 8]), 100)
    for entry in scores.to_host():
        assert all(0 <= id < 100 for id in entry.top_ids) and 1 <= entry.rank <= 100
