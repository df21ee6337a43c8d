"""Steps padded to a captured size draw the same tokens as steps as they are (captures themselves need a GPU)."""

import random
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from quire.runtime import capture as captured
from quire.runtime.capture import CapturedSteps, StepOutput, bounds, pad_table, row_buckets
from quire.runtime.prefix_groups import SharedPrefixes
from quire.runtime.staging import Staging
from quire.types.plan import PageDelta, Row, StepPlan


def steps(max_rows=100, max_tokens=8192):
    cpu = torch.device("cpu")
    return CapturedSteps(
        lambda *_: None, max_rows=max_rows, max_kv=64, max_tokens=max_tokens, null_slot=9, device=cpu, warmups=[]
    )


def test_every_step_within_the_limits_fits_and_pads_little():
    captured = steps()
    sizes = set(captured.sizes())
    for rows in range(1, 101):
        size = captured.fit([1] * rows)
        assert size in sizes and rows <= size[1] <= rows * 1.25 + 8
    for counts in ([2], [40, 1, 1], [500, *[1] * 12], [300, *[1] * 99], [*[3] * 100], [600, 700, *[1] * 60]):
        tokens, rows = captured.fit(counts)
        assert (tokens, rows) in sizes and tokens >= sum(counts)
        assert rows > len(counts) or (rows == len(counts) and tokens == sum(counts))
    assert captured.fit([1537]) is None and steps(max_tokens=512).fit([513]) is None
    assert captured.fit([1] * 101) is None


def test_prompts_beside_hundreds_of_answers_are_captured():
    captured = steps(max_rows=1024)
    assert captured.fit([140, *[1] * 285]) == (512, 384)
    rng = random.Random(7)
    for _ in range(500):
        rows = rng.randrange(1, 1000)
        counts = [*[1] * rows, *(rng.randrange(1, 200) for _ in range(rng.randrange(1, 4)))]
        if rows < sum(counts) <= 1024:
            tokens, most = captured.fit(counts)
            assert tokens >= sum(counts) and most > len(counts)


def test_row_buckets_end_at_the_most():
    assert row_buckets(1) == [1] and row_buckets(5) == [1, 2, 4, 5]
    assert row_buckets(300)[-3:] == [240, 256, 300]


@pytest.mark.parametrize("size", [(8, 8), (64, 8)])
def test_padding_belongs_to_the_null_slot_and_fills_the_size(size):
    table = np.array([[3, 5], [7, 0], [1, 1], [4, 0], [3, 9], [2, 4], [2, 5]])
    padded = pad_table(table, size, null_slot=9, waste_cell=6)
    assert (padded[:, :2] == table).all()
    assert set(padded[0, 2:]) == set(padded[4, 2:]) == {9}
    assert set(padded[5, 2:]) == {0} and set(padded[6, 2:]) == {6}
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


class Recorded:
    """A CUDA graph that is none: what is captured runs, and replays are counted."""

    def __init__(self):
        self.replays = 0

    def replay(self):
        self.replays += 1


@pytest.fixture
def no_gpu(monkeypatch):
    """Captures on a CPU."""
    nothing = {"graph_pool_handle": None, "synchronize": None, "empty_cache": None, "current_stream": None}
    for name, value in nothing.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    for name in ("graph", "stream", "device"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, **__: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recorded)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    monkeypatch.setattr(captured, "why_not", lambda device: None)
    monkeypatch.setattr(captured, "compile_together", lambda jobs, device: [job() for job in jobs])
    monkeypatch.setattr(captured, "_borrowed", lambda tensor: tensor)


def test_a_start_compiles_and_captures_all_that_is_replayed(no_gpu):
    pytest.importorskip("triton")
    ran, brief, beside, cpu = [], [], [], torch.device("cpu")

    def warmup(rows, tokens, counts, kv_lens, lists):
        assert rows.shape == (7, len(counts)) and rows[2].sum() == tokens
        brief.append((tokens, len(counts), lists is not None and lists.items.shape[0]))

    def forward(rows, tokens, counts, kv_lens, lists):
        assert rows.shape == (7, len(counts)) and rows[2].sum() == tokens
        ran.append((tokens, len(counts), lists is not None and lists.items.shape[0]))
        return StepOutput(torch.zeros(len(counts), 3), torch.zeros(len(counts)), torch.zeros(len(counts), 2))

    sharing = SharedPrefixes(slots=70, page_size=4, group_heads=2)
    steps = CapturedSteps(
        forward, max_rows=70, max_kv=64, max_tokens=512, null_slot=70, device=cpu, sharing=sharing,
        warmups=[lambda *step: brief.append("part"), warmup],
    )  # fmt: skip
    assert not steps.ready
    steps.capture(beside=[lambda: beside.append(len(ran))])
    assert steps.ready and beside == [0]  # before anything is captured
    shared = {(rows, rows, sharing.items(rows)) for rows in (32, 64)}
    assert set(ran) == {(tokens, rows, False) for tokens, rows in steps.sizes()} | shared
    assert len(ran) == len(set(ran)) and set(ran) == {*brief} - {"part"}
    assert brief.count((64, 64, sharing.items(64))) == 2 and brief.count("part") > 3  # compiled, sized
    before = brief.count("part")
    steps.capture(beside=[])
    assert brief.count("part") == before and len(ran) == 2 * len(set(ran)), "captured anew, of kernels there are"

    staging = Staging(cpu, 1)
    staging.rotate()
    table = np.array([[3, 5], [7, 0], [1, 1], [0, 0], [3, 9], [0, 0], [0, 0]])
    lists = np.arange(sharing.length(32), dtype=np.int32)
    output = steps.replay_shared(32, table, lists, staging)
    capture = steps._captures[32, 32, True]
    assert output is capture.output and capture.replay.__self__.replays == 1
    assert torch.equal(capture.inputs.lists.items.flatten(), torch.from_numpy(lists[: 4 * sharing.items(32)]))
    assert capture.inputs.rows[0, :3].tolist() == [3, 5, 70]
    assert steps.prefix_rows(65) is None and steps.prefix_rows(33) == 64


