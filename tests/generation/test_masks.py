"""Masks of grammars in the sampler: whatever the way of drawing, only what is allowed is drawn."""

import numpy as np
import pytest
import torch

from quire.generation.sampling.sampler import Sampler
from quire.types.grammar import GrammarSpec

VOCAB = 300
WAYS = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.6},
    {"temperature": 2.0, "repetition_penalty": 1.3, "presence_penalty": 1.0},
    {"temperature": 0.0, "logit_bias": {7: 50.0}},
]


def packed(allowed):
    bits = np.zeros((len(allowed), VOCAB), np.uint8)
    for row, ids in zip(bits, allowed, strict=True):
        row[list(ids)] = 1
    return np.packbits(bits, axis=1, bitorder="little")


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_only_allowed_tokens_are_drawn(device, admit, way):
    sampler = Sampler(slots=8, vocab_size=VOCAB, device=device)
    for slot in range(8):
        admit(sampler, slot, seed=slot, grammar=GrammarSpec("json_object") if slot % 2 else None, **way)
    tokens = torch.zeros(8, 64, dtype=torch.int32, device=device)
    generator = torch.Generator().manual_seed(1)
    rng = np.random.default_rng(1)
    for position in range(1, 40):
        logits = torch.randn(8, VOCAB, generator=generator).to(device) * 3
        before = logits.clone()
        allowed = [set(rng.choice(VOCAB, rng.integers(1, 6), replace=False).tolist()) for _ in range(4)]
        drawn = sampler.sample(logits, list(range(8)), [position] * 8, tokens, packed(allowed)).token_ids.tolist()
        free = sampler.sample(logits[::2], list(range(0, 8, 2)), [position] * 4, tokens).token_ids.tolist()
        assert all(token in ids for token, ids in zip(drawn[1::2], allowed, strict=True))
        assert drawn[::2] == free, "rows without a grammar do not notice"
        assert torch.equal(logits, before)


def test_the_best_allowed_token_is_the_greedy_one(device, admit):
    sampler = Sampler(slots=1, vocab_size=VOCAB, device=device)
    admit(sampler, 0, temperature=0.0, grammar=GrammarSpec("json_object"))
    logits = torch.arange(VOCAB, dtype=torch.float32, device=device).unsqueeze(0)
    tokens = torch.zeros(1, 8, dtype=torch.int32, device=device)
    assert sampler.sample(logits, [0], [1], tokens, packed([{3, 250, 17}])).token_ids.tolist() == [250]
    logits[0, [3, 17, 250]] = float("-inf")  # forbidden by something else, too: the grammar has the last word
    assert sampler.sample(logits, [0], [1], tokens, packed([{3, 250, 17}])).token_ids.tolist()[0] in (3, 250, 17)


def test_masks_of_captured_launches_are_of_their_own_rows(replays, admit):
    """Penalties, bias and grammars in one batch, and rows that have none; with fewer rows and other masks than before,
    what lies in that memory from then is for nobody."""
    sampler, plain = (Sampler(slots=8, vocab_size=VOCAB, device=torch.device("cpu")) for _ in range(2))
    assert sampler._kernels is not None
    sampler._kernels._graphs, plain._kernels = True, None
    for each in (sampler, plain):
        for slot in range(8):
            grammar = GrammarSpec("json_object") if slot % 3 else None
            admit(each, slot, seed=slot, grammar=grammar, **WAYS[slot % len(WAYS)])
    tokens = torch.zeros(8, 64, dtype=torch.int32)
    generator, rng = torch.Generator().manual_seed(2), np.random.default_rng(2)
    for slots in ([*range(8)], [1, 3, 5], [0, 3, 6], [2], [7, 0, 4, 1, 5]):
        logits = torch.randn(len(slots), VOCAB, generator=generator) * 3
        allowed = [rng.choice(VOCAB, rng.integers(1, 6), replace=False).tolist() for slot in slots if slot % 3]
        given = logits, slots, [9] * len(slots), tokens, packed(allowed) if allowed else ()
        drawn = sampler.sample(*given).token_ids.tolist()
        assert drawn == plain.sample(*given).token_ids.tolist()
        masked = [token for slot, token in zip(slots, drawn, strict=True) if slot % 3]
        assert all(token in ids for token, ids in zip(masked, allowed, strict=True))
    assert [kind.masked for kind in replays] == [True, True, False, True, True]
