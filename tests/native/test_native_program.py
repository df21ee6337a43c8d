"""A whole decoder equals its plain twin, and a request's numbers are its own whatever it is batched with."""

import pytest
import torch
from native_harness import batch_of, kv_for, own_pages, random_decoder

from quire.generation.drafting.speculation import tree_rows
from quire.kernels.attention_backend import Paths
from quire.kernels.cpu import NativeProgram
from quire.kernels.cpu.plain_twin import TwinProgram
from quire.kernels.hidden_state_tap import HiddenStateTap
from quire.kernels.kv_views import KVViews
from quire.types.errors import QuireError
from quire.types.seams import DraftTree

SHAPES = {
    "gqa": {"heads": 6, "kv_heads": 2, "head_dim": 32},
    "mqa": {"heads": 4, "kv_heads": 1, "head_dim": 64},
    "mha": {"heads": 2, "kv_heads": 2, "head_dim": 96},
    "wide": {"heads": 4, "kv_heads": 2, "head_dim": 128},
    "window": {"windows": (20, 20)},
    "two groups": {"windows": (None, 9, None)},
    "qwen2": {"bias": True},
    "qwen3": {"qk_norm": True},
    "partial rotary": {"head_dim": 64, "rotary": 32},
    "8 bits": {"kind": "Q8_0"},
    "Q6_K": {"kind": "Q6_K", "hidden": 256, "intermediate": 256, "heads": 8},
    "odd vocabulary": {"vocab": 53, "intermediate": 160},
}


def ids(count, seed=0):
    return torch.randint(0, 50, (count,), generator=torch.Generator().manual_seed(seed))


def close(got, want, within=1e-2):
    """Ties of the int8 rounding may fall the other way: a step of one input, here and there."""
    assert torch.isfinite(got).all()
    assert ((got - want).square().mean() / want.square().mean()).sqrt() < within
    assert (got - want).abs().max() < 0.1 * want.abs().max()


PAGES = [("float16", 16), ("float32", 5), ("int8", 16), ("fp8", 5), ("int4", 16)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "page_size"), PAGES)
def test_program_equals_its_twin(isa, shape, dtype, page_size):
    weights = random_decoder(**SHAPES[shape])
    program, twin = NativeProgram(weights, threads=2, isa=isa), TwinProgram(weights)
    lengths = [1, 33, 48]
    fast, plain = kv_for(weights, 80, dtype, page_size), kv_for(weights, 80, dtype, page_size)
    plain.pool.zero_()  # the reference multiplies masked values by zero
    tables = own_pages([n + 3 for n in lengths], fast)
    batch = batch_of([(0, n) for n in lengths], tables, fast)
    tokens = ids(sum(lengths))
    got, want = program.forward(tokens, batch, fast), twin.forward(tokens, batch, plain)
    within = 3e-2 if dtype in ("fp8", "int4") else 1e-2  # the larger a step, the more a tie matters
    close(got, want, within)
    close(program.logits(got), twin.logits(got))
    batch = batch_of([(n, 1 + n % 3) for n in lengths], tables, fast)  # then one to three more each
    tokens = ids(batch.tokens, 1)
    close(program.forward(tokens, batch, fast), twin.forward(tokens, batch, plain), within)


