"""Log-probabilities, ranks and tops against plain numpy, row by row."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from quire.generation.sampling import sampler as sampler_module
from quire.generation.sampling.logprobs import LogprobTensors, score_rows
from quire.generation.sampling.sampler import Sampler
from quire.types.grammar import GrammarSpec
from quire.types.plan import TokenLogprobs


def twin(logits: np.ndarray, token: int, top: int) -> TokenLogprobs:
    wide = logits.astype(np.float64)
    logprobs = wide - wide.max() - np.log(np.exp(wide - wide.max()).sum())
    order = sorted(range(len(logits)), key=lambda t: (-logits[t], t))[:top]
    rank = sum(value > logits[token] for value in logits) + 1
    return TokenLogprobs(token, float(logprobs[token]), rank, order, [float(logprobs[t]) for t in order])


def same(got: TokenLogprobs | None, want: TokenLogprobs) -> None:
    assert got is not None
    assert (got.token, got.rank, got.top_ids) == (want.token, want.rank, want.top_ids)
    assert np.allclose([got.logprob, *got.top_logprobs], [want.logprob, *want.top_logprobs], atol=1e-5)


def scored(logits: torch.Tensor, targets: list[int], top: int) -> LogprobTensors:
    return score_rows(logits, torch.tensor(targets, device=logits.device), [top] * len(targets))


@pytest.mark.parametrize("top", [0, 1, 5, 64])
def test_score_equals_twin(top: int, device: torch.device) -> None:
    logits = torch.randn(7, 1003, generator=torch.Generator().manual_seed(top)).mul(4).round().to(device)  # many ties
    targets = [0, 1002, 5, 77, 500, 3, 9]
    got = scored(logits, targets, top)
    copied = got.start_copy()
    if device.type == "cuda":
        torch.cuda.synchronize()
    for host in (got.to_host(), copied.to_host()):
        for row, token, entry in zip(logits.cpu().numpy(), targets, host, strict=True):
            same(entry, twin(row, token, top))


@pytest.mark.parametrize("flat", [False, True])
def test_kernels_equal_twin(flat: bool, kernels: None) -> None:
    """In the interpreter, over several chunks; flat: more tokens are as likely as the last of the top than can be
    looked at together."""
    logits = torch.randn(3, 5000, generator=torch.Generator().manual_seed(1)).mul(4).bfloat16()
    if flat:
        logits[1], logits[2, 10:] = 1.0, -math.inf
    targets = [4999, 5, 4097]
    for row, token, entry in zip(logits.float().numpy(), targets, scored(logits, targets, 20).to_host(), strict=True):
        with np.errstate(all="ignore"):
            same(entry, twin(row, token, 20))


def test_top_is_at_most_the_vocabulary() -> None:
    (entry,) = scored(torch.tensor([[0.0, 2.0, 1.0]]), [0], 20).to_host()
    assert entry is not None and entry.top_ids == [1, 2, 0] and entry.rank == 3


def test_sampled_logprobs_are_of_the_raw_logits(device: torch.device, admit: Any) -> None:
    sampler = Sampler(slots=4, vocab_size=50, device=device)
    admit(sampler, 0, temperature=0.0, logit_bias={7: 100.0}, logprobs=2)
    admit(sampler, 1, temperature=0.5, top_k=3, seed=1)
    admit(sampler, 2, temperature=2.0, top_p=0.5, logprobs=0, seed=2)
    admit(sampler, 3, temperature=0.0, repetition_penalty=9.0, logprobs=5)
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(3)).to(device)
    tokens = torch.zeros(4, 8, dtype=torch.int32, device=device)
    before = logits.clone()
    sampled = sampler.sample(logits, [2, 1, 0, 3], [1, 1, 1, 1], tokens)
    assert torch.equal(logits, before)
    assert sampled.logprobs is not None
    host, drawn = sampled.logprobs.to_host(), sampled.token_ids.tolist()
    assert drawn[2] == 7 and host[1] is None
    for row, top in ((0, 0), (2, 2), (3, 5)):
        same(host[row], twin(logits[row].cpu().numpy(), drawn[row], top))


def test_drawn_in_slices_as_all_at_once(device: torch.device, admit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    n, vocab = 23, 50
    rng = np.random.default_rng(4)
    logits = torch.from_numpy(rng.standard_normal((n, vocab), dtype=np.float32)).to(device)
    tokens = torch.from_numpy(rng.integers(0, vocab, (n, 8), dtype=np.int32)).to(device)
    ways: list[dict[str, Any]] = [
        {"temperature": 0.0, "logprobs": 3},
        {"temperature": 0.7, "top_k": 5},
        {"temperature": 1.5, "top_p": 0.6, "logprobs": 0, "frequency_penalty": 1.0},
        {"temperature": 1.0, "grammar": GrammarSpec("regex", "a")},
    ]
    kinds = [ways[0]] * 5 + [ways[i % 4] for i in range(10)] + [ways[1]] * 8
    masks = rng.integers(1, 255, (sum("grammar" in kind for kind in kinds), -(-vocab // 8)), dtype=np.uint8)
    found = []
    for rows in (256, 23, 5, 1):
        monkeypatch.setattr(sampler_module, "SLICE_ROWS", rows)
        sampler = Sampler(slots=n, vocab_size=vocab, device=device)
        for slot, kind in enumerate(kinds):
            admit(sampler, slot, seed=slot, **kind)
        sampled = sampler.sample(logits, list(range(n)), [6] * n, tokens, masks)
        assert sampled.logprobs is not None
        found.append((sampled.token_ids.tolist(), sampled.logprobs.to_host()))
    assert all(other == found[0] for other in found[1:])
    assert [entry is not None for entry in found[0][1]] == ["logprobs" in kind for kind in kinds]
