"""Draws without a sort against draws over the full order: the same tokens, and the same noise to the bit."""

import math

import pytest
import torch
import triton
import triton.language as tl

from quire.generation.sampling import noise
from quire.kernels.triton import sampling_kernels as sampling

VOCAB = 300


@triton.jit
def uniform_kernel(keys, out, N: tl.constexpr):
    row, ids = tl.program_id(0), tl.arange(0, N)
    u = sampling.uniform(tl.load(keys + row * 2), tl.load(keys + row * 2 + 1), ids) * 4.656612317858205e-10
    tl.store(out + row * N + ids, u)


@triton.jit
def gumbel_kernel(keys, out, N: tl.constexpr):
    row, ids = tl.program_id(0), tl.arange(0, N)
    tl.store(out + row * N + ids, sampling.gumbel(tl.load(keys + row * 2), tl.load(keys + row * 2 + 1), ids))


def keys_for(rows, seed=0):
    return noise.row_keys(noise.streams(torch.arange(rows) + seed, torch.zeros(rows).long()), torch.arange(rows))


def test_noise_is_that_of_the_sampler():
    keys = keys_for(4)
    got = torch.empty(4, 4096)
    uniform_kernel[(4,)](keys, got, N=4096)
    assert torch.equal(got, noise.uniform(keys, torch.arange(4096)))
    gumbel_kernel[(4,)](keys, got, N=4096)
    torch.testing.assert_close(got, noise.gumbel(keys, torch.arange(4096)), atol=2e-7, rtol=2e-6)


@pytest.mark.parametrize("vocab", [1, 7, 5000])
def test_argmax(vocab):
    logits = torch.randn(3, vocab)
    assert torch.equal(sampling.argmax(logits), logits.argmax(-1))
    assert torch.equal(sampling.argmax(logits), logits.argmax(-1))  # counters are back at zero


def test_argmax_takes_the_lowest_id_of_equals():
    logits = torch.zeros(2, 9000)
    logits[1, [5, 4500, 8999]] = 1.0
    assert sampling.argmax(logits).tolist() == [0, 5]


def test_temperature_alone():
    logits, keys = torch.randn(4, VOCAB) * 3, keys_for(4)
    heat = torch.tensor([1.0, 0.5, 2.0, 0.0])
    expected = (noise.gumbel(keys, torch.arange(VOCAB)) * heat[:, None] + logits).argmax(-1)
    assert torch.equal(sampling.argmax(logits, keys, heat), expected)


def drawn_in_order(logits, keys, heat, top_k, top_p, log_min_p):
    """One row, as the definition reads: sort, cut, draw."""
    if heat <= 0:
        return int(logits.argmax())
    order = sorted(range(len(logits)), key=lambda i: (-logits[i].item(), i))
    floor = logits.max() + heat * log_min_p
    order = [i for i in order[:top_k] if logits[i] >= floor]
    weights = [math.exp((logits[i] - logits.max()).item() / heat.item()) for i in order]
    kept, mass = [], 0.0
    for i, weight in zip(order, weights, strict=True):
        if kept and mass >= top_p * sum(weights):
            break
        kept.append(i)
        mass += weight
    scores = noise.gumbel(keys[None], torch.tensor(kept))[0] * heat + logits[kept]
    return kept[int(scores.argmax())]


def test_truncated_draws():
    inf = math.inf
    cases = [  # temperature, top-k, top-p, log min-p
        (1.0, VOCAB, 0.9, -inf),
        (1.5, VOCAB, 0.999, -inf),
        (0.7, 5, inf, -inf),
        (1.3, 50, 0.8, -inf),
        (1.0, VOCAB, inf, -2.0),
        (2.0, 40, 0.7, -3.0),
        (1.0, 1, inf, -inf),
        (1.0, VOCAB, 1e-9, -inf),
        (0.0, VOCAB, 0.5, -inf),
        (1.0, VOCAB, inf, -inf),
    ]
    rows = len(cases)
    heat, top_k, top_p, floor = (torch.tensor(column) for column in zip(*cases, strict=True))
    heat, top_p, floor = heat.float(), top_p.double(), floor.float()
    for seed, shape in enumerate(("spread", "ties", "flat")):
        logits = torch.randn(rows, VOCAB) * 3
        if shape == "ties":
            logits = logits.round()
        if shape == "flat":
            logits = torch.zeros(rows, VOCAB)
            logits[:, 7] = -0.0
        keys = keys_for(rows, seed * 100)
        got = sampling.draw(logits, keys, heat, top_k, top_p, floor).tolist()
        expected = [
            drawn_in_order(logits[r], keys[r], heat[r], int(top_k[r]), float(top_p[r]), floor[r]) for r in range(rows)
        ]
        assert got == expected, shape
