"""Paged attention against the plain one: ragged batches, page boundaries, windows, splits, shared prefixes."""

import math
import random
from dataclasses import replace

import pytest
import torch

from quire.kernels.attention_backend import AttentionSpec, Batch, GroupBatch
from quire.kernels.kv_views import LayerKV, encode, take_pages
from quire.kernels.reference.plain_attention import ReferenceAttention
from quire.kernels.triton import cascade, configs
from quire.kernels.triton import paged_attention as attention
from quire.kernels.triton.dequantise_pages import Wide, widen_pages
from quire.kernels.triton.paged_attention import (
    Bounds,
    Plan,
    PrefixLists,
    TritonAttention,
    _with_items,
    plan_launches,
    prefix_launch,
)
from quire.kernels.triton.work_lists import list_pieces_kernel
from quire.runtime.capture import CapturedSteps
from quire.runtime.capture import bounds as captured_bounds


class Case:
    """Rows of (query tokens, KV length) over a pool whose unowned places hold NaN."""

    def __init__(self, rows, *, heads=4, kv_heads=2, dim=16, page=4, window=None, dtype=torch.float32, shared=()):
        counts, lens = [c for c, _ in rows], [n for _, n in rows]
        self.spec = AttentionSpec(heads, kv_heads, dim, dim**-0.5, window, dtype.itemsize)
        needs = [-(-n // page) for n in lens]
        pages = torch.randperm(sum(needs)) + 1
        pool = torch.full((sum(needs) + 1, 2, 2, page, kv_heads, dim), float("nan"))  # [pages, layers, K and V, ...]
        self.k, self.v = pool[:, 1, 0].to(dtype), pool[:, 1, 1].to(dtype)
        if dtype == torch.float32:
            self.k, self.v = pool[:, 1, 0], pool[:, 1, 1]  # strided, as the engine's are
        table = torch.zeros(len(rows), max(needs), dtype=torch.int32)
        used = 0
        for row, need in enumerate(needs):
            table[row, :need] = pages[used : used + need]
            used += need
        for leader, rows_sharing, n in shared:
            for row in rows_sharing:
                table[row, :n] = table[leader, :n]
        for row, n in enumerate(lens):
            at = torch.arange(n)
            where = (table[row, at // page].long(), at % page)
            for part in (self.k, self.v):
                part[where] = torch.randn(n, kv_heads, dim).to(dtype)
        positions = torch.cat([torch.arange(n - c, n) for c, n in rows])
        start = torch.tensor([0, *counts]).cumsum(0).int()
        self.group = GroupBatch(page, table, positions)
        kv_len = torch.tensor(lens, dtype=torch.int32)
        self.batch = Batch(positions, start, kv_len, counts, lens, (self.group,))
        self.q = torch.randn(len(positions), heads, dim).to(dtype)
        self.scales = (None, None)

    @property
    def kv(self):
        return LayerKV(self.k, self.v, 0, *self.scales)

    def plain(self):
        args = (self.spec, self.q, self.kv, self.batch, self.group, None)
        return ReferenceAttention().forward(*args)

    def triton(self, backend=None, plan=None, **kw):
        backend = backend or TritonAttention()
        plan = plan or backend.plan(self.batch, self.group, self.spec)
        return backend.forward(self.spec, self.q, self.kv, self.batch, self.group, plan, **kw)

    def check(self, got, tolerance=2e-6):
        torch.testing.assert_close(got.float(), self.plain().float(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    "rows",
    [
        [(1, 1)],
        [(1, 4)],  # a full page
        [(1, 5), (1, 3), (1, 32)],
        [(1, 9), (3, 17), (40, 60), (7, 7)],  # decoding, speculation, a chunk, a whole prompt
        [(33, 33), (1, 64), (65, 65)],
    ],
)
def test_ragged_rows(rows):
    case = Case(rows)
    case.check(case.triton())


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(3, 3, 16), (9, 3, 12), (7, 1, 32), (8, 2, 24)])
def test_heads_and_dims_that_are_no_powers_of_two(heads, kv_heads, dim):
    case = Case([(1, 10), (25, 30)], heads=heads, kv_heads=kv_heads, dim=dim)
    case.check(case.triton())


@pytest.mark.parametrize("window", [1, 5, 32])
def test_windows(window):
    case = Case([(1, 50), (2, 9), (50, 70)], window=window)
    case.check(case.triton())


@pytest.mark.parametrize("chunk", [5, 48])
def test_chunked_attention(chunk, monkeypatch):
    """Split too: some pieces of a window then lie before the chunk, and are seen by no query."""
    monkeypatch.setattr(configs, "SPLIT_KEYS", 16)
    case = Case([(1, 49), (1, 50), (2, 9), (50, 70), (1, 95), (1, 96)], window=chunk)
    case.spec = replace(case.spec, chunked=True)
    case.check(case.triton())


@pytest.mark.parametrize(
    ("stored", "window"),
    [
        (torch.float32, None),
        (torch.int8, 5),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((torch.float32, 5), (torch.int8, None))),
    ],
)
def test_soft_caps(window, stored, monkeypatch):
    monkeypatch.setattr(configs, "SPLIT_KEYS", 32)
    case = Case([(1, 150), (2, 9), (50, 70)], window=window)
    case.spec = replace(case.spec, softcap=0.7)
    if stored == torch.int8:
        (case.k, k_scales), (case.v, v_scales) = (encode(part, stored, scaled=True) for part in (case.k, case.v))
        case.scales = (k_scales, v_scales)
    case.check(case.triton(), 3e-3 if stored == torch.int8 else 2e-6)
    plain = case.plain()
    case.spec = replace(case.spec, softcap=None)
    assert (case.plain() - plain).abs().max() > 0.01
    if stored == torch.float32:
        case.spec = replace(case.spec, softcap=0.7, scale=1e4)  # scores far beyond the cap
        case.check(case.triton())


def test_pages_a_window_has_left_behind_may_hold_anything():
    case = Case([(1, 90)], window=6)
    case.group.page_table[0, :20] = 0  # the null page, here NaN throughout
    expected = Case.plain(case)
    assert not expected.isnan().any()
    case.check(case.triton())


@pytest.mark.parametrize("window", [None, 70])
def test_split_keys_are_joined(window, monkeypatch):
    monkeypatch.setattr(configs, "SPLIT_KEYS", 32)
    case = Case([(1, 150), (1, 31), (4, 100), (1, 1)], window=window)
    plan = TritonAttention().plan(case.batch, case.group, case.spec)
    assert plan.launches[0].splits > 2
    for _ in range(2):  # counters are back at zero
        case.check(case.triton(plan=plan))


@pytest.mark.parametrize(("window", "dim"), [(70, 16), (None, 128)])  # more are added up a few dimensions at a time
def test_long_rows_split_too(window, dim, monkeypatch):
    monkeypatch.setattr(configs, "BLOCK_SPLIT_KEYS", 32)
    monkeypatch.setattr(attention, "processors", lambda device: 16)  # the interpreter takes its time for each
    case = Case([(20, 150), (1, 20), (9, 9), (17, 200)], window=window, dim=dim)
    plan = TritonAttention().plan(case.batch, case.group, case.spec)
    items = plan.launches[-1].items
    assert items[items[:, 0] == 3, 2].max() > 2
    lse = torch.empty(47, 4)
    for _ in range(2):  # counters are back at zero
        case.check(case.triton(plan=plan, lse=lse))
    row = case.group.page_table[3, :50].long()
    seen = case.k[row].flatten(0, 1)[200 - (window or 200) :].repeat_interleave(2, dim=1)
    scores = torch.einsum("hd,khd->hk", case.q[-1], seen) * case.spec.scale
    torch.testing.assert_close(lse[-1], scores.logsumexp(-1))


def test_log_sums():
    case = Case([(1, 40), (20, 20)])
    lse = torch.empty(21, 4)
    case.triton(lse=lse)
    row = case.group.page_table[0, :10].long()
    keys = case.k[row].flatten(0, 1).repeat_interleave(2, dim=1)  # [40, heads, dim]
    scores = torch.einsum("hd,khd->hk", case.q[0], keys) * case.spec.scale
    torch.testing.assert_close(lse[0], scores.logsumexp(-1))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
def test_half_precision(dtype, tolerance):
    case = Case([(1, 40), (20, 30)], dtype=dtype)
    case.check(case.triton(), tolerance)


@pytest.mark.parametrize("wide", [False, True])
def test_eight_bit_pages(wide):
    case = Case([(1, 40), (20, 30)])
    case.spec = replace(case.spec, kv_itemsize=int(wide))  # long rows read copies where the plan knows of small pages
    eight = [part.contiguous().to(torch.float8_e4m3fn) for part in (case.k, case.v)]
    case.k, case.v = (part.float() for part in eight)
    expected = case.plain()
    case.k, case.v = eight
    got = case.triton()
    torch.testing.assert_close(got, expected, atol=2e-3, rtol=2e-3)  # 8-bit pages are computed on in float16


@pytest.mark.parametrize(
    ("rows", "stored"),
    [
        ([(1, 40), (20, 30)], torch.int8),
        ([(1, 9), (70, 70)], torch.float8_e4m3fn),
        pytest.param([(1, 9), (70, 70)], torch.int8, marks=pytest.mark.slow),
        pytest.param([(1, 40), (20, 30)], torch.float8_e4m3fn, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("wide", [False, True])
def test_scaled_pages(rows, stored, wide):
    case = Case(rows, heads=9, kv_heads=3, dim=12)
    case.spec = replace(case.spec, kv_itemsize=int(wide))
    encoded = [encode(part * size, stored, scaled=True) for part, size in ((case.k, 3.0), (case.v, 0.01))]
    (case.k, k_scales), (case.v, v_scales) = encoded
    case.scales = (k_scales, v_scales)
    assert k_scales.isnan().any()  # of places nobody wrote
    torch.testing.assert_close(case.triton(), case.plain(), atol=2e-5, rtol=3e-3)


def test_copied_pages_are_those_of_rows_with_many_queries():
    case = Case([(1, 40), (20, 30), (3, 9), (33, 33)])
    wide = Wide.of(case.batch, case.group, 20)
    assert wide.pages.tolist() == [*case.group.page_table[1, :8].tolist(), *case.group.page_table[3, :9].tolist()]
    assert wide.group.page_table[1, :8].tolist() == list(range(8))
    assert wide.group.page_table[3, :9].tolist() == list(range(8, 17))
    assert Wide.of(case.batch, case.group, 34) is None
    for dtype in (torch.int8, torch.float8_e4m3fn):
        (k, k_scales), (v, v_scales) = (encode(part.nan_to_num(), dtype, scaled=True) for part in (case.k, case.v))
        copied = widen_pages(LayerKV(k, v, 0, k_scales, v_scales), wide.pages, torch.float32)
        for side, got in ((k, k_scales), copied.k_pages), ((v, v_scales), copied.v_pages):
            torch.testing.assert_close(got, take_pages(*side, wide.pages.long()))


def test_queries_in_place_of_a_fused_projection():
    case = Case([(1, 12), (30, 30)])
    fused = torch.randn(31, 8 * 16)
    fused[:, : 4 * 16] = case.q.flatten(1)
    case.q = fused[:, : 4 * 16].unflatten(1, (4, 16))
    case.check(case.triton())


def test_a_plan_from_bounds_serves_every_batch_within_them():
    """What a captured graph does: one plan, rows of all kinds, some empty."""
    bounds = Bounds(tokens=48, rows=6, shortest=1, longest=48, longest_kv=64)
    for rows in ([(1, 3), (40, 60), (5, 5)], [(1, 9)] * 6, [(48, 48)]):
        case = Case(rows)
        batch, empty = case.batch, 6 - len(rows)
        expected = case.plain()
        end = batch.query_start[-1:]
        batch.query_start = torch.cat([batch.query_start, end.repeat(empty)])
        batch.kv_len = torch.cat([batch.kv_len, torch.zeros(empty, dtype=torch.int32)])
        case.group.page_table = torch.nn.functional.pad(case.group.page_table, (0, 0, 0, empty))
        launches = plan_launches(bounds, case.spec, 132, invariant=False)
        assert len(launches) == 2
        plan = Plan(tuple(_with_items(one, batch, case.spec) for one in launches))
        torch.testing.assert_close(case.triton(plan=plan), expected, atol=2e-6, rtol=2e-6)


def test_invariant_mode_gives_a_row_the_same_bits_alone_and_in_company(monkeypatch):
    monkeypatch.setattr(configs, "INVARIANT_SPLIT", 64)
    backend = TritonAttention(invariant=True)
    case = Case([(1, 90), (40, 100), (3, 70)])
    together = case.triton(backend)
    case.check(together)
    whole, table = case.batch, case.group.page_table
    for row, (first, count, n) in enumerate([(0, 1, 90), (1, 40, 100), (41, 3, 70)]):
        group = GroupBatch(4, table[row : row + 1], case.group.kv_slots)
        start = torch.tensor([0, count], dtype=torch.int32)
        positions = whole.positions[first : first + count]
        batch = Batch(positions, start, whole.kv_len[row : row + 1], [count], [n], (group,))
        plan = backend.plan(batch, group, case.spec)
        alone = backend.forward(case.spec, case.q[first : first + count], case.kv, batch, group, plan)
        assert torch.equal(alone, together[first : first + count])


def test_rows_that_share_prefixes_attend_them_together():
    rows = [(1, 41), (1, 50), (3, 44), (1, 30), (2, 33), (1, 9)]
    case = Case(rows, shared=[(0, (1, 2), 9), (3, (4,), 5)])
    tables = [case.group.page_table[r, : -(-n // 4)].tolist() for r, (_, n) in enumerate(rows)]
    groups = cascade.find_groups(tables, [n - c for c, n in rows], 4, worth=1)
    assert [(g.rows, g.pages) for g in groups] == [((0, 1, 2), 9), ((3, 4), 5)]
    lists = cascade.prefix_lists(groups, [c for c, _ in rows], 4, 2, torch.device("cpu"), most_items=4)
    plan = TritonAttention().plan(case.batch, case.group, case.spec, prefix=lists)
    case.check(case.triton(plan=plan))


def test_many_queries_over_one_prefix_and_splits(monkeypatch):
    monkeypatch.setattr(configs, "SPLIT_KEYS", 32)
    rows = [(1, 130 + r) for r in range(20)]
    case = Case(rows, shared=[(0, tuple(range(1, 20)), 32)])
    groups = [cascade.Group(tuple(range(20)), 32)]
    lists = cascade.prefix_lists(groups, [1] * 20, 4, 2, torch.device("cpu"))
    plan = TritonAttention().plan(case.batch, case.group, case.spec, prefix=lists)
    assert plan.ahead.splits == 4  # of 128 keys, 32 at least each
    case.check(case.triton(plan=plan))


@pytest.mark.parametrize(("rows", "splits"), [(32, 8), (64, 4), (128, 2), (256, 1), (1024, 1)])
def test_a_shared_prefix_is_split_until_every_processor_has_a_program(rows, splits):
    spec = AttentionSpec(32, 8, 128, 0.1)
    items, members = torch.zeros(rows // 16 + 8, 4), torch.zeros(rows, 2)  # with room for more groups
    lists = PrefixLists(items, members, torch.zeros(rows), block_m=64, longest=16384)
    launch = prefix_launch(lists, spec, 132)
    assert (launch.splits, launch.blocks) == (splits, rows // 16 + 8)


def test_groups_save_the_most_reading():
    def find(tables, page=16, worth=1):
        return {(g.rows, g.pages) for g in cascade.find_groups(tables, [1000] * len(tables), page, worth)}

    assert find([[1, 2], [3, 4]]) == set()
    assert find([[1, 2, 3], [1, 2, 4], [1, 2]]) == {((0, 1, 2), 2)}
    # one short system prompt under two long ones: the two are worth more
    assert find([[1, *range(10, 30), 2], [1, *range(10, 30), 3], [1, *range(40, 60)], [1, *range(40, 60)]]) == {
        ((0, 1), 21),
        ((2, 3), 21),
    }
    assert find([[1, 2], [1, 3]], worth=1000) == set()
    # a page that a query of the step still fills is not shared
    assert cascade.find_groups([[1, 2], [1, 2]], [20, 40], 16, 1) == [cascade.Group((0, 1), 1)]


def test_refusals():
    backend = TritonAttention()
    assert "cuda" in str(backend.supports(AttentionSpec(4, 2, 64, 1.0), torch.device("cpu"))).lower()
    assert "head_dim" in str(backend.supports(AttentionSpec(4, 2, 512, 1.0), torch.device("cuda")))


def listed(rows, fit, least, bound, begins=None, window=0, tile=16, block=4, spare=1000, steady=False, tries=1):
    """What `list_pieces_kernel` makes of rows (queries, keys), or keys of one query: (row, piece, pieces, first key,
    behind the last) of all pieces, and their queries."""
    rows = [row if isinstance(row, tuple) else (1, row) for row in rows]
    items = torch.full((bound, 8), 99, dtype=torch.int32)
    kv_len = torch.tensor([n for _, n in rows], dtype=torch.int32)
    starts = torch.tensor([0, *(c for c, _ in rows)]).cumsum(0).int()
    list_pieces_kernel[(len(rows),)](
        torch.cat([torch.arange(n - c, n) for c, n in rows]), starts, kv_len,
        kv_len if begins is None else torch.tensor(begins, dtype=torch.int32), items, len(rows), bound, fit, least,
        spare, 1, 1024, block, tile, ROWS=64, WINDOW=window, HAS_PREFIX=begins is not None, STEADY=steady, TRIES=tries,
        BLOCKS=2, PIECES=16, PDL=False,
    )  # fmt: skip
    used = items[items[:, 0] >= 0]
    assert (items[:, 0] < len(rows)).all()
    cut = (items[:, 0] >= 0) & (items[:, 2] > 1)
    assert not cut[min(2 * spare, bound) :].any()  # where results of pieces have room
    own = starts[used[:, 0].long()]
    for (row, *_, full), query in zip(used.tolist(), (used[:, 3] - own).tolist(), strict=True):
        assert full == rows[row][1] - rows[row][0] + query + 1
    first, count = (used[:, 3] - own).tolist(), used[:, 4].tolist()
    queries = [range(i, i + n) for i, n in zip(first, count, strict=True)]
    return used[:, [0, 1, 2, 5, 6]].tolist(), queries


@pytest.mark.slow
def test_pieces_are_as_even_as_whole_rounds_allow():
    rng = random.Random(5)
    for fit in (2, 7, 33):
        lens = [rng.choice((2, 40, 700, 3000)) + rng.randrange(100) for _ in range(rng.randint(1, 50))]
        most = -(-len(lens) * 5 // (4 * fit)) * fit
        found, _ = listed(lens, fit, 2, most)
        assert len(lens) <= len(found) <= most
        more, _ = listed([*lens, 1, 1, 1], fit, 2, most + 3)
        assert more[: len(found)] == found  # nobody's rows change nothing
        for row, length in enumerate(lens):
            mine = [piece[1:] for piece in found if piece[0] == row]
            assert [index for index, *_ in mine] == list(range(len(mine))) and {n for _, n, *_ in mine} == {len(mine)}
            seen = [key for _, _, first, last in mine for key in range(first, last)]
            assert seen == list(range(length))
        longest = max(math.ceil((last - first) / 16) for *_, first, last in found)
        assert longest <= 2 or sum(math.ceil(math.ceil(n / 16) / (longest - 1)) for n in lens) > most  # no shorter ones


@pytest.mark.parametrize("steady", [False, True])
def test_blocks_of_queries_are_cut_too(steady):
    rng = random.Random(6)
    for fit, spare, tries in ((33, 33, 1), (33, 5, 1), (33, 132, 4)):
        rows = [(count, count + rng.choice((0, 0, 300, 900))) for count in rng.choices(range(1, 40), k=6)]
        blocks = sum(-(-count // 4) for count, _ in rows)
        bound = blocks + spare if not steady else sum(-(-c // 4) * -(-n // 32) for c, n in rows)
        found, queries = listed(rows, fit, 2, bound, spare=bound if steady else spare, steady=steady, tries=tries)
        seen = {}
        for (row, piece, pieces, first, last), asked in zip(found, queries, strict=True):
            parts = seen.setdefault((row, asked), [])
            assert piece == len(parts) < pieces
            parts.append(range(first, last))
            assert not steady or first == 32 * piece
        whole = {(row, range(i, min(i + 4, c))) for row, (c, _) in enumerate(rows) for i in range(0, c, 4)}
        assert seen.keys() == whole and (spare < 33 or any(len(parts) > 1 for parts in seen.values()))
        for (row, asked), parts in seen.items():
            assert [k for part in parts for k in part] == list(range(rows[row][1] - rows[row][0] + asked.stop))


def test_one_long_row_among_many_is_cut():
    found, _ = listed([30] * 49 + [100_000], 33, 16, 66)
    assert [pieces for row, _, pieces, *_ in found if row == 0] == [1]
    assert max(last - first for *_, first, last in found) < 6500
    assert found[0][0] == 49


def test_a_chunk_behind_a_long_context_fills_the_chip():
    """Whatever the bounds of a captured step are: here 200 blocks of queries, of which there are two."""
    found, _ = listed([(8, 50_000), *[(4, 20)] * 5], 33, 16, 200, spare=33)
    assert sum(row == 0 for row, *_ in found) == 2 * 14 and len(found) == 2 * 14 + 5
    assert max(last - first for *_, first, last in found) < 3600


def test_nor_is_a_long_row_left_whole_where_others_would_fill_the_chip():
    """As planned for a step of just these rows."""
    rows, spec = [(128, 131_072), *[(1000, 1000)] * 8], AttentionSpec(32, 8, 128, 0.1)
    positions = torch.cat([torch.arange(n - c, n) for c, n in rows])
    counts, lens = [c for c, _ in rows], [n for _, n in rows]
    starts, kv_len = torch.tensor([0, *counts]).cumsum(0).int(), torch.tensor(lens).int()
    batch = Batch(positions, starts, kv_len, counts, lens, ())
    (launch,) = plan_launches(Bounds.of(batch), spec, 132, invariant=False)
    items = _with_items(launch, batch, spec).items
    items = items[items[:, 0] >= 0]
    assert (items[:, 6] - items[:, 5]).max() < 6000 and (items[:, 0] == 0).sum() > 4 * 20


def test_nothing_is_kept_for_pieces_that_cannot_be():
    """One order of summing takes no memory until rows are longer than its pieces."""
    bounds, spec = Bounds(512, 128, 1, 512, configs.INVARIANT_SPLIT), AttentionSpec(32, 8, 128, 0.1)
    assert [one.spare for one in plan_launches(bounds, spec, 132, invariant=True)] == [0]
    (launch,) = plan_launches(replace(bounds, longest_kv=3 * configs.INVARIANT_SPLIT), spec, 132, invariant=True)
    assert launch.spare == 2 * launch.blocks // 3


@pytest.mark.parametrize(("blocks", "parts"), [(3, 11), (15, 2), (17, 7), (25, 5), (33, 1), (34, 3), (140, 1)])
def test_as_many_rounds_as_end_soonest(blocks, parts):
    """Of 33: eleven parts of three blocks are one, seven of seventeen are nearly four."""
    found, _ = listed([(4 * blocks, 131_072 * 2)], 33, 16, max(blocks, 132), spare=132, tries=4, tile=64)
    assert {pieces for _, _, pieces, *_ in found} == {parts}


def test_pieces_begin_behind_a_shared_prefix_and_inside_a_window():
    assert listed([100, 48], 2, 100, 10, begins=[32, 0])[0] == [[0, 0, 1, 32, 100], [1, 0, 1, 0, 48]]
    assert listed([100, 10], 2, 100, 10, window=20)[0] == [[0, 0, 1, 80, 100], [1, 0, 1, 0, 10]]
    assert listed([(6, 100)], 2, 100, 10, window=20)[0] == [[0, 0, 1, 64, 98 + 2], [0, 0, 1, 64, 98]]


@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 32), (32, 16), (32, 8), (9, 3), (14, 2)])
@pytest.mark.parametrize("max_rows", [40, 120, 250, 256])
def test_captured_steps_attend_a_row_that_has_all_tokens(heads, kv_heads, max_rows):
    """As a prompt on its own has, beside rows of nobody that have none."""
    steps = CapturedSteps(
        lambda *_: None,
        max_rows=max_rows,
        max_kv=64,
        max_tokens=512,
        null_slot=0,
        device=torch.device("cpu"),
        warmups=[],
    )
    spec = AttentionSpec(heads, kv_heads, 64, 0.1)
    for tokens, rows in steps.sizes():
        counts, kv_lens = captured_bounds(tokens, rows, 64)
        bounds = Bounds(tokens, rows, min(counts), max(counts), max(kv_lens))
        launches = plan_launches(bounds, spec, 132, invariant=False)
        for count in {1, tokens if tokens > rows else 1}:
            assert sum(one.shortest <= count <= one.longest for one in launches) == 1