@pytest.mark.parametrize("windows", [(None, None), (9, None)])
@pytest.mark.parametrize(
    ("page_size", "prefix", "dtype"), [(16, 40, "float16"), (4, 30, "float32"), (5, 33, "int8"), (4, 31, "int4")]
)
def test_a_draft_tree_is_its_branches_to_the_bit(windows, page_size, prefix, dtype):
    """And once K and V of a branch are moved to its positions, whoever goes on from there sees no difference."""
    weights, tree = random_decoder(windows=windows), DraftTree([3, 4, 5, 6, 7, 8, 9], [-1, -1, 0, 1, 3, 1, 4])
    program = NativeProgram(weights, threads=2)
    kv, own = kv_for(weights, 80, dtype, page_size), kv_for(weights, 80, dtype, page_size)
    known, length = ids(prefix), prefix + 20
    tables, alone = own_pages([length], kv), own_pages([length], own)
    program.forward(known, batch_of([(0, prefix)], tables, kv), kv)

    rows = tree_rows(tree, prefix)
    batch = batch_of([(prefix + i, 1) for i in range(7)], [[t[0]] * 7 for t in tables], kv)
    batch.positions = torch.tensor([prefix + row.depth for row in rows])
    batch.kv_len = (batch.positions + 1).int()
    batch.paths = Paths(torch.tensor([prefix] * 7, dtype=torch.int32), torch.tensor([row.path for row in rows]))
    grown = program.forward(torch.tensor(tree.tokens), batch, kv)
    for node in (2, 5, 6):
        branch = [node]
        while tree.parents[branch[0]] >= 0:
            branch.insert(0, tree.parents[branch[0]])
        straight = torch.cat((known, torch.tensor([tree.tokens[i] for i in branch])))
        expected = program.forward(straight, batch_of([(0, len(straight))], alone, own), own)
        assert torch.equal(grown[branch], expected[prefix:])

    for group, [pages] in enumerate(tables):  # the last branch counts
        size, places = kv.layout.groups[group].tokens_per_page, prefix + torch.arange(len(tree.tokens))
        slots = torch.tensor(pages)[places // size] * size + places % size
        kv.move(group, slots[branch], slots[: len(branch)])
    one = torch.tensor([11])
    after, expected = (
        program.forward(one, batch_of([(len(straight), 1)], pages, views), views)
        for pages, views in ((tables, kv), (alone, own))
    )
    assert torch.equal(after, expected)


def test_a_path_out_of_its_pages_is_refused():
    weights = random_decoder()
    program, kv = NativeProgram(weights, threads=1), kv_for(weights, 8, "float16", 4)
    batch = batch_of([(4, 1)], [[[1, 2]]], kv)
    for base, path in ((4, 9), (-1, 0), (0, 0)):
        batch.paths = Paths(torch.tensor([base], dtype=torch.int32), torch.tensor([path]))
        if (base, path) == (0, 0):
            batch.positions = torch.tensor([17])
        with pytest.raises(QuireError, match="refused a step"):
            program.forward(ids(1), batch, kv)


class Observer:
    """Keeps pages as they are when it is told of a layer."""

    def __init__(self, kv, layers):
        self.kv, self.layers, self.seen = kv, frozenset(layers), {}

    def layer_written(self, layer):
        self.seen[layer] = self.kv.pool.clone()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_an_observer_is_told_of_layers_whose_pages_stay_as_they_are(threads, dtype):
    weights = random_decoder(windows=(None,) * 6)
    program, kv = NativeProgram(weights, threads=threads), kv_for(weights, 80, dtype, 16)
    kv.pool.zero_()
    batch = batch_of([(0, 33), (0, 48)], own_pages([36, 51], kv), kv)
    batch.observer = Observer(kv, {1, 3, 5})
    hidden = program.forward(ids(81), batch, kv)
    final, seen = kv.pool.clone(), batch.observer.seen
    assert list(seen) == [1, 3, 5]
    for layer, pool in seen.items():
        for other in range(6):
            views, last = (KVViews(one, kv.layout).layers[other] for one in (pool, final))
            written = [torch.equal(a, b) for a, b in zip(views.sides[0] + views.sides[1], last.sides[0] + last.sides[1],
                                                         strict=True) if a is not None]  # fmt: skip
            assert all(written) if other <= layer else not any(written)
    batch.observer = None
    assert torch.equal(program.forward(ids(81), batch, kv), hidden) and list(seen) == [1, 3, 5]


def test_an_observer_that_fails_fails_the_step():
    class Failing(Observer):
        def layer_written(self, layer):
            raise RuntimeError("no memory for a copy")

    weights = random_decoder()
    program, kv = NativeProgram(weights, threads=1), kv_for(weights, 8, "float16", 4)
    batch = batch_of([(0, 4)], own_pages([4], kv), kv)
    batch.observer = Failing(kv, {0})
    with pytest.raises(RuntimeError, match="no memory"):
        program.forward(ids(4), batch, kv)


@pytest.mark.parametrize("threads", [1, 2])
def test_taps_show_layers_and_change_nothing(threads):
    weights = random_decoder(windows=(None,) * 4)
    program, twin = NativeProgram(weights, threads=threads), TwinProgram(weights)
    lengths = [1, 33, 20, 1, 1]
    fast, plain = kv_for(weights, 80, "float32", 5), kv_for(weights, 80, "float32", 5)
    plain.pool.zero_()
    batch = batch_of([(0, n) for n in lengths], own_pages(lengths, fast), fast)
    tokens = ids(sum(lengths))
    ours, theirs = HiddenStateTap((0, 2, 3)), HiddenStateTap((0, 2, 3))
    expected = program.forward(tokens, batch, fast)
    assert torch.equal(program.forward(tokens, batch, fast, ours), expected)
    twin.forward(tokens, batch, plain, theirs)
    for got, want in zip(ours.states, theirs.states, strict=True):
        assert got.shape == (5, weights.hidden)
        close(got, want)
    assert torch.equal(ours.beside(expected[batch.ends])[:, -weights.hidden :], expected[batch.ends])
    assert torch.equal(program.forward(tokens, batch, fast, HiddenStateTap(())), expected)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 64, 65])
