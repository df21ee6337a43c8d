"""KIVI's pages in the compiled decoder: what its plain twin makes of them, and the same bits however a step is cut."""

import pytest
import torch
from native_harness import batch_of, kv_for, own_pages, random_decoder

from quire.kernels.cpu import NativeProgram
from quire.kernels.cpu.plain_twin import TwinProgram
from quire.kernels.kivi_attention import read_rounded
from quire.types.kv import RESIDUAL, RESIDUAL_GROUP, residual_start

SHAPES = {
    "gqa": {"heads": 6, "kv_heads": 2, "head_dim": 64},
    "wide": {"heads": 4, "kv_heads": 2, "head_dim": 128},
    "windows beside": {"windows": (None, 9, None), "head_dim": 64},
}
LENGTHS = [1, 31, 32, 161, 330]


def ids(count, seed=0):
    return torch.randint(0, 50, (count,), generator=torch.Generator().manual_seed(seed))


def distance(got, want):
    assert torch.isfinite(got).all()
    return ((got - want).square().mean() / want.square().mean()).sqrt()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["kivi4", "kivi2"])
def test_program_equals_its_twin(isa, shape, dtype):
    weights = random_decoder(**SHAPES[shape])
    program, twin = NativeProgram(weights, threads=2, isa=isa), TwinProgram(weights)
    fast, plain = (kv_for(weights, 200, dtype, 16) for _ in range(2))
    plain.pool.zero_()
    tables = own_pages([n + 40 for n in LENGTHS], fast)
    batch = batch_of([(0, n) for n in LENGTHS], tables, fast)
    tokens = ids(batch.tokens)
    assert distance(program.forward(tokens, batch, fast), twin.forward(tokens, batch, plain)) < 3e-2
    plain.pool.copy_(fast.pool)  # a number that fell to the other side of a step there is not asked about here
    batch = batch_of([(n, 1 + n % 37) for n in LENGTHS], tables, fast)
    tokens = ids(batch.tokens, 1)
    got, want = (
        program.forward(tokens, batch, fast),
        twin.forward(tokens, batch, plain.__class__(plain.pool, fast.layout)),
    )
    assert distance(got, want) < 3e-2


@pytest.mark.parametrize(("dtype", "levels"), [("kivi4", 15), ("kivi2", 3)])
def test_groups_are_rounded_by_channel_and_token(isa, dtype, levels):
    """Keys are within half a step of their channel's range over a group of tokens, values of their token's range over
    32 channels; and there are no more numbers than bits allow."""
    weights = random_decoder(heads=4, kv_heads=2, head_dim=64, windows=(None,))
    kv, length = kv_for(weights, 80, dtype, 16), 200
    tables = own_pages([length], kv)
    batch = batch_of([(0, length)], tables, kv)
    NativeProgram(weights, threads=1, isa=isa).forward(ids(length), batch, kv)
    layer, whole = kv.layers[0], length // RESIDUAL_GROUP * RESIDUAL_GROUP
    k, v = (side[:whole] for side in read_rounded(layer, torch.tensor(tables[0][0])))
    pages = torch.tensor(tables[1][0])
    exact_k, exact_v = (
        side[pages].flatten(0, 1)[:whole].float() for side in (layer.residual.k_pages, layer.residual.v_pages)
    )
    for got, exact, axis, unit in ((k, exact_k, 1, (-1, RESIDUAL_GROUP)), (v, exact_v, 3, (-1, 32))):
        got, exact = (x.unflatten(0 if axis == 1 else 2, unit) for x in (got, exact))
        reach = exact.amax(axis, keepdim=True) - exact.amin(axis, keepdim=True)
        assert ((got - exact).abs() <= reach / levels * 0.51 + 2e-3).all()
        assert max(len(run.unique()) for run in got.movedim(axis, -1).flatten(0, -2)) <= levels + 1


@pytest.mark.parametrize("shape", ["gqa", "windows beside"])
@pytest.mark.parametrize(("dtype", "threads"), [("kivi4", 1), ("kivi2", 3)])
def test_chunks_neighbours_and_threads_change_no_bit(isa, shape, dtype, threads):
    weights, length = random_decoder(**SHAPES[shape]), 330
    kv = kv_for(weights, 120, dtype, 16)
    alone = NativeProgram(weights, threads=1, isa=isa)
    whole = alone.forward(ids(length), batch_of([(0, length)], own_pages([length], kv), kv), kv)
    program = NativeProgram(weights, threads=threads, isa=isa)
    kv = kv_for(weights, 120, dtype, 16)
    tables = own_pages([length, 120], kv)
    parts, start = [], 0
    for step, count in enumerate((1, 7, 120, 1, 33, 1, 1, 150, 16)):  # beside another that prefills and decodes
        rows = [(start, count), (20 * min(step, 3), 20) if step < 3 else (57 + step, 1)]
        tokens = torch.cat((ids(length)[start : start + count], ids(rows[1][1], step)))
        parts.append(program.forward(tokens, batch_of(rows, tables, kv), kv)[:count])
        start += count
    assert torch.equal(torch.cat(parts), whole)


def test_a_shared_prefix_changes_no_bit(isa):
    """Rows behind the same pages, at different places, some of which read rounded what others do not."""
    weights = random_decoder(heads=6, kv_heads=2, head_dim=64)
    program, kv = NativeProgram(weights, threads=2, isa=isa), kv_for(weights, 200, "kivi4", 16)
    rounded, latest = own_pages([256], kv)
    program.forward(ids(256), batch_of([(0, 256)], [rounded, latest], kv), kv)
    tails, first = [70, 40, 33, 1], 100
    tables = [[], []]
    for tail in tails:
        for group, shared in enumerate((rounded, latest)):
            need = -(-tail // kv.layout.groups[group].tokens_per_page)
            tables[group].append([*shared[0], *range(first, first + need)])
            first += need
    program.forward(ids(sum(tails), 2), batch_of([(256, tail) for tail in tails], tables, kv), kv)
    behind = [(256 + tail - 1, 1) for tail in tails]
    together = program.forward(ids(4, 3), batch_of(behind, tables, kv), kv)
    for r, row in enumerate(behind):
        one = batch_of([row], [[tables[0][r]], [tables[1][r]]], kv)
        assert torch.equal(program.forward(ids(4, 3)[r : r + 1], one, kv)[0], together[r])


@pytest.mark.parametrize(("dtype", "bytes_a_head"), [("kivi4", 32 + 8), ("kivi2", 16 + 8)])
def test_pages_are_as_large_as_their_formula(dtype, bytes_a_head):
    """A head of 64: its bits, a scale and a minimum of fp16 for each 32 numbers; K and V of two heads, two layers."""
    weights = random_decoder(heads=4, kv_heads=2, head_dim=64)
    layout = kv_for(weights, 2, dtype, 16).layout
    rounded, latest = layout.groups
    assert rounded.tokens_per_page % RESIDUAL_GROUP == 0 and latest.window == RESIDUAL + RESIDUAL_GROUP
    assert layout.page_bytes == rounded.tokens_per_page * 2 * 2 * 2 * bytes_a_head
    assert latest.tokens_per_page == 16 and layout.page_bytes >= 16 * 2 * 2 * 2 * 128
    assert [residual_start(p) for p in (0, 159, 160, 191, 192)] == [0, 0, 32, 32, 64]
