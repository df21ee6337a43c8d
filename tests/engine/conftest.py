"""A model that plain torch runs, for tests of what surrounds a model: the default one takes seconds to load in fp32."""

import pytest
from fuzz_models import fuzz_models


@pytest.fixture(scope="session")
def dense_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return fuzz_models(tmp_path_factory.mktemp("models"))["dense"].path
