"""Products by a named tile: what torch's own give, or None where the library or the tile is missing."""

import pytest
import torch

from quire.kernels import cublas
from quire.kernels.triton import configs


def test_without_the_library_the_caller_is_told():
    x = torch.zeros(4, 8)
    assert cublas.matmul(x, x, (201,)) is None  # no 16-bit numbers
    if not torch.cuda.is_available():
        assert cublas.matmul(x.bfloat16(), x.bfloat16(), (201,)) is None


def test_only_large_products_have_tiles():
    assert configs.cublas_tiles(8192, 28672) and configs.cublas_tiles(2048, 6144)
    assert configs.cublas_tiles(1024, 28672) == configs.cublas_tiles(8192, 4096) == ()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_named_tile_gives_the_product():
    x, weight = (torch.randn(n, 512, device="cuda").bfloat16() for n in (4096, 6144))
    assert cublas.matmul(x, weight, (10**6,)) is None
    got = cublas.matmul(x, weight, (201, 197, 24, 23))
    torch.testing.assert_close(got, torch.nn.functional.linear(x, weight), atol=1e-2, rtol=1e-2)
