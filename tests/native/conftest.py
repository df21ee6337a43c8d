"""`--native-library PATH` runs these tests on another build of the kernels (a sanitized one)."""

import pytest

from quire.kernels.cpu import shared_object as library


def pytest_addoption(parser):
    parser.addoption("--native-library", help="shared object to test instead of the installed one")


def pytest_configure(config):
    path = config.getoption("--native-library", default=None)
    if path:
        opened = library.open_library(path)
        library.load = lambda: opened


@pytest.fixture(scope="session", params=["amx", "avx512", "avx512bw", "avx2", "i8mm", "neon", "base"])
def isa(request):
    """Each kernel set, where the host has it."""
    if reason := library.available():
        pytest.skip(reason)
    if request.param not in library.features():
        pytest.skip(f"this host has no {request.param}")
    return request.param
