"""Attention over latent pages, interpreted, against the reference."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.attention_backend import AttentionSpec
from quire.kernels.batch_assembly import whole_sequence
from quire.kernels.eager import torch_ops
from quire.kernels.reference.plain_attention import ReferenceAttention
from quire.kernels.triton.latent_attention import LatentAttention, Plan
from quire.types.kv import TokenShape, layout_for


@pytest.mark.parametrize(("heads", "rope", "rank"), [(3, 4, 16), (20, 16, 24)])
@pytest.mark.parametrize("splits", [1, 4])
def test_against_the_reference(heads, rope, rank, splits):
    torch.manual_seed(0)
    width, tokens = rope + rank, 21
    layout = layout_for([TokenShape(1, width, values_from=rope)], page_size=4, dtype="float32")
    batch, kv = whole_sequence(layout, tokens, torch.device("cpu"))
    spec = AttentionSpec(heads, 1, width, width**-0.5, itemsize=4, values_from=rope)
    k, q = torch.randn(tokens, 1, width), torch.randn(tokens, heads, width)
    torch_ops.write_kv(k, k, kv.layers[0], batch.groups[0].kv_slots)
    want = ReferenceAttention().forward(spec, q, kv.layers[0], batch, batch.groups[0], None)
    plan = Plan(torch.zeros(tokens, dtype=torch.int32), splits)
    got = LatentAttention().forward(spec, q, kv.layers[0], batch, batch.groups[0], plan)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
