"""The gate in front of grpc: which frames pass, and what becomes of connections that go beyond their bounds."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from fake_frontend import FakeFrontend

from quire.serve.grpc import frame_gate, service
from quire.serve.grpc.frame_gate import ACKNOWLEDGED, FRAME, HELLO, ClientFrames, RefusedError
from quire.serve.grpc.proto import load_messages
from quire.serve.http.server import ServerUrl, background_server, listen
from quire.types.errors import ConfigError
from quire.types.serving import ServeOptions

HEADERS, DATA, SETTINGS, PING, GOAWAY, CONTINUATION = 1, 0, 4, 6, 7, 9


def frame(kind: int, flags: int = 0, payload: bytes = b"") -> bytes:
    return FRAME.pack(len(payload) >> 8, len(payload) & 255, kind, flags, 1) + payload


def passed(pieces: list[bytes], max_header: int = 1000) -> bytes:
    frames, found = ClientFrames(max_header), b""
    for piece in pieces:
        frames.feed(piece)
        found += frames.take()
        while frames.more:
            found += frames.take()
    return found


SETTINGS_FRAME = frame(SETTINGS, 0, bytes(range(12)))
OWN_ACK = FRAME.pack(0, 0, SETTINGS, 1, 0)


def test_settings_are_acknowledged_once_however_the_bytes_arrive() -> None:
    calls = [frame(HEADERS, 4, b"h" * 300) + frame(DATA, 1, b"d" * 70_000) + frame(PING, 0, b"12345678")] * 40
    sent = b"".join([HELLO, SETTINGS_FRAME, calls[0], OWN_ACK, *calls, OWN_ACK])
    expected = b"".join([HELLO, SETTINGS_FRAME, ACKNOWLEDGED, calls[0], *calls, OWN_ACK])
    assert passed([sent]) == expected
    rng = random.Random(0)
    for longest in (3, 50, 9000):
        at, pieces = 0, []
        while at < len(sent):
            size = rng.randint(1, longest) if at < 4000 else rng.randint(1, 30_000)
            pieces.append(sent[at : at + size])
            at += size
        assert passed(pieces) == expected


def test_headers_are_counted_over_their_frames() -> None:
    begin = HELLO + SETTINGS_FRAME
    within = frame(HEADERS, 0, b"x" * 400) + frame(CONTINUATION, 4, b"x" * 500)
    assert passed([begin + within * 9]).endswith(within)
    for beyond in (
        frame(HEADERS, 0, b"x" * 400) + frame(CONTINUATION, 0, b"x" * 400) + frame(CONTINUATION, 4, b"x" * 400),
        frame(HEADERS, 4, b"x" * 1000),
        frame(HEADERS, 0) + frame(CONTINUATION) * 200,  # which are empty
    ):
        with pytest.raises(RefusedError, match="larger than 1000 bytes"):
            passed([begin + within + beyond])


def test_what_is_no_http_2() -> None:
    for wrong in (b"GET / HTTP/1.1\r\n\r\n", HELLO + frame(HEADERS, 4, b"x"), HELLO + OWN_ACK):
        with pytest.raises(RefusedError):
            passed([wrong])
        with pytest.raises(RefusedError):
            passed([wrong[at : at + 1] for at in range(len(wrong))])


@pytest.fixture(scope="module")
def server() -> Iterator[ServerUrl]:
    options = ServeOptions(port=0, grace=1, grpc_port=0, max_connections=2)
    with background_server(FakeFrontend, options) as url:  # type: ignore[arg-type]
        yield url


def connect(url: ServerUrl) -> socket.socket:
    return socket.create_connection(("127.0.0.1", url.grpc_port or 0), timeout=60)


def said_at_the_end(peer: socket.socket) -> bytes:
    """The reason that a connection was closed with."""
    found = b""
    while data := peer.recv(65536):
        found += data
    at, why = 0, b""
    while at < len(found):
        high, low, kind, _, _ = FRAME.unpack_from(found, at)
        at += FRAME.size + (high << 8 | low)
        if kind == GOAWAY:
            why = found[at - (high << 8 | low) + 8 : at]
    return why


def test_connections_are_counted(server: ServerUrl) -> None:
    with connect(server) as first, connect(server) as second:
        for peer in (first, second):
            assert FRAME.unpack(peer.recv(FRAME.size))[2] == SETTINGS
        with connect(server) as third:
            assert said_at_the_end(third) == b"too many connections"


def test_endless_headers(server: ServerUrl) -> None:
    with connect(server) as peer:
        peer.sendall(HELLO + frame(SETTINGS) + frame(HEADERS) + frame(CONTINUATION, 0, b"x" * 16_000) * 5)
        assert b"larger than 65536 bytes" in said_at_the_end(peer)


@pytest.mark.parametrize(
    ("where", "name", "said", "why"),
    [
        (frame_gate, "HELLO_SECONDS", b"", b"took too long"),
        (service, "IDLE", HELLO + frame(SETTINGS), b""),  # it is closed, with a word or without
    ],
)
def test_connections_are_timed(monkeypatch: pytest.MonkeyPatch, where: Any, name: str, said: bytes, why: bytes) -> None:
    monkeypatch.setattr(where, name, 1.0)
    options = ServeOptions(port=0, grace=1, grpc_port=0)
    with background_server(FakeFrontend, options) as url, connect(url) as peer:  # type: ignore[arg-type]
        peer.sendall(said)
        assert why in said_at_the_end(peer)


def test_large_messages_pass(server: ServerUrl) -> None:
    """Larger than any buffer on the way, to a method that sends as much back."""
    messages = load_messages()
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        embed: Any = channel.unary_unary(
            "/quire.v1.Quire/Embed",
            request_serializer=messages["EmbedRequest"].SerializeToString,
            response_deserializer=messages["EmbedResponse"].FromString,
        )
        found = embed(messages["EmbedRequest"](inputs=["word " * 80] * 1000), timeout=60)
        assert len(found.embeddings) == 1000


def test_a_taken_port_is_known_before_a_model_is_loaded() -> None:
    def build() -> Any:
        raise AssertionError("the model was loaded")

    with listen("127.0.0.1", 0) as taken:
        options = ServeOptions(port=0, grpc_port=taken.getsockname()[1])
        with pytest.raises(ConfigError, match="--grpc-port"), background_server(build, options):
            pass
