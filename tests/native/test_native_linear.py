"""Packing and quantised multiplication equal dequantised weights times rounded activations."""

import pytest
import torch
from native_harness import HALVES, packed

from quire.kernels.cpu import Store
from quire.kernels.cpu import plain_twin as twin
from quire.kernels.cpu.matrix_packing import AS_BYTES, BYTE, INSTEAD
from quire.kernels.reference.dequant import FORMATS, dequantize

EXACT = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "MXFP4")
FLOATS = ("F16", "BF16", "F32")
STEP = 0.51 / 127  # of 8 bits, as a part of the matrix's largest weight
BITS = {
    "Q2_K": 2.625,
    "Q3_K": 3.5625,
    "MXFP4": 4.25,
    "Q4_K": 4.625,
    "Q4_1": 5.0,
    "Q5_K": 5.625,
    "Q5_1": 6.0,
    "Q6_K": 6.5625,
}


@pytest.mark.parametrize("kind", [*EXACT, *FLOATS])
def test_packed_weights_are_the_stored_ones(kind):
    matrix, raw = packed(kind, 37, 512, torch.Generator().manual_seed(1))
    want = dequantize(raw, kind).float()
    assert (matrix.dense() - want).abs().max() <= (STEP if kind in FLOATS else 0.0) * want.abs().max()


@pytest.mark.parametrize("kind", INSTEAD)
def test_kernel_sets_to_which_others_are_sooner_read_get_those(kind):
    """Q5_0 as exact as ever, Q4_K's scales rounded to fp16, others to a step of 8 bits."""
    matrix, raw = packed(kind, 37, 512, torch.Generator().manual_seed(1), AS_BYTES[0])
    want = dequantize(raw, kind).float()
    assert matrix.form == INSTEAD[kind] and (matrix.form.form == BYTE or kind == "Q4_K")
    within = {"Q5_0": 0.0, "Q4_K": 2**-10}.get(kind, STEP)
    assert (matrix.dense() - want).abs().max() <= within * want.abs().max()


@pytest.mark.parametrize(("kind", "bits"), BITS.items())
def test_bits_of_a_weight(kind, bits):
    assert Store.needs(1024, 4096, kind, "base") * 8 == 1024 * 4096 * bits


@pytest.mark.parametrize("kind", [*EXACT, "F16"])
@pytest.mark.parametrize("rows", [1, 16, 17, 75])
def test_linear_equals_its_twin(isa, kind, rows):
    generator = torch.Generator().manual_seed(rows)
    matrix, _ = packed(kind, rows, 768, generator)
    for tokens in (*range(1, 10), 15, 16, 17, 31, 64):
        x = torch.randn(tokens, 768, generator=generator) * 3
        got, want = matrix.linear(x, isa), twin.linear(matrix, x)
        # a tie may round the other way: one step of one input
        assert (got - want).abs().max() <= 2e-3 * want.abs().max()
        assert ((got - want).square().mean() / want.square().mean()).sqrt() < 5e-4


def test_nothing_to_multiply(isa):
    matrix, _ = packed("Q4_1", 20, 64, torch.Generator().manual_seed(0))
    assert matrix.linear(torch.empty(0, 64), isa).shape == (0, 20)


def test_zeros_and_extremes(isa):
    matrix, _ = packed("Q8_0", 32, 64, torch.Generator().manual_seed(0))
    x = torch.zeros(3, 64)
    x[1] = 1e30
    x[2] = -1e-30
    got = matrix.linear(x, isa)
    assert torch.equal(got[0], torch.zeros(32))
    assert torch.isfinite(got).all()


@pytest.mark.parametrize("kind", EXACT)
def test_the_largest_products_fit_where_they_are_added(isa, kind):
    """All quants as large as can be, whatever their bits mean, times the largest inputs of either sign."""
    generator = torch.Generator().manual_seed(6)
    for byte in (0x00, 0x7F, 0x80, 0xFF):
        matrix, raw = packed(kind, 16, 256, generator)
        blocks = raw.view(-1, FORMATS[kind][1])
        factors = [at + i for at in HALVES[kind] for i in (0, 1)] or [0]
        kept = blocks[:, factors]
        blocks.fill_(byte)
        blocks[:, factors] = kept
        matrix.fill(raw)
        x = torch.tensor([[1.0] * 256, [-1.0] * 256])
        got, want = matrix.linear(x, isa), twin.linear(matrix, x)
        assert (got - want).abs().max() <= 1e-5 * want.abs().max()


@pytest.mark.parametrize(
    ("kind", "columns"),
    [
        *((kind, 512) for kind in ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")),
        *((kind, 288) for kind in ("Q4_1", "Q5_1", "Q8_0", "MXFP4")),
    ],
)
def test_a_row_does_not_depend_on_its_neighbours(isa, kind, columns):
    generator = torch.Generator().manual_seed(3)
    matrix, _ = packed(kind, 50, columns, generator)
    x = torch.randn(45, columns, generator=generator)
    whole = matrix.linear(x, isa)
    for size in (1, 2, 5, 8, 13, 24):
        parts = torch.cat([matrix.linear(x[i : i + size], isa) for i in range(0, 45, size)])
        assert torch.equal(parts, whole), size


@pytest.mark.parametrize("kind", EXACT)
def test_sets_of_one_host_agree(isa, kind):
    """AVX-512 with VNNI and without, and AMX, give the same bits; others the same numbers."""
    from quire.kernels.cpu import features

    matrix, _ = packed(kind, 64, 512, torch.Generator().manual_seed(4))
    x = torch.randn(43, 512, generator=torch.Generator().manual_seed(5))
    best, this = matrix.linear(x, features()[0]), matrix.linear(x, isa)
    assert torch.allclose(best, this, rtol=1e-3, atol=1e-3 * best.abs().max().item())
    if {isa, features()[0]} <= {"amx", "avx512", "avx512bw"}:
        assert torch.equal(best, this)
