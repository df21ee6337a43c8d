"""Matrix products with their prologues and epilogues against plain torch."""

from dataclasses import replace

import pytest
import torch

from quire.kernels.triton import configs
from quire.kernels.triton import plain_twins as twins
from quire.kernels.triton.configs import Matmul
from quire.kernels.triton.gemm import gated_matmul, matmul
from quire.kernels.triton.gemv import row_matmul, small_matmul
from quire.model.quantization.fp8 import Fp8Scheme
from quire.runtime.capture import MIXED_TOKENS

SHAPES = [(1, 64, 128), (5, 96, 100), (33, 50, 64)]  # rows, outputs, reduction


def tensors(rows, outputs, width):
    return torch.randn(rows, width), torch.randn(outputs, width), torch.randn(width)


@pytest.mark.parametrize(("rows", "outputs", "width"), [(1, 8, 4096), (1, 16, 1536), (2, 24, 512), (1, 8, 10240)])
def test_single_rows(rows, outputs, width):
    x, weight, norm = tensors(rows, outputs, width)
    stream = torch.randn(rows, outputs)
    eight, scale = twins.quantise_fp8(weight)
    for options in ({}, {"norm": norm, "eps": 1e-5}, {"residual": stream}, {"norm": norm, "eps": 1e-5, "gated": True}):
        got = row_matmul(x, weight, **options)
        torch.testing.assert_close(got, twins.matmul(x, weight, **options), atol=1e-3, rtol=1e-4)
        got = row_matmul(x, eight, weight_scale=scale, **options)
        expected = twins.matmul(x, eight, weight_scale=scale, **options)
        torch.testing.assert_close(got, expected, atol=1e-2, rtol=1e-4)
    for matrix, options in ((weight, {}), (eight, {"weight_scale": scale})):
        expected = twins.matmul(x, matrix, residual=stream, **options)
        into = stream.clone()
        assert row_matmul(x, matrix, residual=into, out=into, **options) is into
        torch.testing.assert_close(into, expected, atol=1e-2, rtol=1e-4)


