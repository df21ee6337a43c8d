"""A live server over the fake frontend; `live_server`, over the real model, is in the suite's own conftest."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_frontend import FakeFrontend

from quire.serve.http.server import background_server


@pytest.fixture(scope="session")
def fake_frontend() -> FakeFrontend:
    return FakeFrontend()


@pytest.fixture(scope="session")
def fake_server(fake_frontend: FakeFrontend) -> Iterator[str]:
    with background_server(lambda: fake_frontend) as url:  # type: ignore[arg-type, return-value]
        yield url
    assert fake_frontend.client.closed.is_set()


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """One that a server on this machine may show, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make a certificate with")
    folder = tmp_path_factory.mktemp("certificate")
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    names = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run([*command, *names, "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True)
    return cert, key


@pytest.fixture
def says(fake_frontend: FakeFrontend) -> Iterator[Callable[..., None]]:
    """What the fake is to say in this test, and whether its model counts as one that thinks."""

    def say(text: str | list[str], reasons: bool = False) -> None:
        fake_frontend.says, fake_frontend.text.reasons = text, reasons

    yield say
    fake_frontend.says, fake_frontend.text.reasons = None, False


@pytest.fixture(scope="module")
def browser():
    from browser_pages import launched

    with launched() as found:
        yield found


@pytest.fixture
def open_page(browser):
    """Opens pages that must not complain."""
    from browser_pages import watched

    with watched(browser) as opened:
        yield opened
