"""Steps padded to a captured size draw the same tokens as steps as they are (captures themselves need a GPU)."""

import numpy as np
import pytest
import torch

from quire.runtime.captured import CapturedSteps, bounds, pad_table, row_buckets


def steps(max_rows=100, max_tokens=512):
    cpu = torch.device("cpu")
    return CapturedSteps(lambda *_: None, max_rows=max_rows, max_kv=64, max_tokens=max_tokens, device=cpu)


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
    table = np.array([[3, 5], [7, 0], [1, 1], [3, 9]])
    padded = pad_table(table, size, nobody=9)
    assert (padded[:, :2] == table).all()
    assert set(padded[0, 2:]) == set(padded[3, 2:]) == {9}
    assert padded[2].sum() == size[0]


def test_bounds_hold():
    counts, kv_lens = bounds(64, 8, 100)
    assert sum(counts) == 64 and max(counts) == 57 and min(counts) == 1 and kv_lens == [100] * 8
    assert bounds(64, 8, 20)[1] == [65] * 8
