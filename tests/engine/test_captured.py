"""Steps padded to a captured size draw the same tokens as steps as they are (captures themselves need a GPU)."""

import numpy as np
import pytest
import torch

from quire.runtime.captured import CapturedSteps, bounds, pad_table, row_buckets
from quire.runtime.sharing import SharedPrefixes
from quire.types.plan import PageDelta, Row, StepPlan


def steps(max_rows=100, max_tokens=512):
    cpu = torch.device("cpu")
    return CapturedSteps(lambda *_: None, max_rows=max_rows, max_kv=64, max_tokens=max_tokens, nobody=9, device=cpu)


def test_every_step_within_the_limits_fits_and_pads_little():
    captured = steps()
    sizes = set(captured.sizes())
    for rows in range(1, 101):
        size = captured.fit([1] * rows)
        assert size in sizes and rows <= size[1] <= rows * 1.25 + 8
    for counts in ([2], [40, 1, 1], [500, *[1] * 12], [300, *[1] * 99], [*[3] * 100]):
        tokens, rows = captured.fit(counts)
        assert (tokens, rows) in sizes and tokens >= sum(counts)
        assert rows > len(counts) or (rows == len(counts) and tokens == sum(counts))
    assert captured.fit([513]) is None
    assert captured.fit([1] * 101) is None


def test_row_buckets_end_at_the_most():
    assert row_buckets(1) == [1] and row_buckets(5) == [1, 2, 4, 5]
    assert row_buckets(300)[-3:] == [240, 256, 300]


@pytest.mark.parametrize("size", [(8, 8), (64, 8)])
def test_padding_belongs_to_nobody_and_fills_the_size(size):
    table = np.array([[3, 5], [7, 0], [1, 1], [4, 0], [3, 9]])
    padded = pad_table(table, size, nobody=9)
    assert (padded[:, :2] == table).all()
    assert set(padded[0, 2:]) == set(padded[4, 2:]) == {9}
    assert padded[2].sum() == size[0]


def test_bounds_hold():
    counts, kv_lens = bounds(64, 8, 100)
    assert counts == [64, *[1] * 7] and kv_lens == [100] * 8  # one row may have all tokens
    assert bounds(64, 8, 20)[1] == [65] * 8


def test_shared_prefixes_are_found_once_and_followed():
    sharing = SharedPrefixes(slots=40, page_size=4, group_heads=2)
    common = list(range(100, 300))
    deltas = [PageDelta(slot, 0, 0, [*common, 1000 + slot]) for slot in range(20)]
    rows = [Row(slot, 802, 1) for slot in range(20)]
    plan = StepPlan(step=1, rows=rows, deltas=deltas)
    sharing.apply(plan)
    flat = sharing.lists(plan, 32)
    items = flat[: 4 * sharing.items(32)].reshape(-1, 4)
    assert items[0].tolist() == [0, 0, 20, 800] and (items[1:] == -1).all()
    members = flat[items.size : items.size + 64].reshape(-1, 2)
    assert members[:20].tolist() == [[row, 0] for row in range(20)]
    begin = flat[items.size + 64 : items.size + 96]
    assert begin.tolist() == [800] * 20 + [0] * 12
    later = StepPlan(step=2, rows=[Row(slot, 803, 1) for slot in range(20)])
    assert (sharing.lists(later, 32) == flat).all()
    sharing.apply(StepPlan(step=3, frees=[3]))
    fewer = StepPlan(step=3, rows=[Row(slot, 804, 1) for slot in range(20) if slot != 3])
    assert sharing.lists(fewer, 32)[2] == 19
    assert sharing.lists(StepPlan(step=4, rows=rows[:5]), 32) is None


def test_rows_that_share_nothing_have_no_lists():
    sharing = SharedPrefixes(slots=40, page_size=4, group_heads=2)
    deltas = [PageDelta(slot, 0, 0, list(range(100 * slot, 100 * slot + 60))) for slot in range(1, 20)]
    plan = StepPlan(step=1, rows=[Row(slot, 239, 1) for slot in range(1, 20)], deltas=deltas)
    sharing.apply(plan)
    assert sharing.lists(plan, 32) is None
