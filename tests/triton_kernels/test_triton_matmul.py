"""Matrix products with their prologues and epilogues against plain torch."""

import pytest
import torch

from quire.kernels.triton import configs, twins
from quire.kernels.triton.configs import Matmul
from quire.kernels.triton.gemm import matmul
from quire.kernels.triton.gemv import small_matmul

SHAPES = [(1, 64, 128), (5, 96, 100), (33, 50, 64)]  # rows, outputs, reduction


def tensors(rows, outputs, width):
    return torch.randn(rows, width), torch.randn(outputs, width), torch.randn(width), torch.randn(outputs)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_small_products(shape, splits):
    x, weight, norm, bias = tensors(*shape)
    residual = torch.randn(shape[0], shape[1])
    config = Matmul(32, 32, 4, 2, splits=splits)
    for options in (
        {},
        {"norm": norm, "eps": 1e-5, "bias": bias},
        {"residual": residual},
        {"norm": norm, "eps": 1e-5, "gated": True},
        {"gated": True, "bias": bias},
    ):
        got = small_matmul(x, weight, config=config, **options)
        torch.testing.assert_close(got, twins.matmul(x, weight, **options), atol=2e-4, rtol=1e-4)


def test_the_residual_stream_may_be_updated_in_place():
    x, weight, _, _ = tensors(4, 64, 64)
    stream = torch.randn(4, 64)
    expected = twins.matmul(x, weight, residual=stream)
    assert small_matmul(x, weight, residual=stream, out=stream) is stream
    torch.testing.assert_close(stream, expected, atol=1e-4, rtol=1e-4)


def test_rows_of_a_wider_tensor():
    x, weight, _, _ = tensors(4, 64, 64)
    wide = torch.cat([x, torch.full_like(x, float("nan"))], dim=1)
    torch.testing.assert_close(small_matmul(wide[:, :64], weight), twins.matmul(x, weight), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("shape", SHAPES)
def test_tiled_products(shape):
    x, weight, _, bias = tensors(*shape)
    residual = torch.randn(shape[0], shape[1])
    config = Matmul(32, 32, 4, 2, rows=16)
    for options in ({}, {"residual": residual, "bias": bias}, {"gated": True}, {"gated": True, "bias": bias}):
        got = matmul(x, weight, config=config, **options)
        torch.testing.assert_close(got, twins.matmul(x, weight, **options), atol=2e-4, rtol=1e-4)


def test_programs_take_several_tiles(monkeypatch):
    monkeypatch.setattr("quire.kernels.triton.gemm.processors", lambda device: 3)
    x, weight, _, _ = tensors(70, 90, 32)
    got = matmul(x, weight, config=Matmul(16, 16, 4, 2, rows=16))
    torch.testing.assert_close(got, twins.matmul(x, weight), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("gated", [False, True])
def test_eight_bit_operands(gated):
    (x, x_scale), (weight, weight_scale) = (twins.quantise_fp8(torch.randn(rows, 64)) for rows in (6, 80))
    options = {"gated": gated, "x_scale": x_scale, "weight_scale": weight_scale, "out_dtype": torch.float32}
    expected = twins.matmul(x, weight, **options)
    config = Matmul(32, 32, 4, 2, splits=2, rows=16)
    for function in (small_matmul, matmul):
        torch.testing.assert_close(function(x, weight, config=config, **options), expected, atol=1e-4, rtol=1e-4)


def test_eight_bit_weights_with_wider_rows():
    x = torch.randn(3, 64)
    weight, scale = twins.quantise_fp8(torch.randn(80, 64))
    got = small_matmul(x, weight, weight_scale=scale, config=Matmul(32, 32, 4, 2))
    torch.testing.assert_close(got, twins.matmul(x, weight, weight_scale=scale), atol=1e-4, rtol=1e-4)


def test_bfloat16():
    x, weight, norm, _ = (t.bfloat16() for t in tensors(2, 64, 64))
    got = small_matmul(x, weight, norm=norm, eps=1e-5, config=Matmul(32, 32, 4, 2))
    torch.testing.assert_close(got, twins.matmul(x, weight, norm=norm, eps=1e-5), atol=0.2, rtol=5e-2)


def test_every_shape_has_a_configuration():
    for element in (1, 2, 4):
        for rows in (1, 16, 33, 64):
            for outputs in (576, 4096, 6144, 28672, 128256):
                assert configs.small_matmul(element, rows, outputs) is not None
        assert configs.small_matmul(element, 65, 4096) is None
        assert configs.large_matmul(element, 1).rows
    for element in (2, 4):
        for kernel in ("few", "many"):
            assert configs.attention(kernel, element, 256) is not None
