"""Which kernel multiplies: what comes along, what was measured here and kept, and what is made of a spoiled file."""

import json
import logging

import pytest
import torch

from quire.kernels import product_choices, products
from quire.kernels.library.cublas import Algorithm
from quire.kernels.product_choices import LIBRARY, ProductChoices, Shape
from quire.kernels.triton import configs
from quire.runtime.capture import MIXED_TOKENS, row_buckets

SHAPE = Shape(2, 6144, 4096, 48)
KERNEL = Algorithm(27, 4, 0)
TILING = configs.small_matmul(1, 32, 4096, 4096)
GATED = configs.gated_matmul(1, 64, 28672, 4096)


def test_what_comes_along_is_what_steps_have():
    shipped = product_choices._shipped()
    assert {shape.rows for shape in shipped} <= {*row_buckets(1024), *MIXED_TOKENS, *product_choices.CHUNKS}
    assert (2, 4096, 14336) in {shape[:3] for shape in shipped} and shipped[SHAPE] == KERNEL
    assert ProductChoices("chip", 1, shipped=True).find(SHAPE) == KERNEL
    assert ProductChoices("chip", 1).find(SHAPE) is None


def test_large_steps_take_the_next_size_that_is_known():
    known = ProductChoices("chip", 1)
    known.put(SHAPE._replace(rows=8192), KERNEL)
    for rows in (1600, 4096, 4097, 8192):
        assert known.find(SHAPE._replace(rows=rows)) == KERNEL
    assert known.find(SHAPE._replace(rows=1536)) is None and MIXED_TOKENS[-1] == product_choices.FIXED_ROWS
    assert known.find(SHAPE._replace(rows=8193)) is None
    known.put(SHAPE._replace(rows=4096), LIBRARY)
    assert known.find(SHAPE._replace(rows=2050), adds=True) == LIBRARY
    known.put(SHAPE._replace(rows=16384), KERNEL)
    assert known.find(SHAPE._replace(rows=40_000)) == KERNEL
    assert {shape.rows: adds for shape, adds in known.asked.items()} == {
        1536: False, 2048: False, 3072: True, 4096: False, 6144: False, 8192: False, 12288: False, 16384: False
    }  # fmt: skip


def test_what_was_measured_is_kept_beside_what_others_measure(tmp_path):
    first, second = (ProductChoices("NVIDIA H200, 132 processors", 130100) for _ in range(2))
    for known in (first, second):
        known.use(tmp_path / "products")
    first.put(SHAPE, KERNEL)
    first.put(SHAPE._replace(rows=64), LIBRARY)
    first.save()
    second.put(SHAPE._replace(rows=64), KERNEL)
    second.put(Shape(1, 4096, 4096, 32), TILING)
    second.put(Shape(1, 28672, 4096, 64, gated=True), GATED)
    second.save()
    later = ProductChoices("NVIDIA H200, 132 processors", 130100)
    later.use(tmp_path / "products")
    assert later._known == second._known == {
        SHAPE: KERNEL, SHAPE._replace(rows=64): KERNEL, Shape(1, 4096, 4096, 32): TILING,
        Shape(1, 28672, 4096, 64, gated=True): GATED,
    }  # fmt: skip
    assert [path.name for path in (tmp_path / "products").iterdir()] == ["nvidia-h200-132-processors.json"]
    described = later.describe({SHAPE[:3], (1, 28672, 4096)})
    assert described[:2] == [
        "products 28,672 x 4,096, with the gate: measured for 1 numbers of rows: 1 by Triton",
        "products 6,144 x 4,096: measured for 2 numbers of rows: 2 by a named kernel of cuBLAS",
    ]
    assert str(tmp_path) in described[2] and len(described) == 3


