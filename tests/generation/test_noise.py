"""Noise: bit-equal to a scalar twin in unbounded Python integers, and random where it ought to be."""

from __future__ import annotations

import math

import numpy as np
import torch

from quire.generation.sampling.noise import gumbel, row_keys, streams, uniform

M32, M64 = (1 << 32) - 1, (1 << 64) - 1


def mix64(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & M64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & M64
    return x ^ (x >> 31)


def mix32(x: int) -> int:
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & M32
    x = ((x ^ (x >> 15)) * 0x846CA68B) & M32
    return x ^ (x >> 16)


def scalar_uniform(seed: int, branch: int, position: int, token: int) -> np.float32:
    golden = 0x9E3779B97F4A7C15
    stream = mix64((mix64((seed + golden) & M64) + branch * golden) & M64)
    key = mix64((stream + (position + 1) * golden) & M64)
    x = ((mix32((token * 0x9E3779B9) & M32) ^ (key & M32)) * 0x7FEB352D) & M32
    x = (((x ^ (x >> 15)) ^ (key >> 32)) * 0x846CA68B) & M32
    sign_dragged = (x >> 16) | (0xFFFF0000 if x >> 31 else 0)
    bits = x ^ sign_dragged
    assert bits < 1 << 31
    return (np.float32(bits) + np.float32(0.5)) * np.float32(2.0**-31 * (1 - 2.0**-23))


def keys_of(seeds: list[int], branches: list[int], positions: list[int], device: torch.device) -> torch.Tensor:
    seed, branch, position = (torch.tensor(x, device=device) for x in (seeds, branches, positions))
    return row_keys(streams(seed, branch), position)


def test_equals_scalar_twin(device: torch.device) -> None:
    rng = np.random.default_rng(0)
    seeds = [0, 1, -1, (1 << 63) - 1, -(1 << 63), *rng.integers(-(1 << 62), 1 << 62, 11).tolist()]
    branches = [0, 1, 127, 3, *rng.integers(0, 128, 12).tolist()]
    positions = [0, 1, 131071, 7, *rng.integers(0, 1 << 20, 12).tolist()]
    ids = [0, 1, 2, 49151, 128255, 262143, *rng.integers(0, 1 << 18, 20).tolist()]
    got = uniform(keys_of(seeds, branches, positions, device), torch.tensor(ids, device=device)).cpu().numpy()
    want = [[scalar_uniform(*row, token) for token in ids] for row in zip(seeds, branches, positions, strict=True)]
    assert np.array_equal(got, np.array(want, np.float32))


def test_gumbel_equals_its_definition(device: torch.device) -> None:
    keys, ids = keys_of([5, 6], [0, 0], [3, 4], device), torch.arange(50_000, device=device)
    exact = -np.log(-np.log1p(-uniform(keys, ids).cpu().numpy().astype(np.float64)))
    assert np.abs(gumbel(keys, ids).cpu().numpy() - exact).max() < 2e-6


def test_candidates_get_the_noise_of_their_ids(device: torch.device) -> None:
    keys = keys_of([1, 2, 3], [0, 1, 0], [9, 9, 10], device)
    everything = gumbel(keys, torch.arange(1000, device=device))
    ids = torch.tensor([[5, 999, 0], [7, 7, 1], [500, 2, 3]], device=device)
    assert torch.equal(gumbel(keys, ids), everything.gather(1, ids))


def test_rows_do_not_depend_on_the_batch(device: torch.device) -> None:
    keys, ids = keys_of(list(range(37)), [0] * 37, list(range(37)), device), torch.arange(4099, device=device)
    together = gumbel(keys, ids)
    assert all(torch.equal(gumbel(keys[i : i + 1], ids)[0], together[i]) for i in range(37))


def test_extreme_uniforms_give_finite_noise() -> None:
    largest = np.float32(2.0**31) * np.float32(2.0**-31 * (1 - 2.0**-23))
    smallest = np.float32(0.5) * np.float32(2.0**-31)
    assert smallest > 0 and largest < 1
    assert math.isfinite(-math.log(-math.log1p(-largest))) and math.isfinite(-math.log(-math.log1p(-smallest)))


def test_uniform_over_tokens_positions_branches_and_seeds() -> None:
    """Along each coordinate alone: 64 equal bins (chi-square, 63 degrees, 5 sigma) and no lag-one correlation."""
    n, here = 100_000, torch.device("cpu")
    zeros = [0] * n
    along = {
        "token": uniform(keys_of([1], [0], [0], here), torch.arange(n))[0],
        "position": uniform(keys_of(zeros, zeros, list(range(n)), here), torch.tensor([17]))[:, 0],
        "branch": uniform(keys_of(zeros, list(range(n)), zeros, here), torch.tensor([17]))[:, 0],
        "seed": uniform(keys_of(list(range(n)), zeros, zeros, here), torch.tensor([17]))[:, 0],
    }
    for name, values in along.items():
        u = values.numpy().astype(np.float64)
        counts = np.histogram(u, 64, (0, 1))[0]
        chi2 = ((counts - n / 64) ** 2 / (n / 64)).sum()
        assert chi2 < 63 + 5 * math.sqrt(2 * 63), name
        assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 5 / math.sqrt(n), name
        assert len(np.unique(values)) > 0.99 * n, name


def test_bits_are_balanced_and_avalanche() -> None:
    """Flipping one bit of any input flips every output bit about half the time."""
    n, here = 20_000, torch.device("cpu")
    rng = np.random.default_rng(1)
    base = [rng.integers(0, 1 << 16, n) for _ in range(4)]

    def bits(inputs: list[np.ndarray]) -> np.ndarray:
        seed, branch, position, token = (torch.from_numpy(x) for x in inputs)
        u = uniform(row_keys(streams(seed, branch), position), token.unsqueeze(-1))[:, 0].to(here).double().numpy()
        return ((u[:, None] * 2.0 ** np.arange(1, 17)).astype(np.int64) & 1).astype(bool)  # the first 16 bits

    before = bits(base)
    assert np.abs(before.mean(0) - 0.5).max() < 0.02
    for which in range(4):
        for flipped in (0, 5, 15):
            inputs = list(base)
            inputs[which] = base[which] ^ (1 << flipped)
            assert np.abs((bits(inputs) ^ before).mean(0) - 0.5).max() < 0.02, (which, flipped)


def test_rows_are_uncorrelated_across_neighbouring_seeds_branches_and_positions() -> None:
    n, here = 49_152, torch.device("cpu")
    rows = [(s, b, p) for s in (0, 1, 2) for b in (0, 1) for p in (5, 6, 7)]
    seeds, branches, positions = (list(column) for column in zip(*rows, strict=True))
    noise = uniform(keys_of(seeds, branches, positions, here), torch.arange(n)).numpy()
    off_diagonal = np.corrcoef(noise) - np.eye(len(rows))
    assert np.abs(off_diagonal).max() < 5 / math.sqrt(n)
