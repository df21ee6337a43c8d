"""Attention in parts: put together by their log-sum-exps, they are attention over all keys."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.attention_backend import AttentionSpec
from quire.kernels.eager.partial_attention import Partial, beside_sinks, merge, partial_attention, visible_keys
from quire.kernels.reference.plain_attention import attend

SPECS = {
    "plain": {},
    "window": {"window": 9},
    "chunks": {"window": 8, "chunked": True},
    "soft cap": {"softcap": 1.5},
    "sinks": {"sinks": torch.tensor([0.3, -1.0, 2.0, 0.5, 0.0, 1.0])},
    "latent": {"kv_heads": 1, "values_from": 4},
}


def numbers(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape) * sum(shape)))


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("parts", [1, 3])
def test_parts_make_the_whole(name, parts):
    """Keys dealt out to as many ranks, of which the last queries' windows may see none."""
    spec = AttentionSpec(**{"heads": 6, "kv_heads": 2, "head_dim": 12, "scale": 0.3} | SPECS[name])
    q, k, v = numbers(40, 6, 12), numbers(40, spec.kv_heads, 12), numbers(40, spec.kv_heads, 12)
    if spec.values_from is not None:
        v = k[..., spec.values_from :]
    positions = torch.arange(40)
    found = []
    for rank in range(parts):
        seen = visible_keys(spec, positions, positions[rank::parts])[None]
        found.append(partial_attention(spec, q[None], k[None, rank::parts], v[None, rank::parts], seen))
    whole = beside_sinks(spec, merge(found))[0]
    torch.testing.assert_close(whole, attend(spec, q, k, v, positions), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize("causal", [False, True])
def test_the_kernel_that_says_log_sum_exps_does_as_plain_products(kv_heads, causal):
    spec = AttentionSpec(heads=6, kv_heads=kv_heads, head_dim=12, scale=0.3)
    q, k, v = numbers(2, 20, 6, 12), numbers(2, 20, kv_heads, 12), numbers(2, 20, kv_heads, 12)
    seen = torch.ones(1, 20, 20, dtype=torch.bool)
    wanted = partial_attention(spec, q, k, v, seen.tril() if causal else seen)
    for got, want in zip(partial_attention(spec, q, k, v, causal=causal), wanted, strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("keys", [0, 5])
def test_a_part_without_a_key_counts_for_nothing(keys):
    spec = AttentionSpec(heads=6, kv_heads=2, head_dim=12, scale=0.3)
    q, k, v = numbers(1, 7, 6, 12), numbers(1, 9, 2, 12), numbers(1, 9, 2, 12)
    nothing = partial_attention(spec, q, k[:, :keys], v[:, :keys], torch.zeros(1, 1, keys, dtype=torch.bool))
    assert nothing.lse.isneginf().all() and not nothing.out.any()
    part, found = partial_attention(spec, q, k, v), Partial.nothing(spec, q)
    found.add(slice(None), merge([nothing, part, nothing]))
    torch.testing.assert_close(found.out, part.out)
    torch.testing.assert_close(found.lse, part.lse)
