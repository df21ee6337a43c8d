"""Products with 4-bit weights against plain torch."""

import pytest
import torch

from quire.kernels.reference.int4_words import packed, unpacked
from quire.kernels.triton.int4_matmul import Int4Tile, choose_tile, int4_matmul, unpack
from quire.model.blocks.linear import Linear
from quire.model.quantization.int4 import Int4Scheme


def quantised(outputs, width, group, whole):
    generator = torch.Generator().manual_seed(outputs + group)
    scale = (torch.rand(width // group, outputs, generator=generator) * 0.1).half()
    zero = torch.rand(width // group, outputs, generator=generator) * 15
    zero = zero.round().to(torch.uint8) if whole else zero.half()
    return packed(torch.randint(0, 16, (outputs, width), generator=generator)), scale, zero


TILES = [Int4Tile(16, 16, 4, 2), Int4Tile(16, 32, 4, 2, splits=3, late=False)]
SHAPES = [(256, 128, True), (512, 256, False), (384, 32, False), (256, 64, True)]


@pytest.mark.parametrize(
    ("width", "group", "whole", "tile"),
    [
        pytest.param(*shape, tile, marks=[pytest.mark.slow] * ((i + j) % 2))  # each shape and tile is among the quick
        for i, shape in enumerate(SHAPES)
        for j, tile in enumerate(TILES)
    ],
)
def test_products(width, group, whole, tile):
    parts = quantised(80, width, group, whole)
    x, residual = torch.randn(19, width), torch.randn(19, 80)
    wanted = x @ unpacked(*parts).t()
    torch.testing.assert_close(int4_matmul(x, *parts, tile=tile), wanted, atol=1e-3, rtol=1e-4)
    got = int4_matmul(x, *parts, tile=tile, residual=residual)
    torch.testing.assert_close(got, wanted + residual, atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(unpack(*parts, torch.float32), unpacked(*parts))


def test_every_choice_covers_the_reduction():
    for rows in (1, 17, 40, 65, 256):
        for outputs, chunks in ((64, 1), (4096, 32), (28672, 32), (4096, 112)):
            tile = choose_tile(rows, outputs, chunks)
            if tile is None:
                assert rows > 128
                continue
            assert 1 <= tile.splits <= min(8, chunks) and tile.rows >= min(rows, 128)


def test_the_scheme_adds_to_the_residual_and_takes_the_gate():
    torch.manual_seed(5)
    linear = Linear(128, (64,), bias=False, scheme=Int4Scheme(), device=torch.device("cpu"), dtype=torch.float16)
    linear.scheme.put(linear.state, 0, torch.randn(64, 128))
    linear.scheme.finish(linear.state)
    x, residual = torch.randn(3, 256, dtype=torch.float16), torch.randn(3, 64, dtype=torch.float16)
    gate, up = x.float().chunk(2, dim=1)
    wanted = residual.float() + torch.nn.functional.silu(gate) * up @ unpacked(*linear.state.values()).t()
    assert linear.scheme.product(linear, x, residual) is None
    torch.testing.assert_close(residual.float(), wanted, atol=0.05, rtol=0.01)
