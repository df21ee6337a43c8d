"""Norms, activations, gathers, a step's batch and the fused rotation against plain torch."""

import pytest
import torch

from quire.kernels import batch_assembly as plain_batch
from quire.kernels.kv_views import KVViews, LayerKV, allocate_kv, read_tokens, take_slots
from quire.kernels.reference import fp8_rows
from quire.kernels.reference import plain_ops as plain
from quire.kernels.triton import plain_twins as twins
from quire.kernels.triton.activation import quantise_fp8, silu_and_mul
from quire.kernels.triton.batch_gather import assemble
from quire.kernels.triton.embedding_gather import gather_rows
from quire.kernels.triton.fp8_scales import row_scales
from quire.kernels.triton.norm import add_rms_norm, rms_norm, rms_norm_fp8
from quire.kernels.triton.page_gather import gather_tokens
from quire.kernels.triton.rope_kernel import rope_and_write, rope_tables
from quire.types.kv import TokenShape, layout_for


@pytest.mark.parametrize("shape", [(1, 7), (5, 64), (3, 300), (17, 16)])
def test_norms(shape):
    x, residual, weight = torch.randn(shape), torch.randn(shape), torch.randn(shape[1])
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), plain.rms_norm(x, weight, 1e-5))
    stream, twin = residual.clone(), residual.clone()
    got = add_rms_norm(x, stream, weight, 1e-5)
    torch.testing.assert_close(got, plain.add_rms_norm(x, twin, weight, 1e-5))
    assert torch.equal(stream, twin)


def test_norm_of_heads_inside_a_fused_projection():
    heads = torch.randn(5, 96)[:, 16:80].unflatten(1, (4, 16))
    weight = torch.randn(16)
    torch.testing.assert_close(rms_norm(heads, weight, 1e-6), plain.rms_norm(heads, weight, 1e-6))


def test_no_rows():
    assert rms_norm(torch.empty(0, 8), torch.ones(8), 1e-5).shape == (0, 8)
    assert silu_and_mul(torch.empty(0, 8)).shape == (0, 4)
    assert gather_rows(torch.ones(2, 3), torch.empty(0, dtype=torch.int64)).shape == (0, 3)


@pytest.mark.parametrize("width", [5, 48, 2050])
def test_silu_and_mul(width):
    x = torch.randn(3, 2 * width)
    torch.testing.assert_close(silu_and_mul(x), plain.act_and_mul(x, "silu"))


def check_fp8(got, expected):
    """The interpreter loses the carry where rounding would reach the next power of two; the rest is equal."""
    (eight, scales), (twin, twin_scales) = got, expected
    torch.testing.assert_close(scales, twin_scales)
    assert (eight.float() == twin.float()).float().mean() > 0.95


