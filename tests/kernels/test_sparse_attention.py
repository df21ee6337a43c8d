"""Which pages a query reads: bounds are bounds, what matters is found, and all pages are full attention."""

import pytest
import torch

from quire.kernels.attention_backend import AttentionSpec, Batch, GroupBatch, SparseBatch
from quire.kernels.eager.sdpa_attention import TorchSdpa
from quire.kernels.kv_views import KVViews, allocate_kv, put_tokens
from quire.kernels.page_bounds import PageBounds
from quire.kernels.sparse_attention import SparseRows, chosen_pages
from quire.types.kv import TokenShape, layout_for

SIZE, LENGTH, HEADS, KV_HEADS, DIM = 8, 203, 6, 2, 16
SPEC = AttentionSpec(HEADS, KV_HEADS, DIM, DIM**-0.5, itemsize=4)


def setup(dtype="float32", seed=0):
    """One layer's pages with random keys, and a batch of a row of one token and a row of five."""
    generator = torch.Generator().manual_seed(seed)
    layout = layout_for([TokenShape(KV_HEADS, DIM)], page_size=SIZE, dtype=dtype)
    kv = KVViews(allocate_kv(layout, 80, "cpu"), layout)
    pages = -(-LENGTH // SIZE)
    table = (1 + torch.randperm(2 * pages, generator=generator)).view(2, pages).int()
    for row in table.long():
        places = torch.arange(LENGTH)
        slots = row[places // SIZE] * SIZE + places % SIZE
        k, v = torch.randn(2, LENGTH, KV_HEADS, DIM, generator=generator)
        put_tokens(kv.layers[0], k, v, slots)
    positions = torch.tensor([LENGTH - 1, *range(LENGTH - 5, LENGTH)])
    batch = Batch(
        positions=positions,
        query_start=torch.tensor([0, 1, 6], dtype=torch.int32),
        kv_len=torch.tensor([LENGTH] * 2, dtype=torch.int32),
        counts=[1, 5],
        kv_lens=[LENGTH] * 2,
        groups=(GroupBatch(SIZE, table, positions),),
    )
    bounds = PageBounds(kv)
    bounds.refresh(0, table.flatten())
    return kv, batch, bounds, torch.randn(6, HEADS, DIM, generator=generator)


def attend(kv, batch, budgets, bounds, q, spec=SPEC):
    batch.sparse = SparseBatch(budgets, bounds.groups)
    backend = SparseRows(TorchSdpa(), 0)
    group = batch.groups[0]
    return backend.forward(spec, q, kv.layers[0], batch, group, backend.plan(batch, group, spec))


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "fp8", "int4"])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_all_pages_are_full_attention(dtype, softcap):
    kv, batch, bounds, q = setup(dtype)
    spec = AttentionSpec(HEADS, KV_HEADS, DIM, DIM**-0.5, itemsize=4, softcap=softcap)
    plain = TorchSdpa()
    group = batch.groups[0]
    full = plain.forward(spec, q, kv.layers[0], batch, group, plain.plan(batch, group, spec))
    torch.testing.assert_close(attend(kv, batch, [26, 26], bounds, q, spec), full, atol=1e-5, rtol=1e-5)
    assert torch.equal(attend(kv, batch, [0, 0], bounds, q, spec), full)
    mixed = attend(kv, batch, [0, 9], bounds, q, spec)
    assert torch.equal(mixed[0], full[0]) and not torch.allclose(mixed[1:], full[1:], atol=1e-3)


def test_bounds_are_bounds_and_follow_what_changes():
    kv, batch, bounds, q = setup()
    table = batch.groups[0].page_table[0].long()
    low, high = bounds.groups[0][table, 0].float().unbind(1)  # [pages, kv_heads, dim]
    keys = kv.layers[0].k_pages[table]  # [pages, tokens, kv_heads, dim]
    grouped = q[0].unflatten(0, (KV_HEADS, -1))
    most = torch.maximum(grouped * low[:, :, None], grouped * high[:, :, None]).sum(-1)  # [pages, kv_heads, share]
    scores = torch.einsum("gsd,ptgd->ptgs", grouped, keys).amax(1)
    assert (most >= scores - 0.02).all()
    kv.layers[0].k_pages[table[3]] += 1
    assert bounds.refresh(0, table) == 0
    bounds.forget(0, table[3:5])
    assert bounds.refresh(0, table) == 2
    assert torch.allclose(bounds.groups[0][table[3], 0, 1].float(), keys[3].amax(0) + 1, atol=0.01)


def test_a_page_that_matters_is_read_by_the_head_that_it_matters_to():
    kv, batch, bounds, q = setup()
    table = batch.groups[0].page_table[0].long()
    kv.layers[0].k_pages[table[7], 3, 1] = 3 * q[0, 4]  # a key that a head of the second KV head looks for
    bounds.forget(0, table[7:8])
    bounds.refresh(0, table)
    mine = bounds.groups[0][table, 0]
    chosen = chosen_pages(q[0], LENGTH - 1, SIZE, 9, mine)
    assert chosen.shape == (2, 9) and 7 in chosen[1]
    for row in chosen.tolist():
        assert row == sorted(set(row)) and row[0] == 0 and row[-5:] == [21, 22, 23, 24, 25]
    even = chosen_pages(q[0], LENGTH - 1, SIZE, 12, None)
    assert even.shape == (1, 12) and even[0].tolist() == [0, 1, 4, 8, 12, 16, 20, 21, 22, 23, 24, 25]
