"""What comes over one connection: trailers, pipelined requests, bodies without end, and clients that hang up."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fake_frontend import FakeFrontend
from uvicorn import Config
from uvicorn.server import ServerState

from quire.serve.http import bounded_protocol
from quire.serve.http.server import ServerUrl, background_server
from quire.types.serving import ServeOptions

LIMIT = 8 << 10  # of a head, on the servers here
GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
CHUNKED = b"GET /health HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.fixture(scope="module")
def frontend() -> FakeFrontend:
    return FakeFrontend()


@pytest.fixture(scope="module")
def server(frontend: FakeFrontend) -> Iterator[ServerUrl]:
    options = ServeOptions(port=0, grace=1, max_header="8K")
    with background_server(lambda: frontend, options) as url:  # type: ignore[arg-type, return-value]
        yield url


@pytest.fixture(params=["API", "admin"])
def port(server: ServerUrl, request: pytest.FixtureRequest) -> str:
    return server.admin if request.param == "admin" else str(server)


def connect(url: str) -> socket.socket:
    host, _, number = url.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(number)), timeout=20)


def received(peer: socket.socket, until: Callable[[bytes], bool] = lambda _: False) -> bytes:
    """What comes until it is as wanted, or until the connection ends."""
    answer = b""
    try:
        while not until(answer) and (part := peer.recv(65536)):
            answer += part
    except ConnectionError:
        pass
    return answer


def answers(count: int) -> Callable[[bytes], bool]:
    return lambda data: data.count(b'{"status":"ok"}') >= count


def post(content: str, padding: int = 0, **fields: Any) -> bytes:
    body = {"model": FakeFrontend.model_name, "messages": [{"role": "user", "content": content}], **fields}
    data = json.dumps(body).encode() + b" " * padding
    kind = b"host: localhost\r\ncontent-type: application/json"
    return b"POST /v1/chat/completions HTTP/1.1\r\n%b\r\ncontent-length: %d\r\n\r\n%b" % (kind, len(data), data)


@pytest.mark.parametrize("endless", [b"a:b\r\n", b"a", b"\r\n"], ids=["fields", "name", "lines"])
def test_nothing_between_messages_is_without_limit(port: str, endless: bytes) -> None:
    before = GET if endless == b"\r\n" else CHUNKED + b"0\r\n"
    with connect(port) as peer:
        peer.sendall(before)
        answer = received(peer, answers(1))
        sent = 0
        with pytest.raises(ConnectionError):  # closed, long before all of it is taken
            while sent < 64 << 20:
                peer.sendall(endless * (65536 // len(endless)))
                sent += 65536
        assert answer.startswith(b"HTTP/1.1 200") and sent < 16 << 20


def test_trailers_are_not_headers(server: ServerUrl) -> None:
    with connect(server) as peer:
        body = post("hello", max_tokens=1).partition(b"\r\n\r\n")[2]
        chunk = b"%x\r\n%b\r\n0\r\n" % (len(body), body)
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n"
        head += b"content-type: application/json\r\n\r\n"
        peer.sendall(head + chunk + b"host: evil.example\r\nx-request-id: later\r\n\r\n" + GET)
        answer = received(peer, answers(1))
    assert answer.count(b"HTTP/1.1 200") == 2 and b"later" not in answer


def test_a_request_and_half_of_the_next(server: ServerUrl) -> None:
    """Seen: the body counted as part of the head behind it, and the answer to the first was lost to a 431."""
    with connect(server) as peer:
        peer.sendall(post("hello", padding=2 * LIMIT, max_tokens=1) + GET[:20])
        answer = received(peer, lambda data: b'"usage"' in data)
        peer.sendall(GET[20:])
        answer += received(peer, answers(1))
    assert answer.count(b"HTTP/1.1 200") == 2


def test_a_target_without_a_path_is_refused(port: str) -> None:
    with connect(port) as peer:
        peer.sendall(b"GET http://127.0.0.1 HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert received(peer).startswith(b"HTTP/1.1 400 ")


def test_pipelined_requests_are_answered_in_turn(port: str) -> None:
    with connect(port) as peer:
        peer.sendall(GET * 500)
        assert received(peer, answers(500)).count(b"HTTP/1.1 200") == 500


def test_one_request_of_a_connection_is_under_way(server: ServerUrl, frontend: FakeFrontend) -> None:
    with connect(server) as first, connect(server) as second:
        first.sendall(post("hang") * 20)
        assert frontend.hanging.acquire(timeout=20)
        second.sendall(GET)
        received(second, answers(1))
        assert frontend.open == 1
    assert frontend.aborted.acquire(timeout=20)
    assert frontend.open == 0


def test_hanging_up_with_requests_in_line_is_no_error(
    server: ServerUrl, frontend: FakeFrontend, caplog: pytest.LogCaptureFixture
) -> None:
    """Seen: only the last request of a connection heard of its end; the others wrote to a closed transport."""
    with caplog.at_level(logging.ERROR):
        with connect(server) as peer:
            peer.sendall(post("hang", stream=True) + GET)
            assert frontend.hanging.acquire(timeout=20)
        assert frontend.aborted.acquire(timeout=20)
        with connect(server) as peer:
            peer.sendall(GET)
            received(peer, answers(1))
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_a_body_that_does_not_end_has_its_time(port: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_protocol, "HEAD_SECONDS", 0.3)
    with connect(port) as peer:
        peer.sendall(GET[:-2] + b"content-length: 1000000\r\n\r\nxxx")
        assert received(peer).count(b"HTTP/1.1") == 1  # the answer, and then the end
    with connect(port) as peer:
        peer.sendall(GET)
        answer = received(peer, answers(1))
        peer.sendall(b"\r\n")  # the next head has begun
        assert b" 408 " in answer + received(peer)


def test_what_is_no_http_never_follows_the_beginning_of_an_answer(server: ServerUrl) -> None:
    with connect(server) as peer:
        peer.sendall(b"GET /health HTTP/9\r\n\r\n")
        answer = received(peer)
        assert answer.startswith(b"HTTP/1.1 400") and json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
    with connect(server) as peer:
        peer.sendall(CHUNKED)
        answer = received(peer, answers(1))
        peer.sendall(b"no size\r\n")
        assert (answer + received(peer)).count(b"HTTP/1.1") == 1


def test_what_is_no_http_is_logged_like_all_else(server: ServerUrl, caplog: pytest.LogCaptureFixture) -> None:
    with connect(server) as peer:
        peer.sendall(b"hello\r\n\r\n")
        assert b"HTTP/1.1 400" in received(peer)
    assert [record.getMessage() for record in caplog.records] == ["Invalid HTTP request received."]


def test_an_upgrade_is_answered_once(server: ServerUrl, caplog: pytest.LogCaptureFixture) -> None:
    with connect(server) as peer:
        peer.sendall(GET[:-2] + b"connection: upgrade\r\nupgrade: h2c\r\n\r\n" + GET * 10)
        answer = received(peer)
    assert answer.count(b"HTTP/1.1 200") == 1 and b"connection: close" in answer
    assert not caplog.records  # nobody is told to install what would not be used


# ---- one protocol, turn by turn -----------------------------------------------------------------------------


class Transport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.written, self.paused, self.closed = b"", False, False

    def write(self, data: Any) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False


class App:
    """Reads a body to its end; answers when it may."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.requests = 0
        self.size = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.requests += 1
        message = {"more_body": True}
        while message.get("more_body"):
            message = await receive()
            self.size += len(message.get("body", b""))
        await self.may_answer.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})