def lost(rows, scales):
    eight = (rows.float() / scales[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    return (eight.float() * scales[:, None] - rows.float()).square().sum(1)


def test_scales_by_which_rows_of_eight_bits_lose_least():
    rows = torch.cat((torch.randn(6, 300), torch.zeros(1, 300), torch.full((1, 300), 1e-20))).bfloat16()
    found, twin = row_scales(rows), fp8_rows.row_scales(rows)
    torch.testing.assert_close(found, twin)
    nearest, least = lost(rows, rows.float().abs().amax(1).clamp(min=1e-12) / 448), lost(rows, twin)
    assert (least <= nearest).all() and least.sum() < 0.95 * nearest.sum()
    huge = torch.full((2, 16), 1e25)  # squares that are too large for a float
    assert (row_scales(huge) > 1e22).all() and (fp8_rows.row_scales(huge, torch.full((16,), 1e38)) > 1e22).all()
    infinite = torch.ones(1, 16).index_fill_(1, torch.tensor([3]), float("inf"))
    assert row_scales(infinite).isinf().all() and fp8_rows.row_scales(infinite).isinf().all()
    strided = torch.randn(5, 64)[:, :40]
    torch.testing.assert_close(row_scales(strided), fp8_rows.row_scales(strided))


def test_eight_bit_rows():
    x, residual, weight = torch.randn(4, 100), torch.randn(4, 100), torch.randn(100)
    check_fp8(quantise_fp8(x), twins.quantise_fp8(x))
    check_fp8(quantise_fp8(x, gated=True), twins.quantise_fp8(plain.act_and_mul(x, "silu")))
    stream, twin = residual.clone(), residual.clone()
    expected = twins.quantise_fp8(plain.add_rms_norm(x, twin, weight, 1e-5))
    check_fp8(rms_norm_fp8(x, stream, weight, 1e-5), expected)
    assert torch.equal(stream, twin)
    check_fp8(rms_norm_fp8(x, None, weight, 1e-5), twins.quantise_fp8(plain.rms_norm(x, weight, 1e-5)))


def test_gather():
    table = torch.randn(9, 70)[:, :65]
    index = torch.tensor([3, 0, 8, 3])
    assert torch.equal(gather_rows(table, index), table[index])


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "rotary"), [(4, 2, 16, 16), (9, 3, 12, 8), (1, 1, 8, 8)])
def test_rotation_and_page_writes(heads, kv_heads, dim, rotary, normed):
    tokens, page = 6, 4
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim)
    frequencies = 100.0 ** -(torch.arange(rotary // 2) / rotary)
    cos, sin = plain.rope_tables(torch.tensor([0, 1, 2, 90, 7, 1000]), frequencies, 1.0, torch.float32)
    slots = torch.tensor([3, 4, 5, 17, 22, 8])
    norms = {"q_norm": torch.randn(dim), "k_norm": torch.randn(dim), "eps": 1e-5} if normed else {}
    pool = torch.randn(6, 2, 2, page, kv_heads, dim)
    results = []
    for function in (rope_and_write, twins.rope_and_write):
        mine, fused = pool.clone(), qkv.clone()
        q = function(fused, heads, cos, sin, LayerKV(mine[:, 1, 0], mine[:, 1, 1]), slots, **norms)
        assert q.data_ptr() == fused.data_ptr()  # in place
        out = torch.empty(tokens, heads, dim)
        again = function(qkv.clone(), heads, cos, sin, LayerKV(mine[:, 1, 0], mine[:, 1, 1]), slots, q_out=out, **norms)
        assert again is out and torch.equal(out, q)
        results.append((q, mine))
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected)


def test_eight_bit_page_writes():
    qkv = torch.randn(3, 8 * 16)
    cos, sin = plain.rope_tables(torch.arange(3), torch.ones(8), 1.0, torch.float32)
    pages = [torch.zeros(2, 4, 2, 16).to(torch.float8_e4m3fn) for _ in range(4)]
    slots = torch.tensor([1, 2, 7])
    rope_and_write(qkv.clone(), 4, cos, sin, LayerKV(*pages[:2]), slots)
    twins.rope_and_write(qkv.clone(), 4, cos, sin, LayerKV(*pages[2:]), slots)
    for got, expected in ((pages[0], pages[2]), (pages[1], pages[3])):
        assert (got.float() == expected.float()).float().mean() > 0.95


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize(("kv_heads", "dim", "rotary"), [(2, 16, 16), (3, 12, 8)])
def test_scaled_page_writes(kind, kv_heads, dim, rotary):
    layout = layout_for([TokenShape(kv_heads, dim, window) for window in [None, None]], page_size=4, dtype=kind)
    qkv = torch.randn(3, (4 + 2 * kv_heads) * dim)
    qkv[1, 4 * dim : 6 * dim] = 0  # heads of nothing
    cos, sin = plain.rope_tables(torch.arange(3), torch.ones(rotary // 2), 1.0, torch.float32)
    slots, found = torch.tensor([1, 2, 7]), []
    for function in (rope_and_write, twins.rope_and_write):
        kv = KVViews(allocate_kv(layout, 2, "cpu"), layout)
        function(qkv.clone(), 4, cos, sin, kv.layers[1], slots)
        found.append(read_tokens(kv, 0, torch.arange(8)))
        assert kv.pool.count_nonzero() > 0
    for got, expected in zip(*found, strict=True):
        assert got.isfinite().all()
        assert (got == expected).float().mean() > 0.95
        if kind == "int8":  # a tie may fall the other way; of floats, the interpreter loses carries
            step = expected.abs().amax(-1, keepdim=True) / 127
            assert ((got - expected).abs() <= step * 1.01).all()


def test_angles():
    positions = torch.tensor([0, 1, 77, 131071])
    frequencies = 500000.0 ** -(torch.arange(6) / 6)
    for got, expected in zip(
        rope_tables(positions, frequencies, 1.3, torch.float32),
        plain.rope_tables(positions, frequencies, 1.3, torch.float32),
        strict=True,
    ):
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("page_size", [4, 5])
def test_a_batch_out_of_slots(page_size):
    torch.manual_seed(3)
    tokens = torch.randint(0, 1000, (7, 300), dtype=torch.int32)
    pages = torch.randint(0, 99, (7, 80), dtype=torch.int32)
    rows = torch.tensor([[2, 5, 0, 6, 6], [0, 17, 250, 0, 0], [260, 1, 4, 0, 3], [0, 12, 35, 0, 0], [1, 1, 1, 1, 1]])
    width = -(-260 // page_size)
    got = assemble(rows, tokens, pages, page_size, 268, width)
    expected = plain_batch.assemble(rows, tokens, pages, page_size, 268, width)
    for name in ("input_ids", "positions", "kv_slots", "query_start", "kv_len"):
        assert torch.equal(getattr(got, name), getattr(expected, name)), name
    for row, length in enumerate(expected.kv_len.tolist()):
        need = -(-length // page_size)
        assert torch.equal(got.page_table[row, :need], expected.page_table[row, :need])


@pytest.mark.parametrize("count", [1, 8, 21])
def test_tokens_out_of_their_pages(count):
    layout = layout_for([TokenShape(3, 20)] * 2, page_size=4, dtype="float32")
    kv = KVViews(allocate_kv(layout, 9, "cpu"), layout)
    kv.pool.copy_(torch.randint(0, 100, kv.pool.shape, dtype=torch.uint8))
    slots = torch.randint(0, 36, (count,))
    slots[count // 2 :: 3] = -1
    for layer in kv.layers.values():
        got, expected = (f(layer.sides, slots, 4, torch.float32) for f in (gather_tokens, take_slots))
        assert len(got) == 2 and all(map(torch.equal, got, expected))
    q = torch.randn(30, 2, 3, 20)[:, 1]  # of a wider tensor
    sides, slots = [(q[:, None], None)], slots.clamp(max=29)
    assert torch.equal(*(f(sides, slots, 1, q.dtype)[0] for f in (gather_tokens, take_slots)))
