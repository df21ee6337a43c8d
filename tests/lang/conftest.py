"""One engine in this process for all tests of the language."""

import pytest

from quire.lang import Model


@pytest.fixture(scope="session")
def model(default_model):
    with Model("smollm2-135m", kv_memory="256M") as found:
        yield found


@pytest.fixture(scope="session")
def remote(live_server):
    """The same model behind HTTP."""
    with Model(str(live_server)) as found:
        yield found


@pytest.fixture(params=["in process", "over HTTP"])
def either(request):
    return request.getfixturevalue("model" if request.param == "in process" else "remote")
