"""LoRA of many adapters by Triton kernels, interpreted, and by plain torch, against token by token products."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.eager import grouped_lora
from quire.kernels.triton import lora_kernels

KINDS = {"torch": grouped_lora, "triton": lora_kernels}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("tokens", "parts", "rank"), [(1, (24,), 4), (5, (40, 8, 8), 16), (70, (96, 80), 8)])
def test_each_token_has_its_own_adapter(kind, tokens, parts, rank):
    ops, slots, columns = KINDS[kind], 5, 48
    generator = torch.Generator().manual_seed(tokens)
    a = torch.randn(slots, len(parts) * rank, columns, generator=generator)
    b = torch.randn(slots, sum(parts), rank, generator=generator)
    a[0], b[0] = 0, 0
    x, base = (torch.randn(tokens, n, generator=generator) for n in (columns, sum(parts)))
    adapters = torch.randint(0, slots, (tokens,), generator=generator)
    wanted = base.clone()
    for token, slot in enumerate(adapters.tolist()):
        low = (a[slot] @ x[token]).split(rank)
        wanted[token] += torch.cat([rows @ each for rows, each in zip(b[slot].split(parts), low, strict=True)])
    out = base.clone()
    ops.add_lora(out, x, a, b, parts, ops.segments(adapters, slots))
    torch.testing.assert_close(out, wanted, atol=1e-3, rtol=1e-4)
    assert torch.equal(out[adapters == 0], base[adapters == 0])
