"""The operations: the oracle against torch and transformers, every faster twin against the oracle."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from quire.kernels.eager import torch_ops as eager
from quire.kernels.kv_views import KVViews, allocate_kv
from quire.kernels.reference import plain_ops as reference
from quire.types.kv import TokenShape, layout_for

modules = pytest.mark.parametrize("ops", [reference, eager], ids=["reference", "eager"])
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def near(a: torch.Tensor, b: torch.Tensor) -> None:
    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[a.dtype]
    torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


@modules
@dtypes
def test_norms(ops, dtype):
    torch.manual_seed(0)
    x, residual, weight, bias = (torch.randn(*shape).to(dtype) for shape in [(7, 48), (7, 48), (48,), (48,)])
    theirs = LlamaRMSNorm(48, eps=1e-5).to(dtype)
    theirs.weight.data.copy_(weight)
    near(ops.rms_norm(x, weight, 1e-5), theirs(x))
    near(ops.layer_norm(x, weight, bias, 1e-5), F.layer_norm(x, (48,), weight, bias, 1e-5))
    total = residual + x
    near(ops.add_rms_norm(x, residual, weight, 1e-5), theirs(total))
    assert torch.equal(residual, total), "the residual is updated in place"


@modules
@dtypes
def test_rope(ops, dtype):
    torch.manual_seed(0)
    heads = torch.randn(9, 6, 20).to(dtype)
    x = heads[:, 1:5]  # strided, as a slice of the fused qkv is
    positions = torch.tensor([0, 1, 2, 50, 51, 7, 900, 3, 8000])
    frequencies = 1.0 / 10000 ** (torch.arange(0, 20, 2) / 20)
    cos, sin = ops.rope_tables(positions, frequencies, 1.5, dtype)
    angles = torch.cat([positions[:, None] * frequencies] * 2, dim=-1)[None]
    q, _ = apply_rotary_pos_emb(
        x.transpose(0, 1)[None], x.transpose(0, 1)[None], (angles.cos() * 1.5).to(dtype), (angles.sin() * 1.5).to(dtype)
    )
    near(ops.rope(x, cos, sin), q[0].transpose(0, 1))


@modules
def test_partial_rope_leaves_the_rest(ops):
    x = torch.randn(5, 2, 16)
    cos, sin = ops.rope_tables(torch.arange(5), torch.tensor([1.0, 0.1]), 1.0, torch.float32)
    out = ops.rope(x, cos, sin)
    assert torch.equal(out[..., 4:], x[..., 4:]) and not torch.equal(out[1:, :, :4], x[1:, :, :4])
    near(out[..., :4], ops.rope(x[..., :4].contiguous(), cos, sin))


@modules
@dtypes
@pytest.mark.parametrize(
    ("kind", "theirs"),
    [("silu", "silu"), ("gelu", "gelu"), ("gelu_tanh", "gelu_new"), ("quick_gelu", "quick_gelu"), ("relu", "relu")],
)
def test_activations(ops, dtype, kind, theirs):
    torch.manual_seed(0)
    x = torch.randn(5, 64).to(dtype) * 3
    near(ops.act(x, kind), ACT2FN[theirs](x))
    near(ops.act_and_mul(x, kind), ACT2FN[theirs](x[:, :32]) * x[:, 32:])


@modules
def test_write_kv_touches_only_its_slots(ops):
    torch.manual_seed(0)
    layout = layout_for([TokenShape(2, 4, window) for window in [None, None, 8]], page_size=4, dtype="float32")
    pool = allocate_kv(layout, 6, "cpu")
    kv = KVViews(pool, layout)
    k_pages, v_pages, group = kv.layers[1][:3]
    assert group == 0 and k_pages.shape == (6, 4, 2, 4) and not k_pages.is_contiguous()
    slots = torch.tensor([4, 9, 23, 6])
    fused = torch.randn(4, 6, 4)
    k, v = fused[:, 2:4], fused[:, 4:6]
    ops.write_kv(k, v, kv.layers[1], slots)
    for token, slot in enumerate(slots.tolist()):
        assert torch.equal(k_pages[slot // 4, slot % 4], k[token])
        assert torch.equal(v_pages[slot // 4, slot % 4], v[token])
    assert pool.view(torch.float32).count_nonzero() == 2 * 4 * 2 * 4


def test_views_cover_the_pool_without_overlap():
    layout = layout_for([TokenShape(2, 4, window) for window in [None, 8, None, 8, None]], page_size=4, dtype="float32")
    kv = KVViews(allocate_kv(layout, 3, "cpu"), layout)
    assert [layer.group for layer in kv.layers.values()] == [0, 1, 0, 1, 0]
    for layer in kv.layers.values():
        assert layer.k_pages.untyped_storage().data_ptr() == kv.pool.untyped_storage().data_ptr()
    for mine in ({0, 2, 4}, {1, 3}):  # the layers of one group; a page belongs to one group at a time
        kv.pool.zero_()
        for layer in mine:
            kv.layers[layer].k_pages.add_(1)
            kv.layers[layer].v_pages.add_(1)
        written = kv.pool.view(torch.float32)
        assert written.max() == 1
        assert written.sum() == sum(2 * kv.layers[layer].k_pages.numel() for layer in mine)