def test_what_a_start_leaves_for_later_is_captured_when_met_or_idle(no_gpu):
    pytest.importorskip("triton")
    ran, cpu = [], torch.device("cpu")

    def forward(rows, tokens, counts, kv_lens, lists):
        ran.append((tokens, len(counts), lists is not None))
        return StepOutput(torch.zeros(len(counts), 3), torch.zeros(len(counts)), torch.zeros(len(counts), 2))

    steps = CapturedSteps(
        forward, max_rows=70, max_kv=64, max_tokens=512, null_slot=70, device=cpu, warmups=[lambda *_: None],
        sharing=SharedPrefixes(slots=70, page_size=4, group_heads=2),
    )  # fmt: skip
    steps.capture(beside=[], whole=False)
    everything = {(*size, False) for size in steps.sizes()} | {(32, 32, True), (64, 64, True)}
    assert {(1, 1, False), (64, 8, False), (70, 70, False), (512, 71, False), (64, 64, True)} <= set(ran) < everything
    assert (24, 24, False) not in ran
    staging = Staging(cpu, 1)
    staging.rotate()
    for _ in range(2):
        steps.replay((24, 24), np.zeros((7, 24), np.int64), staging)
    assert ran[-1] == (24, 24, False) and ran.count(ran[-1]) == 1
    left = len(everything) - len(ran)
    assert [steps.capture_next() for _ in range(left)] == [True] * (left - 1) + [False]
    assert set(ran) == everything and len(ran) == len(everything) and not steps.capture_next()

    ran.clear()  # other kernels are chosen for 64 tokens or rows
    stale = steps._captures[64, 64, False]
    steps.renew({64})
    outdated = {key for key in everything if 64 in key[:2]}
    steps.replay((64, 64), np.zeros((7, 64), np.int64), staging)
    assert not ran and stale.replay.__self__.replays == 1, "until it is recorded again the old one serves"
    assert [steps.capture_next() for _ in outdated] == [True] * (len(outdated) - 1) + [False]
    assert set(ran) == outdated and len(ran) == len(outdated) and steps._captures[64, 64, False] is not stale


@pytest.mark.parametrize("after", [9.9, 10.0])
def test_a_step_by_other_kernels_stays_if_it_is_faster(after, no_gpu, monkeypatch):
    pytest.importorskip("triton")
    ran, cpu = [], torch.device("cpu")

    def forward(rows, tokens, counts, kv_lens, lists):
        ran.append((tokens, len(counts)))
        return StepOutput(torch.zeros(len(counts), 3), torch.zeros(len(counts)), torch.zeros(len(counts), 2))

    steps = CapturedSteps(
        forward, max_rows=70, max_kv=64, max_tokens=512, null_slot=70, device=cpu, warmups=[lambda *_: None]
    )
    steps.capture(beside=[])
    staging = Staging(cpu, 1)
    staging.rotate()
    steps.replay((24, 24), np.ones((7, 24), np.int64), staging)
    old, compared = steps._captures[24, 24, False], []

    def replay_ms(replays):
        assert old.inputs.rows[0].tolist() == [70] * 24, "no slot of a request is written"
        compared.append(replays)
        return [10.0, after]

    monkeypatch.setattr(captured, "replay_ms", replay_ms)
    ran.clear()
    assert steps.try_again(24) == (after < 10) and ran == [(24, 24)]
    assert compared == [[old.replay, compared[0][1]]]
    assert (steps._captures[24, 24, False] is old) == (after == 10)
    assert steps.try_again(384) == (after < 10) and ran[-1] == (384, 71), "of several the one with the most rows"
    assert not steps.try_again(23) and len(ran) == 2, "there is no step of such a size"
