"""Pages as tensors: sizes and rounding of each kind, what is written to slots is read back, in any layout of groups."""

import pytest
import torch

from quire.kernels.attention_backend import AttentionSpec
from quire.kernels.batch_assembly import whole_sequence
from quire.kernels.eager import torch_ops as eager_ops
from quire.kernels.eager.sdpa_attention import TorchSdpa
from quire.kernels.kv_views import KVViews, allocate_kv, decode, encode, read_tokens, write_tokens
from quire.kernels.reference import plain_ops as reference_ops
from quire.kernels.reference.plain_attention import ReferenceAttention
from quire.types.kv import KINDS, TokenShape, layout_for

CPU = torch.device("cpu")
PLAIN = [name for name, kind in KINDS.items() if not kind.residual]  # whose tokens are written one by one
SCALED = [name for name in PLAIN if KINDS[name].scaled]


@pytest.mark.parametrize("dtype", PLAIN)
def test_tokens_are_read_back_as_they_were_written(dtype):
    torch.manual_seed(0)
    layout = layout_for([TokenShape(2, 64, window) for window in [None, 8, None]], page_size=4, dtype=dtype)
    kv = KVViews(allocate_kv(layout, 6, "cpu"), layout)
    slots = torch.tensor([21, 4, 7])
    k, v = torch.randn(2, 3, 2, 2, 64)
    write_tokens(kv, 0, slots, k, v)
    got = read_tokens(kv, 0, slots)
    within = {32: 1e-7, 16: 0.02, 8: 0.15, 4: 0.3}[KINDS[dtype].bits]
    for found, said in zip(got, (k, v), strict=True):
        torch.testing.assert_close(found, said, atol=within, rtol=0)
    write_tokens(kv, 0, slots, *got)  # what went through a page once does not change much again
    for found, said in zip(read_tokens(kv, 0, slots), got, strict=True):
        torch.testing.assert_close(found, said, atol=within / 100, rtol=0)
    others = torch.tensor([s for s in range(24) if s not in slots.tolist()])
    assert not any(side.any() for side in read_tokens(kv, 0, others))


def test_pages_have_room_for_numbers_and_scales_and_nothing_else():
    def token_bytes(dtype, head_dim=64):
        return layout_for(
            [TokenShape(3, head_dim, window) for window in [None] * 30], page_size=16, dtype=dtype
        ).token_bytes

    heads = 30 * 2 * 3
    assert token_bytes("float16") == heads * 128
    assert token_bytes("int8") == token_bytes("fp8") == heads * 66
    assert token_bytes("int4") == heads * (32 + 2 * 4)
    assert token_bytes("float16") / token_bytes("int8") > 1.9
    assert token_bytes("float16", 128) / token_bytes("int8", 128) > 1.96


@pytest.mark.parametrize("dtype", PLAIN)
@pytest.mark.parametrize("windows", [[None, None], [None, 8, None, 8, None]])
def test_no_two_views_share_a_byte(dtype, windows):
    layout = layout_for([TokenShape(2, 12, window) for window in windows], page_size=4, dtype=dtype)
    for index, group in enumerate(layout.groups):
        kv = KVViews(allocate_kv(layout, 3, "cpu"), layout)
        size = 0
        for layer in group.layers:
            assert kv.layers[layer].group == index
            for side in kv.layers[layer].sides:
                for view in side:
                    if view is not None:
                        view.view(torch.uint8).add_(1)
                        size += view.numel() * view.element_size()
        assert kv.pool.max() == 1 and kv.pool.sum() == size
        if index == 0:
            assert size == kv.pool.numel()


@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn, torch.uint8])
def test_numbers_are_within_half_a_step(stored):
    torch.manual_seed(0)
    x = torch.randn(50, 64) * torch.logspace(-3, 3, 50)[:, None]
    got = decode(*encode(x, stored, scaled=True))
    if stored == torch.int8:
        step = x.abs().amax(-1, keepdim=True) / 127
    elif stored == torch.uint8:
        blocks = x.unflatten(-1, (2, 32))
        step = ((blocks.amax(-1) - blocks.amin(-1)) / 15).repeat_interleave(32, dim=-1)
    else:
        step = (x.abs() / 8).clamp(min=x.abs().amax(-1, keepdim=True) / 448 * 2**-9)  # of a float's own size
    assert ((got - x).abs() <= step * 0.51).all()


@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn, torch.uint8])
@pytest.mark.parametrize("value", [0.0, 1e-9, 7.0, -3e6])
def test_heads_of_one_number(stored, value):
    got = decode(*encode(torch.full((1, 32), value), stored, scaled=True))
    assert got.isfinite().all()
    if 1e-6 < abs(value) < 65504 or value == 0:
        torch.testing.assert_close(got, torch.full((1, 32), value), rtol=1e-3, atol=0)


@pytest.mark.parametrize("dtype", SCALED)
@pytest.mark.parametrize("window", [None, 6])
def test_attention_over_scaled_pages(dtype, window):
    """The fast operations write the same pages as the reference, and read them the same."""
    torch.manual_seed(0)
    spec = AttentionSpec(4, 2, 32, 32**-0.5, window)
    layout = layout_for([TokenShape(2, 32, window) for window in [window] * 2], page_size=4, dtype=dtype)
    q, k, v = torch.randn(21, 4, 32), torch.randn(21, 2, 32), torch.randn(21, 2, 32)
    found = []
    for ops, backend in ((eager_ops, TorchSdpa()), (reference_ops, ReferenceAttention())):
        batch, kv = whole_sequence(layout, 21, CPU)
        group = batch.groups[0]
        ops.write_kv(k, v, kv.layers[1], group.kv_slots)
        out = backend.forward(spec, q, kv.layers[1], batch, group, backend.plan(batch, group, spec))
        found.append((kv.pool, out))
    assert torch.equal(found[0][0], found[1][0])
    torch.testing.assert_close(found[0][1], found[1][1])
