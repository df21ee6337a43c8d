"""Measuring products while idle: what is tried, what is chosen by which times, in which pieces."""

import json
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from test_warm_up import LLAMA, TINY

from quire.assets import resolve
from quire.kernels import products
from quire.kernels.library import cublas
from quire.kernels.library.cublas import Algorithm
from quire.kernels.product_choices import CHUNKS, LIBRARY, ProductChoices, Shape
from quire.kernels.triton import configs
from quire.model import load_model
from quire.runtime import product_search
from quire.runtime.idle_work import IdleWork
from quire.runtime.product_search import ProductSearch, matrices
from quire.runtime.product_trials import ProductTrials

FAST, SLOW, WRONG, ABSENT = (Algorithm(number, 1, 1) for number in range(4))
TIMES = {FAST: 8.0, SLOW: 30.0, WRONG: 1.0, LIBRARY: 10.0}


@pytest.fixture
def library(monkeypatch):
    """Four kernels: one faster than the rest, one slower, one that is wrong, one that is not there after all."""

    def matmul(x, weight, algorithm, *, residual=None, scales=None):
        out = F.linear(x, weight) * (2 if algorithm == WRONG else 1)
        return None if algorithm == ABSENT else out if residual is None else residual.add_(out)

    monkeypatch.setattr(cublas, "offers", lambda x, weight: [FAST, SLOW, WRONG, ABSENT])
    monkeypatch.setattr(cublas, "matmul", matmul)
    monkeypatch.setattr(products, "_by_triton", lambda *arguments: None)
    monkeypatch.setattr(configs, "small_matmul", lambda *shape: None)


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY | LLAMA))
    source = resolve(str(tmp_path)).open()
    return load_model(source, device=torch.device("cpu"), dtype=torch.bfloat16, random_weights=True)


class Timer:
    def __init__(self, times=None):
        self.times = times or TIMES
        self.asked = []

    def __call__(self, run: partial, launches, captured):
        choice, rows = run.args[0], run.func.__self__.shape.rows
        run(0)
        self.asked.append((choice, rows, launches, captured))
        return self.times.get(choice, 20.0)


def asked_for(known, model, rows, **more):
    first = min(matrices(model))
    for size in rows:
        known.find(Shape(*first, size, **more))
    return first


def taken(known):
    def faster(shape, usual, choice):
        known.put(shape, choice)
        yield True
        return True

    return faster


def test_the_fastest_right_kernel_is_chosen_and_kept(model, library, tmp_path):
    known, timer = ProductChoices("chip", 1), Timer()
    known.use(tmp_path)
    first = asked_for(known, model, [24, 8])
    search = ProductSearch(model, known, [8, 16, 24], taken(known), timer)
    pieces = 0
    while search.proceed():
        pieces += 1
        assert len(timer.asked) <= pieces, "at most one is timed in a piece"
    assert known._known == {Shape(*first, 8): FAST, Shape(*first, 24): FAST} and search.changed == {8, 24}
    assert [rows for _, rows, *_ in timer.asked] == sorted(rows for _, rows, *_ in timer.asked), "small steps first"
    again = ProductChoices("chip", 1)
    again.use(tmp_path)
    assert again._known == known._known
    asked_for(again, model, [8, 24])
    assert not ProductSearch(model, again, [8, 16, 24], taken(again), timer).proceed(), "nothing is left to measure"


def test_what_saves_too_little_changes_nothing_and_is_not_measured_again(model, library):
    known, timer = ProductChoices(), Timer(TIMES | {FAST: 9.9})
    first = asked_for(known, model, [8])
    search = ProductSearch(model, known, [8, 16, 24], taken(known), timer)
    while search.proceed():
        pass
    assert known._known == {Shape(*first, 8): LIBRARY} and not search.changed


def test_what_steps_are_not_faster_by_is_not_taken(model, library):
    known, tried = ProductChoices(), []
    first = asked_for(known, model, [8, 16])

    def faster(shape, usual, choice):
        tried.append((shape.rows, known.find(shape), usual, choice))
        return shape.rows == 16 and (yield from taken(known)(shape, usual, choice))

    search = ProductSearch(model, known, [8, 16], faster, Timer())
    while search.proceed():
        pass
    assert tried == [(rows, LIBRARY, LIBRARY, FAST) for rows in (8, 16)]
    assert known._known == {Shape(*first, 8): LIBRARY, Shape(*first, 16): FAST} and search.changed == {16}


