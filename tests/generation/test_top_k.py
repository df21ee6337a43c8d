"""The order of tokens against torch's stable sort, on data full of ties."""

from __future__ import annotations

import pytest
import torch

from quire.generation.sampling.top_k import argmax_tokens, top_k_tokens


def tied(rows: int, vocab: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows * 7919 + vocab)
    logits = torch.randint(-6, 6, (rows, vocab), generator=generator).float()
    logits[0] = 0.0
    logits[1, ::2] = -0.0
    logits[2] = torch.randn(vocab, generator=generator)
    logits[3, :] = float("-inf")
    logits[4, torch.rand(vocab, generator=generator) < 0.9] = float("-inf")
    return logits.to(device)


@pytest.mark.parametrize("vocab", [5, 64, 1000, 4099, 50257])
def test_order_is_that_of_a_stable_sort(vocab: int, device: torch.device) -> None:
    logits = tied(6, vocab, device)
    want = logits.sort(dim=-1, descending=True, stable=True)
    for k in sorted({1, 2, 5, min(50, vocab), min(700, vocab), vocab}):
        values, ids = top_k_tokens(logits, k)
        assert torch.equal(ids, want.indices[:, :k]), k
        assert torch.equal(values, want.values[:, :k]), k


@pytest.mark.parametrize("vocab", [5, 64, 4099])
def test_best_is_the_first_of_the_order(vocab: int, device: torch.device) -> None:
    logits = tied(6, vocab, device)
    assert torch.equal(argmax_tokens(logits), logits.sort(dim=-1, descending=True, stable=True).indices[:, 0])
    assert argmax_tokens(logits[:0]).shape == (0,)


def test_inputs_are_left_alone(device: torch.device) -> None:
    logits = tied(6, 300, device)
    before = logits.clone()
    top_k_tokens(logits, 300), top_k_tokens(logits, 3), argmax_tokens(logits)
    assert torch.equal(logits, before)