@pytest.mark.parametrize("tall", [0, 64])  # rows of x as the tall side; 0: weights are
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_small_products(shape, splits, tall):
    x, weight, _ = tensors(*shape)
    residual = torch.randn(shape[0], shape[1])
    config = Matmul(32, 32, 4, 2, splits=splits, rows=tall)
    for options in ({}, {"residual": residual}):
        got = small_matmul(x, weight, config=config, **options)
        torch.testing.assert_close(got, twins.matmul(x, weight, **options), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("tall", [0, 16])
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("rows", [7, 16])
def test_the_residual_stream_may_be_updated_in_place(rows, splits, tall):
    x, weight, stream = (tensor.bfloat16() for tensor in (*tensors(rows, 40, 72)[:2], torch.randn(rows, 40)))
    expected = twins.matmul(x, weight, residual=stream)
    config = Matmul(32, 32, 4, 2, splits=splits, rows=tall)
    assert small_matmul(x, weight, residual=stream, out=stream, config=config) is stream
    torch.testing.assert_close(stream, expected, atol=2e-2, rtol=1e-2)


def test_no_rows():
    x, weight, _ = tensors(0, 64, 64)
    assert small_matmul(x, weight).shape == (0, 64)


def test_rows_of_a_wider_tensor():
    x, weight, _ = tensors(4, 64, 64)
    wide = torch.cat([x, torch.full_like(x, float("nan"))], dim=1)
    torch.testing.assert_close(small_matmul(wide[:, :64], weight), twins.matmul(x, weight), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("shape", SHAPES)
def test_tiled_products(shape):
    x, weight, _ = tensors(*shape)
    got = matmul(x, weight, Matmul(32, 32, 4, 2, rows=16))
    torch.testing.assert_close(got, twins.matmul(x, weight), atol=2e-4, rtol=1e-4)


def test_programs_take_several_tiles(monkeypatch):
    monkeypatch.setattr("quire.kernels.triton.gemm.processors", lambda device: 3)
    x, weight, _ = tensors(70, 90, 32)
    got = matmul(x, weight, Matmul(16, 16, 4, 2, rows=16))
    torch.testing.assert_close(got, twins.matmul(x, weight), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("shape", [(1, 32, 64), (7, 24, 96), (33, 64, 64), (70, 88, 48), (0, 16, 16)])
def test_gate_and_up_in_one_launch(shape, monkeypatch):
    rows, outputs, width = shape
    monkeypatch.setattr("quire.kernels.triton.gemm.processors", lambda device: 3)
    x, weight, _ = tensors(rows, 2 * outputs, width)
    got = gated_matmul(x, weight, Matmul(32, 32, 4, 2, rows=16))
    torch.testing.assert_close(got, twins.matmul(x, weight, gated=True), atol=2e-4, rtol=1e-4)
    (x, x_scale), (weight, weight_scale) = (twins.quantise_fp8(each) for each in (x + 1, weight))
    options = {"x_scale": x_scale, "weight_scale": weight_scale, "out_dtype": torch.float32}
    got = gated_matmul(x, weight, Matmul(32, 32, 4, 2, rows=16), **options)
    torch.testing.assert_close(got, twins.matmul(x, weight, gated=True, **options), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("rows", [6, 16])
def test_eight_bit_operands(rows):
    (x, x_scale), (weight, weight_scale) = (twins.quantise_fp8(torch.randn(n, 80)) for n in (rows, 90))
    options = {"x_scale": x_scale, "weight_scale": weight_scale, "out_dtype": torch.float32}
    expected = twins.matmul(x, weight, **options)
    config = Matmul(32, 32, 4, 2, splits=2, rows=16)
    for function, chosen in ((small_matmul, config), (small_matmul, replace(config, rows=0)), (matmul, config)):
        torch.testing.assert_close(function(x, weight, config=chosen, **options), expected, atol=1e-4, rtol=1e-4)


def test_a_row_has_the_same_bits_beside_any_others():
    x, weight, _ = tensors(70, 90, 96)
    config = Matmul(16, 32, 4, 2, rows=16)
    every = matmul(x, weight, config)
    for row in (0, 17, 69):
        assert torch.equal(matmul(x[row : row + 1].contiguous(), weight, config)[0], every[row])


def test_every_shape_has_a_configuration():
    shapes = ((576, 576), (4096, 4096), (4096, 14336), (6144, 4096), (28672, 4096), (128256, 4096))
    for element in (1, 2, 4):
        for rows in (1, 16, 32, 33, 64):
            for outputs, width in shapes:
                left_to_the_library = (element, rows > 32) == (2, True) and outputs < 16384
                assert (configs.small_matmul(element, rows, outputs, width) is None) == left_to_the_library
        assert (configs.small_matmul(element, 65, 4096, 4096) is None) == (element > 1)
        assert configs.small_matmul(element, 129, 4096, 4096) is None is configs.small_matmul(element, 65, 28672, 4096)
        assert configs.INVARIANT_MATMUL[element].rows
    for (_, most), table in configs.SMALL_MATMUL.items():
        assert all(most <= config.rows for *_, config in table if config is not None and config.rows)
    for outputs, width in ((6144, 4096), (4096, 14336), (28672, 4096), (960, 512)):
        for element in (1, 2, 4):
            found = configs.row_matmul(outputs, width, element)
            assert found is not None and width % found.block_k == outputs % found.block_n == 0
    assert configs.row_matmul(576, 576, 2) is None
    for width, normed, rows in ((4096, True, 8), (8192, True, 4), (14336, False, 8), (28672, False, 4)):
        apart, gated = (configs.row_matmul(4096, width, 1, normed, joined) for joined in (False, True))
        assert apart is not None and gated is not None and apart.block_n == 2 * gated.block_n == rows
    assert configs.fp8_matmul(256, 4096) is not None and configs.fp8_matmul(256, 28672) is None
    assert configs.fp8_matmul(192, 4096) is None, "a tile half full costs as much as a full one"
    for element, table in configs.GATED_MATMUL.items():
        bounds = [most for most, _ in table]
        assert bounds == sorted(bounds)
        at_start = {configs.gated_matmul(element, tokens, 28672, 4096) for tokens in MIXED_TOKENS}
        assert {config for _, config in table} <= at_start | {None}, "compiled with the steps that are always captured"
        assert configs.gated_matmul(element, 8192, 28672, 4096) is None
        for odd in ((28680, 4096), (28672, 4100), (3072, 576)):
            assert configs.gated_matmul(element, 256, *odd) is None
    for element in (1, 2, 4):
        for kernel in ("few", "many"):
            assert configs.attention(kernel, element, 256) is not None


def test_eight_bit_layers_add_to_the_residual_where_rows_are_few():
    scheme, cpu = Fp8Scheme(), torch.device("cpu")
    state = scheme.create(96, 64, cpu, torch.bfloat16)
    scheme.put(state, 0, torch.randn(96, 64).bfloat16())
    x, x_scale = twins.quantise_fp8(torch.randn(5, 64))
    product = twins.matmul(x, state["weight"], x_scale=x_scale, weight_scale=state["scale"], out_dtype=torch.float32)
    stream, bias = torch.randn(5, 96).bfloat16(), torch.randn(96).bfloat16()
    expected = stream.float() + product
    assert scheme.multiply(state, x, x_scale, None, stream) is stream
    torch.testing.assert_close(stream.float(), expected, atol=0.1, rtol=1e-2)
    before = stream.clone()
    got = scheme.multiply(state, x, x_scale, bias, stream)  # a bias comes between
    torch.testing.assert_close(got.float(), product + bias.float(), atol=0.1, rtol=1e-2)
    assert torch.equal(stream, before)
