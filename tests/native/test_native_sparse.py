"""Sparse attention of the compiled decoder: the twin's numbers, and with all pages the bits of full attention."""

import pytest
import torch
from native_harness import batch_of, kv_for, own_pages, random_decoder

from quire.kernels.attention_backend import SparseBatch
from quire.kernels.cpu import NativeProgram
from quire.kernels.cpu.plain_twin import TwinProgram
from quire.kernels.page_bounds import PageBounds
from quire.types.errors import QuireError

ROWS = [(400, 1), (300, 5), (200, 1), (0, 40)]
BUDGETS = [9, 8, 0, 0]


def ids(count, seed=0):
    return torch.randint(0, 50, (count,), generator=torch.Generator().manual_seed(seed))


def run(program, weights, page_size, dtype, budgets, quest=True, threads=1):
    """Hidden states of a step over filled contexts."""
    kv = kv_for(weights, 4 + sum(-(-(a + n) // page_size) for a, n in ROWS), dtype, page_size)
    kv.pool.zero_()
    tables = own_pages([start + count for start, count in ROWS], kv)
    context = batch_of([(0, start) for start, _ in ROWS], tables, kv)
    program.forward(ids(context.tokens), context, kv)
    batch = batch_of(ROWS, tables, kv)
    if budgets is not None:
        bounds = PageBounds(kv)
        for group, part in enumerate(batch.groups):
            bounds.refresh(group, part.page_table.flatten())
        batch.sparse = SparseBatch(budgets, bounds.groups if quest else [None] * len(batch.groups))
    return program.forward(ids(batch.tokens, 1), batch, kv)


def decoder(**shape):
    weights = random_decoder(heads=6, kv_heads=2, windows=(None, None, None), **shape)
    for layer in weights.layer[1:]:
        layer.attention.sparse = True
    return weights


@pytest.mark.parametrize(("dtype", "page_size"), [("float16", 16), ("float32", 8), ("int8", 48)])
@pytest.mark.parametrize("quest", [True, False], ids=["quest", "blocks"])
def test_the_twin_chooses_and_attends_alike(isa, dtype, page_size, quest):
    weights = decoder()
    budgets = [5, 5, 0, 0] if page_size == 48 else BUDGETS
    native = run(NativeProgram(weights, threads=2, isa=isa), weights, page_size, dtype, budgets, quest)
    twin = run(TwinProgram(weights), weights, page_size, dtype, budgets, quest)
    full = run(NativeProgram(weights, threads=2, isa=isa), weights, page_size, dtype, None)
    torch.testing.assert_close(native, twin, atol=0.05, rtol=0.02)  # int8 ties fall either way
    assert not torch.equal(native[0], full[0])
    assert torch.equal(native[6:], full[6:]), "rows that read everything are as they were"
    again = run(NativeProgram(weights, threads=1, isa=isa), weights, page_size, dtype, budgets, quest)
    assert torch.equal(native, again)


def test_with_all_pages_it_is_full_attention(isa):
    weights = decoder()
    program = NativeProgram(weights, threads=2, isa=isa)
    full = run(program, weights, 16, "float16", None)
    assert torch.equal(run(program, weights, 16, "float16", [26, 20, 13, 0]), full)
    some = run(program, weights, 16, "float16", [25, 20, 13, 0])
    assert not torch.equal(some[0], full[0]) and torch.equal(some[1:], full[1:])
    torch.testing.assert_close(some[0], full[0], atol=0.2, rtol=0.1)  # one page of 26 is left out


def test_too_few_pages_are_refused(isa):
    weights = decoder()
    with pytest.raises(QuireError, match="shapes"):
        run(NativeProgram(weights, threads=1, isa=isa), weights, 16, "float16", [3, 0, 0, 0])