def connection() -> tuple[Any, App, Transport]:
    app, transport = App(), Transport()
    config = Config(app, lifespan="off", log_level="error")
    protocol = bounded_protocol.bounded_protocol(LIMIT, 10)(config, ServerState(), {})
    protocol.connection_made(transport)
    return protocol, app, transport


@pytest.mark.parametrize("chunk", [b"1\r\nx\r\n", b"\r\n\r\n", b"a:b\r\n"], ids=["tiny", "empty lines", "headers"])
async def test_bytes_of_one_connection_get_so_much_of_a_turn(chunk: bytes) -> None:
    """Seen: eight connections that sent chunks of one byte kept /health waiting for seconds."""
    protocol, _, transport = connection()
    size = 256 << 10
    head = b"GET / HTTP/1.1\r\n" if chunk == b"a:b\r\n" else CHUNKED
    head += b"%x\r\n" % size if chunk == b"\r\n\r\n" else b""
    protocol.data_received(head + chunk * (size // len(chunk)))
    most, turns = protocol._calls, 0
    while protocol._held and not transport.closed:
        assert transport.paused or len(protocol._held) <= LIMIT  # what is read is parsed before more is
        await asyncio.sleep(0)
        most, turns = max(most, protocol._calls), turns + 1
    assert most <= bounded_protocol.TURN + bounded_protocol.HEAD_PIECE // 5
    if chunk != b"a:b\r\n":
        assert turns > 40 and not transport.closed and not transport.paused
    protocol.connection_lost(None)


async def test_what_is_held_is_bounded_however_a_reader_asks() -> None:
    protocol, app, transport = connection()
    protocol.data_received(GET * 1000)
    await asyncio.sleep(0)
    assert app.requests == 1 and not protocol.pipeline
    for _ in range(10):
        protocol.flow.resume_reading()  # as a request's reader does
        assert transport.paused
    app.may_answer.set()
    while app.requests < 1000 or protocol._held:
        await asyncio.sleep(0)
        assert len(protocol.tasks) <= 2
    assert not transport.paused
    protocol.connection_lost(None)


async def test_bodies_of_all_kinds_arrive_whole_in_any_pieces() -> None:
    data = b"ab\r\n\r\n0\r\n\r\ncd"
    messages = CHUNKED + b"%x;x=y\r\n%b\r\n3\r\nefg\r\n0\r\na: b\r\n\r\n" % (len(data), data)
    messages += GET + GET[:-2] + b"content-length: %d\r\n\r\n%b" % (len(data), data) + b"\r\n" + GET
    for size in (1, 2, 3, 5, 7, 64, len(messages)):
        protocol, app, transport = connection()
        app.may_answer.set()
        for start in range(0, len(messages), size):
            protocol.data_received(messages[start : start + size])
        while app.requests < 4 or not protocol.cycle.response_complete:
            await asyncio.sleep(0)
        assert (app.size, transport.written.count(b"200 OK")) == (2 * len(data) + 3, 4)
        protocol.connection_lost(None)
