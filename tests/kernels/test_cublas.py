"""Products by a named kernel: what torch's own give, or None where the library, the chip or the kernel is another."""

import pytest
import torch

from quire.kernels import cublas
from quire.runtime.captured import row_buckets


def shapes():
    return [(torch.bfloat16 if element == 2 else torch.float8_e4m3fn, *rest) for element, *rest in cublas._table()]


def test_without_the_library_the_caller_is_told(monkeypatch):
    x = torch.zeros(4, 8)
    monkeypatch.setattr(cublas, "_table", lambda: {(2, 4, 8, 4): cublas.Algorithm(20, 3, 1)})
    assert cublas.matmul(x, x) is None  # not 16 bits
    if not torch.cuda.is_available():
        assert cublas.matmul(x.bfloat16(), x.bfloat16()) is None


def test_what_the_table_names_is_what_steps_have():
    sizes = {*row_buckets(1024), 2048, 8192}
    assert {rows for *_, rows in shapes()} <= sizes
    assert (torch.bfloat16, 4096, 14336) in {shape[:3] for shape in shapes()}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_named_kernels_give_the_product():
    torch.manual_seed(0)
    for dtype, outputs, width, rows in shapes():
        x, weight = (torch.randn(n, width, device="cuda").bfloat16() for n in (rows, outputs))
        scales = None
        if dtype != torch.bfloat16:
            x, weight = x.to(dtype), weight.to(dtype)
            scales = torch.rand(rows, device="cuda") + 0.5, torch.rand(outputs, device="cuda") + 0.5
        expected = x.float() @ weight.float().T
        if scales is not None:
            expected *= scales[0][:, None] * scales[1]
        stream = torch.randn(rows, outputs, device="cuda").bfloat16()
        before = stream.clone().float()
        for residual, wanted in ((None, expected), (stream, expected + before)):
            got = cublas.matmul(x, weight, residual=residual, scales=scales)
            if got is None:
                assert torch.cuda.get_device_capability() != (9, 0), (dtype, outputs, width, rows)
                continue
            assert (got.float() - wanted).norm() < 0.005 * wanted.norm(), (dtype, outputs, width, rows)