def test_lengths_around_page_and_block_boundaries(isa, length):
    weights = random_decoder()
    program, twin = NativeProgram(weights, threads=1, isa=isa), TwinProgram(weights)
    fast, plain = kv_for(weights, 8, "float16", 16), kv_for(weights, 8, "float16", 16)
    plain.pool.zero_()
    batch = batch_of([(0, length)], own_pages([length], fast), fast)
    close(program.forward(ids(length), batch, fast), twin.forward(ids(length), batch, plain))


@pytest.mark.parametrize("shape", ["gqa", "window", "two groups"])
@pytest.mark.parametrize(
    ("dtype", "threads"), [("float16", 1), ("float16", 2), ("float16", 3), ("int8", 3), ("fp8", 2), ("int4", 3)]
)
def test_chunks_neighbours_and_threads_change_no_bit(isa, shape, dtype, threads):
    weights = random_decoder(**SHAPES[shape])
    alone = NativeProgram(weights, threads=1, isa=isa)
    kv = kv_for(weights, 60, dtype, 16)
    whole = alone.forward(ids(90), batch_of([(0, 90)], own_pages([90], kv), kv), kv)

    program = NativeProgram(weights, threads=threads, isa=isa)
    kv = kv_for(weights, 60, dtype, 16)
    tables = own_pages([90, 70, 70], kv)
    parts, start = [], 0
    for step, count in enumerate((1, 7, 30, 1, 1, 50)):  # beside others that prefill and decode
        rows = [(start, count), (20 * min(step, 3), 20) if step < 3 else (57 + step, 1), (step, 1)]
        tokens = torch.cat((ids(90)[start : start + count], ids(rows[1][1] + 1, step)))
        hidden = program.forward(tokens, batch_of(rows, tables, kv), kv)
        parts.append(hidden[:count])
        start += count
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(program.logits(whole[:1]), program.logits(whole)[:1])


@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_a_shared_prefix_changes_no_bit(isa, dtype):
    weights = random_decoder(heads=6, kv_heads=2)
    program = NativeProgram(weights, threads=2, isa=isa)
    kv = kv_for(weights, 60, dtype, 16)
    prefix, rows = 70, 20
    shared = own_pages([prefix], kv)
    program.forward(ids(prefix), batch_of([(0, prefix)], shared, kv), kv)
    pages = shared[0][0][: prefix // 16]  # whole pages only; the last, partly filled one is copied
    tables, last = [[]], shared[0][0][prefix // 16]
    for r in range(rows):
        kv.pool[20 + r] = kv.pool[last]
        tables[0].append([*pages, 20 + r])
    tokens = ids(rows, 5)
    together = program.forward(tokens, batch_of([(prefix, 1)] * rows, tables, kv), kv)
    for r in range(rows):
        alone = program.forward(tokens[r : r + 1], batch_of([(prefix, 1)], [[tables[0][r]]], kv), kv)
        assert torch.equal(alone[0], together[r]), r


def test_an_empty_batch(isa):
    weights = random_decoder()
    program = NativeProgram(weights, threads=2, isa=isa)
    kv = kv_for(weights, 4, "float16", 16)
    empty = program.forward(ids(0), batch_of([], [[]], kv), kv)
    assert empty.shape == (0, weights.hidden)
    assert program.logits(empty).shape == (0, 50)


def test_what_would_read_or_write_elsewhere_is_refused(isa):
    weights = random_decoder()
    program = NativeProgram(weights, threads=1, isa=isa)
    kv = kv_for(weights, 4, "float16", 16)
    good = own_pages([20], kv)
    with pytest.raises(QuireError, match="vocabulary"):
        program.forward(torch.tensor([50]), batch_of([(0, 1)], good, kv), kv)
    with pytest.raises(QuireError, match="slot"):
        program.forward(ids(1), batch_of([(0, 1)], [[[4]]], kv), kv)
    batch = batch_of([(19, 1)], good, kv)
    batch.groups[0].page_table[0, 0] = 9
    with pytest.raises(QuireError, match="page"):
        program.forward(ids(1), batch, kv)
    batch = batch_of([(19, 1)], good, kv)
    batch.positions[0] = 90
    with pytest.raises(QuireError, match="contradict"):
        program.forward(ids(1), batch, kv)
