"""Starting and stopping: ports, the printed curl, signals."""

from __future__ import annotations

import http.client
import json
import os
import shlex
import signal
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from fake_frontend import FakeFrontend

from quire.serve.http.server import background_server, listen, run_server, url_of
from quire.types.errors import ConfigError
from quire.types.serving import ServeOptions

SCRIPT = """
from fake_frontend import FakeFrontend
from quire.serve.http.server import run_server
from quire.types.serving import ServeOptions

async def build():
    return FakeFrontend()

run_server(build, ServeOptions(port=0, grace=1))
print("left in good order", flush=True)
"""


@pytest.fixture
def process(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    command = [sys.executable, "-c", getattr(request, "param", SCRIPT)]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdout=pipe, stderr=pipe, text=True, env={**os.environ, "PYTHONPATH": path}
    ) as child:
        yield child
        child.kill()


def printed_curl(process: subprocess.Popen[str]) -> list[str]:
    assert process.stdout is not None
    return next(shlex.split(line) for line in process.stdout if line.strip().startswith("curl"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_printed_curl_works_and_signals_end_it(process: subprocess.Popen[str], number: signal.Signals) -> None:
    _, url, _, header, _, body = printed_curl(process)
    name, value = header.split(": ")
    answer = httpx.post(url, headers={name: value}, content=body).json()
    assert answer["choices"][0]["message"]["content"]
    process.send_signal(number)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out.strip(), err) == (0, "left in good order", "")


def test_streams_have_the_grace_period(process: subprocess.Popen[str]) -> None:
    url = printed_curl(process)[1]
    body = {"model": FakeFrontend.model_name, "messages": [{"role": "user", "content": "hang"}], "stream": True}
    with httpx.stream("POST", url, json={**body, "logprobs": True}, timeout=20) as response:
        events = response.iter_lines()
        assert json.loads(next(events).removeprefix("data: "))["choices"]
        process.send_signal(signal.SIGTERM)
        rest = [line for line in events if line]  # it never ends by itself, so it is ended, and says so
    assert "shutting down" in json.loads(rest[-2].removeprefix("data: "))["error"]["message"]
    assert rest[-1] == "data: [DONE]"
    out, _ = process.communicate(timeout=20)
    assert (process.returncode, out.strip()) == (0, "left in good order")


LOADING = """
import asyncio
from fake_models import Fakes
from quire.serve.http.server import run_server
from quire.types.logs import configure
from quire.types.serving import ServeOptions

class Slow(Fakes):
    async def open_model(self, model, earlier):
        if model.name == "b":
            print("loading b", flush=True)
            await asyncio.Event().wait()
        return await super().open_model(model, earlier)

configure()
run_server(Slow().start, ServeOptions(port=0, grace=30))
print("left in good order", flush=True)
"""


@pytest.mark.parametrize("process", [LOADING], indirect=True)
def test_a_second_signal_during_a_load_ends_it_at_once(process: subprocess.Popen[str], default_model: object) -> None:
    url = urlsplit(printed_curl(process)[1])
    waiting = http.client.HTTPConnection(url.netloc)
    waiting.request("POST", "/v1/completions", '{"model": "b", "prompt": "x"}', {"content-type": "application/json"})
    assert process.stdout is not None and process.stderr is not None
    assert "loading b\n" in process.stdout
    process.send_signal(signal.SIGTERM)
    assert any("shutting down; requests that are finishing: 1" in line for line in process.stderr)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out.strip().splitlines()[-1]) == (0, "left in good order")
    assert "Traceback" not in err and "a second time; requests that are cut off: 1" in err
    assert err.splitlines()[-1].endswith("INFO shut down")


def test_taken_port_is_known_before_anything_is_built() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port}: .*in use.*--port"):
            run_server(lambda: pytest.fail("built an engine for nothing"), ServeOptions(port=port))


def test_a_grammar_is_tried_before_anyone_sends_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the first one needs (a process that tries grammars) is there by then."""
    tried = threading.Event()
    monkeypatch.setattr(FakeFrontend, "check_grammar", lambda self, grammar: tried.set())
    with background_server(FakeFrontend):  # type: ignore[arg-type]
        assert tried.wait(30)


def test_a_folder_that_cannot_be_is_known_before_anything_is_built(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"files: .*file is no folder"):
        run_server(
            lambda: pytest.fail("built an engine for nothing"), ServeOptions(port=0, files=str(tmp_path / "file"))
        )


@pytest.mark.parametrize(("host", "port"), [("no.such.host.invalid", 8000), ("127.0.0.1", 70000), ("192.0.2.1", 0)])
def test_impossible_addresses(host: str, port: int) -> None:
    with pytest.raises(ConfigError, match="cannot listen"):
        listen(host, port)


def test_urls_a_client_can_use() -> None:
    with listen("0.0.0.0", 0) as listener:
        assert url_of(listener).startswith("http://127.0.0.1:")


def test_factory_errors_reach_the_caller() -> None:
    def broken() -> FakeFrontend:
        raise ConfigError("no engine today")

    with pytest.raises(ConfigError, match="no engine today"), background_server(broken):  # type: ignore[arg-type]
        pass


def test_https(certificate: tuple[Path, Path], tmp_path: Path) -> None:
    """Both ports, streams too; a pair that cannot be used is known before a model is loaded."""
    cert, key = certificate
    options = ServeOptions(port=0, grace=1, ssl_certfile=str(cert), ssl_keyfile=str(key))
    body = {"model": FakeFrontend.model_name, "prompt": "hi", "max_tokens": 8, "stream": True}
    with background_server(FakeFrontend, options) as url:  # type: ignore[arg-type]
        assert url.startswith("https://") and url.admin.startswith("https://")
        with httpx.Client(verify=ssl.create_default_context(cafile=str(cert))) as client:
            assert client.get(f"{url}/health").status_code == client.get(f"{url.admin}/health").status_code == 200
            assert client.post(f"{url}/v1/completions", json=body).text.endswith("data: [DONE]\n\n")
        with pytest.raises(httpx.TransportError):
            httpx.get(url.replace("https", "http") + "/health")
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE"):
            httpx.get(f"{url}/health")
    locked = tmp_path / "locked.pem"
    lock = ["openssl", "rsa", "-aes128", "-passout", "pass:secret", "-in", str(key), "-out", str(locked)]
    subprocess.run(lock, check=True, capture_output=True)
    for other in (cert, locked, tmp_path / "none"):
        wrong = ServeOptions(port=0, ssl_certfile=str(cert), ssl_keyfile=str(other))
        with pytest.raises(ConfigError, match="cannot use the certificate"), background_server(FakeFrontend, wrong):  # type: ignore[arg-type]
            pass
    with pytest.raises(ConfigError, match="ssl_certfile and ssl_keyfile need each other"):
        ServeOptions(ssl_keyfile=str(key))