def test_large_steps_are_measured_as_far_as_there_are_such(model, library):
    known, timer = ProductChoices(), Timer({FAST: 20_000.0, LIBRARY: 30_000.0, SLOW: 40_000.0})
    first = asked_for(known, model, [2000, 1200])
    search = ProductSearch(model, known, [64, 2048, 3072, 4096], taken(known), timer)
    while search.proceed():
        pass
    assert {shape.rows for shape in known._known} == {size for size in CHUNKS if size <= 4096}
    assert set(known._known.values()) == {FAST} and known.find(Shape(*first, 2500)) == FAST
    assert {(launches, captured) for *_, launches, captured in timer.asked} <= {(1, False), (2, False)}


def test_memory_that_lacks_leaves_a_shape_to_the_rules(model, library):
    known = ProductChoices()
    first = asked_for(known, model, [8, 16])

    def timer(run, launches, captured):
        if run.func.__self__.shape.rows == 8:
            raise torch.OutOfMemoryError("no room")
        run(0)
        return TIMES.get(run.args[0], 20.0)

    search = ProductSearch(model, known, [8, 16, 24], taken(known), timer)
    while search.proceed():
        pass
    assert known._known == {Shape(*first, 16): FAST}


def test_the_gate_is_tried_along(model, library, monkeypatch):
    tiling = configs.gated_matmuls(2)[0]
    monkeypatch.setattr(product_search._Product, "_gated", lambda self, choice, weight, scales: torch.ones(8, 8))
    known = ProductChoices()
    first = asked_for(known, model, [8], gated=True)
    search = ProductSearch(model, known, [8, 16, 24], taken(known), Timer({tiling: 5.0, LIBRARY: 10.0}))
    while search.proceed():
        pass
    assert known._known == {Shape(*first, 8, gated=True): tiling}


@pytest.mark.parametrize("gain", [True, False])
def test_trials_leave_the_faster_choice(gain):
    """Small steps as they are recorded, large ones by the clock, each kernel in its turn."""
    known, now, met = ProductChoices(), [0.0], []
    small, large = Shape(2, 64, 64, 8), Shape(2, 64, 64, 4096)

    class Worker:
        def try_again(self, tokens):
            met.append((tokens, known.find(small)))
            return gain

        def sketch_step(self, tokens):
            met.append((tokens, known.find(large)))
            now[0] += 9.8 if gain and met[-1][1] == FAST else 10.0

    trials = ProductTrials(Worker(), known, lambda: now[0])
    for shape in (small, large):
        pieces, asked = trials.faster(shape, LIBRARY, FAST), len(met)
        with pytest.raises(StopIteration) as end:
            while next(pieces):
                asked += 1
                assert len(met) == asked, "one step a piece"
        assert end.value.value == gain
        assert known.find(shape) == (FAST if gain else LIBRARY)
    assert met[0] == (8, FAST) and met[1:] == [(4096, LIBRARY), (4096, FAST)] * (len(met) // 2)


def test_idle_work_records_measures_and_records_again():
    done = []

    class Worker:
        left = [True, False, True, False, False]

        def prepare_next(self):
            done.append("record")
            return self.left.pop(0)

        def record_again(self, sizes):
            done.append(sizes)

    class Search:
        changed = {8}
        pieces = [True, False]

        def proceed(self):
            done.append("measure")
            return self.pieces.pop(0)

    work = IdleWork(Worker(), Search())
    assert [work.proceed(quiet=False) for _ in range(3)] == [True, False, False]
    assert done == ["record", "record"], "nothing is measured while requests come and go"
    assert [work.proceed(quiet=True) for _ in range(5)] == [True, True, True, False, False]
    assert done == ["record", "record", "measure", "measure", {8}, "record", "record"]
    work.prepare_again()
    assert not work.proceed(quiet=True) and done[-1] == "record"
