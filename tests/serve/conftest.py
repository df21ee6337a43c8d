"""A live server over the fake frontend; `live_server`, over the real model, is in the suite's own conftest."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fake_frontend import FakeFrontend

from quire.serve.run import background_server


@pytest.fixture(scope="session")
def fake_frontend() -> FakeFrontend:
    return FakeFrontend()


@pytest.fixture(scope="session")
def fake_server(fake_frontend: FakeFrontend) -> Iterator[str]:
    with background_server(lambda: fake_frontend) as url:  # type: ignore[arg-type, return-value]
        yield url
    assert fake_frontend.client.closed.is_set()
