"""The compiled draw against its plain twin: the same tokens from the same logits, for every way of drawing."""

import math

import numpy as np
import pytest
import torch

from quire.generation.sampling.sampler import Sampler
from quire.kernels.cpu import CompiledDraw
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


def sampler(vocab: int, draw: CompiledDraw | None) -> Sampler:
    made = Sampler(slots=len(WAYS), vocab_size=vocab, device=CPU, draw=draw)
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
    plain, fast = sampler(vocab, None), sampler(vocab, CompiledDraw(pool, isa))
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
    drawer = CompiledDraw(pool, isa)
    got = sampler(75, drawer).sample(wide[:, :75], slots, slots, tokens).token_ids
    assert torch.equal(got, sampler(75, drawer).sample(wide[:, :75].contiguous(), slots, slots, tokens).token_ids)
    assert (got < 75).all()


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_odd_numbers_give_a_token(isa, pool, odd):
    logits = logits_of("peaked", len(WAYS), 100)
    logits[:, 40:60] = odd
    logits[-3:] = odd
    slots, tokens = list(range(len(WAYS))), torch.zeros(len(WAYS), 1, dtype=torch.int32)
    got = sampler(100, CompiledDraw(pool, isa)).sample(logits, slots, slots, tokens).token_ids
    assert ((got >= 0) & (got < 100)).all()
    inside = (got[:-3] >= 40) & (got[:-3] < 60)
    assert inside.all() if odd == math.inf else not inside.any()


def test_no_rows(isa, pool):
    empty = np.zeros(0, np.int64)
    numbers = torch.zeros(1, 11, dtype=torch.int64)
    drawn = CompiledDraw(pool, isa)(torch.empty(0, 10), numbers, empty, empty, empty.astype(bool))
    assert drawn.shape == (0,)


def test_follows_the_distribution(isa, pool):
    """Frequencies of drawn tokens are softmax probabilities, renormalised over what truncation keeps."""
    vocab, draws = 40, 20000
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(3)) * 2
    made = Sampler(slots=1, vocab_size=vocab, device=CPU, draw=CompiledDraw(pool, isa))
    made.admit(Admit(0, "r", [], 1, SamplingParams(temperature=0.7, top_p=0.9), seed=5, branch=0, stop_ids=[]))
    got = made.sample(logits.expand(draws, -1), [0] * draws, list(range(draws)), torch.zeros(1, 1, dtype=torch.int32))
    p = (logits / 0.7).softmax(-1)
    ordered, at = p.sort(descending=True)
    p[at[ordered.cumsum(-1) - ordered >= 0.9]] = 0
    found = torch.bincount(got.token_ids, minlength=vocab) / draws
    assert (found[p == 0] == 0).all()
    assert (found - p / p.sum()).abs().max() < 0.015