def spoiled(written):
    kernels = written["kernels"]["2"]["6144x4096"]
    yield "not json", "{"
    yield "not what it should be", json.dumps(written | {"kernels": [1]})
    yield "no number", json.dumps(written | {"kernels": {"2": {"6144x4096": {"many": [1]}}}})
    yield "no shape", json.dumps(written | {"kernels": {"2": {"6144": kernels}}})
    yield "too many numbers", json.dumps(written | {"kernels": {"2": {"6144x4096": {"48": [1] * 9}}}})
    yield "too large", json.dumps(written) + " " * product_choices.MAX_FILE


def test_a_spoiled_file_is_told_of_and_not_used(tmp_path, caplog):
    known = ProductChoices("chip", 1)
    known.use(tmp_path)
    known.put(SHAPE, KERNEL)
    known.save()
    path = tmp_path / "chip.json"
    written = json.loads(path.read_bytes())
    for why, text in spoiled(written):
        path.write_text(text)
        caplog.clear()
        again = ProductChoices("chip", 1)
        again.use(tmp_path)
        assert not again._known and str(path) in caplog.text, why
    for other in ({"cublas": 2}, {"search": 0}, {"device": "another"}):
        path.write_text(json.dumps(written | other))
        again = ProductChoices("chip", 1)
        again.use(tmp_path)
        assert not again._known, other
    unknown = {"2": {"6144x4096": {"48": [4096, 4096, 64, 9, 1, 0, 0], "64": [27, 4, 0]}}}
    path.write_text(json.dumps(written | {"kernels": unknown}))
    again.use(tmp_path)
    assert again._known == {SHAPE._replace(rows=64): KERNEL}, "a tiling that is none of ours may not fit the chip"


def test_where_nothing_can_be_kept_it_is_said_once(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    known = ProductChoices("chip", 1)
    known._path = tmp_path / "file" / "chip.json"
    with caplog.at_level(logging.WARNING):
        known._measured.clear()
        known.put(SHAPE, KERNEL)
        known.save()
        known.save()
    assert known.find(SHAPE) == KERNEL and known._path is None


@pytest.fixture
def known(monkeypatch):
    found = ProductChoices("chip", 1)
    monkeypatch.setattr(products, "choices", lambda device: found)
    return found


@pytest.mark.parametrize("adds", [False, True])
def test_products_go_to_what_was_chosen_else_by_rules(adds, known, monkeypatch):
    torch.manual_seed(0)
    x, weight, residual = torch.randn(4, 8), torch.randn(16, 8), torch.randn(4, 16)
    expected = x @ weight.T + (residual if adds else 0)
    ran, there = [], True

    def by_name(x, weight, algorithm, *, residual, scales):
        ran.append(algorithm)
        out = torch.nn.functional.linear(x, weight)
        return None if not there else out if residual is None else residual.add_(out)

    monkeypatch.setattr(products.cublas, "matmul", by_name)
    monkeypatch.setattr(configs, "small_matmul", lambda *shape: None)
    shape = products.shape_of(x, weight)
    for choice, there in ((None, True), (LIBRARY, True), (KERNEL, True), (KERNEL, False)):  # noqa: B007
        if choice is not None:
            known.put(shape, choice)
        into = residual.clone() if adds else None
        out = products.matmul(x, weight, residual=into)
        torch.testing.assert_close(out, expected)
        assert (out is into) == adds
    assert ran == [KERNEL, KERNEL] and known.asked == {shape: adds}


def test_the_gate_goes_along_where_that_was_chosen(known, monkeypatch):
    x, weight = torch.zeros(64, 4096, dtype=torch.float8_e4m3fn), torch.empty(0)
    weight = torch.empty(1, dtype=torch.float8_e4m3fn).expand(28672, 4096)
    shape = products.shape_of(x, weight, gated=True)
    assert products.joined_gate(x, weight) == GATED == products.usual(shape)
    known.put(shape, LIBRARY)
    assert products.joined_gate(x, weight) is None
    known.put(shape, configs.gated_matmuls(1)[-1])
    assert products.joined_gate(x, weight) == configs.gated_matmuls(1)[-1]
    monkeypatch.setattr(products, "moves_tiles", lambda device: False)
    assert products.joined_gate(x, weight) is None
