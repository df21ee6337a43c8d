"""Draws without a sort against draws over the full order: the same tokens, and the same noise to the bit."""

import math

import pytest
import torch
import triton
import triton.language as tl

from quire.generation.sampling import noise
from quire.kernels.triton import draw_kernels as drawing
from quire.kernels.triton import sampling_kernels as sampling

VOCAB = 300


@triton.jit
def uniform_kernel(streams, positions, out, N: tl.constexpr):
    row, ids = tl.program_id(0), tl.arange(0, N)
    key0, key1 = sampling.row_keys(tl.load(streams + row), tl.load(positions + row))
    tl.store(out + row * N + ids, sampling.uniform(key0, key1, ids) * 4.656612317858205e-10)


@triton.jit
def gumbel_kernel(streams, positions, out, N: tl.constexpr):
    row, ids = tl.program_id(0), tl.arange(0, N)
    key0, key1 = sampling.row_keys(tl.load(streams + row), tl.load(positions + row))
    tl.store(out + row * N + ids, sampling.gumbel(key0, key1, ids, False))


def test_noise_is_that_of_the_sampler():
    streams, positions = noise.streams(torch.arange(4), torch.zeros(4).long()), torch.arange(4) * 1000
    keys = noise.row_keys(streams, positions)
    got = torch.empty(4, 4096)
    uniform_kernel[(4,)](streams, positions, got, N=4096)
    assert torch.equal(got, noise.uniform(keys, torch.arange(4096)))
    gumbel_kernel[(4,)](streams, positions, got, N=4096)
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


def logits_of(shape, rows, vocab):
    if shape == "flat":
        logits = torch.zeros(rows, vocab)
        logits[:, 7] = -0.0
        return logits
    logits = torch.randn(rows, vocab) * 3
    if shape == "peaked":  # and what a grammar forbids
        logits = logits * 3
        logits[:, ::3] = -math.inf
    return {"ties": logits.round(), "bf16": logits.bfloat16()}.get(shape, logits)


CASES = [  # temperature, top-k, top-p, log min-p; off: the vocabulary, infinity, -infinity
    (1.0, 0, math.inf, -math.inf),
    (1.0, 0, 0.9, -math.inf),
    (1.5, 0, 0.999, -math.inf),
    (0.7, 5, math.inf, -math.inf),
    (1.3, 50, 0.8, -math.inf),
    (1.0, 0, math.inf, -2.0),
    (2.0, 40, 0.7, -3.0),
    (1.0, 1, math.inf, -math.inf),
    (1.0, 0, 1e-9, -math.inf),
    (0.0, 0, 0.5, -math.inf),
    (3.0, 0, 0.3, -4.0),
    (0.5, -1, 0.9, -math.inf),
    (4.0, -1, math.inf, -2.0),
]  # fmt: skip


@pytest.mark.parametrize(
    ("vocab", "shape"), [*((VOCAB, s) for s in ("spread", "ties", "flat", "peaked", "bf16")), (5000, "bf16")]
)
def test_draws_are_those_of_the_whole_order(shape, vocab):
    """In slots of any order, at positions of their own, one of them twice; small vocabularies and several chunks."""
    torch.manual_seed(len(shape))
    rows = len(CASES)
    numbers = torch.zeros(rows + 2, 11, dtype=torch.int64)
    slots = torch.randperm(rows + 2)[:rows]
    streams = noise.streams(torch.arange(rows) * 7, torch.zeros(rows).long())
    top_k = [vocab if k == 0 else vocab - 3 if k < 0 else k for _, k, _, _ in CASES]
    floats = torch.tensor([(p, heat, floor) for heat, _, p, floor in CASES], dtype=torch.float64)
    numbers[slots, 0], numbers[slots, 2] = streams, torch.tensor(top_k)
    numbers[slots, 5:8] = floats.view(torch.int64)
    logits = logits_of(shape, rows, vocab)
    for step in range(2):
        positions = torch.randint(0, 4000, (rows,))
        keys = noise.row_keys(streams, positions)
        heat, top_p, floor = floats[:, 1].float(), floats[:, 0], floats[:, 2].float()
        got = drawing.draw(logits, numbers, slots, positions).tolist()
        dense = logits.float()
        expected = [
            drawn_in_order(dense[r], keys[r], heat[r], top_k[r], float(top_p[r]), floor[r]) for r in range(rows)
        ]
        assert got == expected, step
