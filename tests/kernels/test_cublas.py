"""Products by a named kernel: what torch's own give, or None where the library, the chip or the kernel is another."""

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from ctypes import c_void_p
from functools import partial

import pytest
import torch

from quire.kernels import product_choices
from quire.kernels.library import cublas

KERNEL = cublas.Algorithm(20, 3, 1)


def test_without_the_library_the_caller_is_told():
    x = torch.zeros(4, 8)
    assert cublas.matmul(x, x, KERNEL) is None  # not 16 bits
    assert cublas.matmul(x.bfloat16(), x.bfloat16(), KERNEL) is None  # not on a GPU
    assert cublas.offers(x, x) == [] == cublas.offers(x.bfloat16(), x.bfloat16())
    assert cublas.version(torch.device("cpu")) == 0


class FakeLibrary:
    """Offers two kernels, knows three, and multiplies by none: what it is asked for is kept."""

    offered = ((20, 3, 1), (201, 5, 2))
    known = (*offered, (31, 2, 4))

    def __init__(self):
        self.ran, self.scaled, self.described = [], [], {}

    def __getattr__(self, name):
        return lambda *arguments: 0  # whatever else: done

    @staticmethod
    def attributes(candidate):
        return tuple(candidate._obj.algorithm[i] for i in range(3))

    def cublasLtMatmulDescSetAttribute(self, description, attribute, value, size):
        self.described[attribute] = value._obj.value
        time.sleep(0)  # as a real one lets other threads run
        return 0

    def cublasLtMatmulAlgoGetHeuristic(self, *arguments):
        *_, most, found, count = arguments
        assert most >= len(self.offered)
        for candidate, attributes in zip(found, self.offered, strict=False):
            for i, value in enumerate(attributes):
                candidate.algorithm[i] = value
        count._obj.value = len(self.offered)
        return 0

    places = {cublas.TILE: 0, cublas.CLUSTER: 1, cublas.CUSTOM: 2}

    def cublasLtMatmulAlgoConfigGetAttribute(self, candidate, attribute, value, size, written):
        value._obj.value = candidate._obj.algorithm[self.places[attribute]]
        return 0

    def cublasLtMatmulAlgoConfigSetAttribute(self, candidate, attribute, value, size):
        candidate._obj.algorithm[self.places[attribute]] = value._obj.value
        return 0

    def cublasLtMatmulAlgoCheck(self, *arguments):
        *_, made, checked = arguments
        checked._obj.workspace = 4
        return 0 if self.attributes(made) in self.known else 7

    def cublasLtMatmul(self, *arguments):
        beta, made, size = arguments[7]._obj.value, arguments[12], arguments[14].value
        self.ran.append((self.attributes(made), beta, size))
        self.scaled.append((arguments[5].value, self.described.get(cublas.B_SCALE)))
        return 0


@pytest.fixture
def library(monkeypatch):
    fake = FakeLibrary()
    monkeypatch.setattr(cublas, "_open", lambda device: (fake, c_void_p()))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: type("Stream", (), {"cuda_stream": 0}))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    cublas._product.cache_clear()
    yield fake
    cublas._product.cache_clear()


def test_threads_do_not_launch_with_the_scales_of_another(library):
    weight, inputs = torch.zeros(16, 8).to(torch.float8_e4m3fn), torch.zeros(2, 4, 8).to(torch.float8_e4m3fn)
    scales = torch.ones(2, 4)

    def run(thread: int, times: int = 200) -> None:
        for _ in range(times):
            cublas.matmul(inputs[thread], weight, cublas.Algorithm(31, 2, 4), scales=(scales[thread], torch.ones(16)))

    run(0, 1)  # one product for both: the library here has one description
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(run, range(2)))
    own = {(inputs[thread].data_ptr(), scales[thread].data_ptr()) for thread in range(2)}
    assert len(library.scaled) == 401 and set(library.scaled) == own


@pytest.mark.parametrize("eight", [False, True])
def test_what_is_asked_of_the_library(eight, library):
    dtype = torch.float8_e4m3fn if eight else torch.bfloat16
    wanted = {1: (31, 2, 4), 2: (201,), 3: (404, 5, 5), 4: (197,)}  # known, offered, not known, not offered
    weight, found = torch.zeros(16, 8).to(dtype), {}
    for rows, key in wanted.items():
        multiply = partial(cublas.matmul, algorithm=cublas.Algorithm(*key))
        x, stream = torch.zeros(rows, 8).to(dtype), torch.zeros(rows, 16, dtype=torch.bfloat16)
        scales = (torch.ones(rows), torch.ones(16)) if eight else None
        assert multiply(x, weight, scales=None if eight else (x, x)) is None
        assert multiply(x, weight, residual=stream.float(), scales=scales) is None
        found[rows] = multiply(x, weight, scales=scales)
        if eight and found[rows] is not None:
            given = library.described[cublas.B_SCALE], library.described[cublas.A_SCALE]
            assert given == tuple(scale.data_ptr() for scale in scales), "x is B there, the weight is A"
        added = multiply(x, weight, residual=stream, scales=scales)
        assert added is (None if found[rows] is None else stream)
    assert [rows for rows, out in found.items() if out is not None] == [1, 2]
    assert found[1].shape == (1, 16) and found[1].dtype == torch.bfloat16
    assert cublas.offers(x, weight) == [cublas.Algorithm(*each) for each in library.offered]
    assert library.ran == [((31, 2, 4), 0, 4), ((31, 2, 4), 1, 4), ((201, 5, 2), 0, 0), ((201, 5, 2), 1, 0)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_named_kernels_give_the_product():
    torch.manual_seed(0)
    for (element, outputs, width, rows, _), choice in product_choices._shipped().items():
        dtype = torch.bfloat16 if element == 2 else torch.float8_e4m3fn
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
            got = cublas.matmul(x, weight, choice, residual=residual, scales=scales)
            if got is None:
                assert not product_choices.choices(x.device)._known, (dtype, outputs, width, rows)
                continue
            assert (got.float() - wanted).norm() < 0.005 * wanted.norm(), (dtype, outputs, width, rows)
