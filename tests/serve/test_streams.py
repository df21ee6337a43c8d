"""Streams from an engine's events to the socket: what goes past the reader, readers that lag, readers that leave."""

from __future__ import annotations

import asyncio
import contextlib
import json
import queue
import socket
import time
from collections.abc import Iterator
from types import SimpleNamespace
from unittest.mock import Mock
from urllib.parse import urlsplit

import httpx
import pytest

from quire.engine.client import AsyncClient
from quire.engine.frontend import Frontend
from quire.serve.core.api_keys import INFERENCE, Key, KeyRing, digest
from quire.serve.http.bounded_protocol import Body, Outbox
from quire.serve.http.server import background_server
from quire.text import TextModel
from quire.types.counts import Counts
from quire.types.events import TokenEvent
from quire.types.messages import Abort, EngineInfo, Events, FinishAt, Submit, ToClient, ToEngine
from quire.types.request import FinishReason, Request
from quire.types.serving import ServeOptions

TEXT = 'A "page" — 你好, naïve 🙂\n\tand so on. '
SECRET = "sk-quire-0123456789abcdef"


class TokenLink:
    """An engine that says TEXT over and over, a token a step, as fast as it is asked."""

    def __init__(self, text: TextModel):
        self.info = EngineInfo(
            model="m", max_model_len=1 << 20, vocab_size=text.tokenizer.vocab_size, pages=1 << 20, page_size=16,
            max_batch_tokens=512, depth=1, device="none", dtype="none", reasons=[], slots=8,
        )  # fmt: skip
        self.heard = time.monotonic()
        self.sent: list[ToEngine] = []
        self.running: dict[str, tuple[Request, int]] = {}
        self.ids = text.tokenizer.encode(TEXT, add_special=False)
        self.burst = 1  # tokens a step
        self._woken: queue.SimpleQueue[None] = queue.SimpleQueue()

    def send(self, *messages: ToEngine) -> None:
        self.sent += messages
        for message in messages:
            if isinstance(message, Submit):
                self.running[message.request.id] = message.request, 0
            elif isinstance(message, Abort | FinishAt):
                self.running.pop(message.request, None)

    def receive(self, timeout: float | None) -> list[ToClient]:
        self.heard = time.monotonic()
        if not self.running:
            with contextlib.suppress(queue.Empty):
                self._woken.get(timeout=0.1)
            return []
        time.sleep(0.0002)
        events = []
        counts = Counts(cached=1, drafted=2, accepted=1)
        for id, (request, begin) in list(self.running.items()):
            end = min(begin + self.burst, request.params.max_tokens or 0)
            for index in range(begin, end):
                finish = FinishReason.LENGTH if index + 1 == request.params.max_tokens else None
                token = [self.ids[index % len(self.ids)]]
                events += [TokenEvent(id, b, index, token, finish, counts) for b in range(request.params.n)]
            self.running[id] = request, end
            if end == request.params.max_tokens:
                del self.running[id]
        return [Events(events)]

    def wake(self) -> None:
        self._woken.put(None)

    def close(self, *, force: bool = False) -> None:
        pass


@pytest.fixture(scope="module")
def link(default_model) -> TokenLink:
    return TokenLink(TextModel.load(default_model))


@pytest.fixture(scope="module")
def server(link: TokenLink, default_model) -> Iterator[str]:
    async def frontend() -> Frontend:
        return Frontend(AsyncClient(link), TextModel.load(default_model), "m")

    keys = KeyRing([Key("alice", digest(SECRET), frozenset({INFERENCE}))])
    with background_server(frontend, ServeOptions(port=0, grace=1), keys=keys) as url:
        yield url


def body_of(path: str, tokens: int, **more: object) -> dict[str, object]:
    asked = {"prompt": "Hello"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "Hello"}]}
    return {"model": "m", "max_tokens": tokens, "stream": True, "temperature": 0, **asked, **more}


def chunks_of(data: bytes) -> list[dict]:
    lines = [line.removeprefix(b"data: ") for line in data.split(b"\n\n") if line.startswith(b"data: ")]
    assert lines.pop() == b"[DONE]"
    return [json.loads(line) for line in lines]


def text_of(chunks: list[dict], choice: int = 0) -> str:
    found = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice]
    return "".join(c["text"] if "text" in c else c["delta"].get("content") or "" for c in found)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("n", [1, 3])
def test_every_token_arrives_in_order_and_is_counted(server: str, default_model, link, path: str, n: int) -> None:
    tokens = 400
    body = body_of(path, tokens, n=n, stream_options={"include_usage": True})
    answer = httpx.post(server + path, json=body, headers={"authorization": f"Bearer {SECRET}"}, timeout=60)
    chunks = chunks_of(answer.content)
    tokenizer = TextModel.load(default_model).tokenizer
    whole = tokenizer.decode((link.ids * tokens)[:tokens])
    assert [text_of(chunks, choice) for choice in range(n)] == [whole] * n
    usage = chunks[-1]["usage"]
    assert usage["completion_tokens"] == n * tokens
    assert usage["completion_tokens_details"]["accepted_prediction_tokens"] == n * tokens
    assert usage["prompt_tokens_details"]["cached_tokens"] == 1, "a prompt's, once for all its choices"
    last = {c["index"]: c["finish_reason"] for chunk in chunks for c in chunk["choices"]}
    assert last == dict.fromkeys(range(n), "length")
    if path == "/v1/chat/completions":
        first = [c for chunk in chunks for c in chunk["choices"] if c["index"] == 0]
        assert ["role" in c["delta"] for c in first[:3]] == [True, False, False]


def test_requests_name_their_tenant(server: str, link: TokenLink) -> None:
    body = body_of("/v1/completions", 1)
    httpx.post(server + "/v1/completions", json=body, headers={"authorization": f"Bearer {SECRET}"}).raise_for_status()
    assert [m.request.tenant for m in link.sent if isinstance(m, Submit)][-1] == "alice"


def connect(server: str, path: str, tokens: int) -> socket.socket:
    where, data = urlsplit(server), json.dumps(body_of(path, tokens)).encode()
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    connection.settimeout(60)
    connection.connect((where.hostname, where.port))
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {SECRET}\r\nConnection: close\r\n"
    connection.sendall(f"{head}Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
    return connection


def unchunked(data: bytes) -> bytes:
    pieces, at = [], 0
    while at < len(data):
        end = data.index(b"\r\n", at)
        size = int(data[at:end], 16)
        pieces.append(data[end + 2 : end + 2 + size])
        at = end + 4 + size
    return b"".join(pieces)


async def test_what_is_written_in_one_turn_of_the_loop_is_sent_in_bounded_pieces() -> None:
    """And not copied again with each chunk: eight megabytes took ten seconds."""
    sent: list[bytes] = []
    transport = SimpleNamespace(write=sent.append, is_closing=lambda: False)
    cycle = Mock(transport=transport, disconnected=False)
    body = Body(cycle, Outbox())
    chunk = b"x" * 1000
    for _ in range(100):
        body.write(chunk)
    assert sum(map(len, sent)) > 64_000 and max(map(len, sent)) < 70_000
    await asyncio.sleep(0)
    assert unchunked(b"".join(sent)) == chunk * 100


def test_a_reader_that_lags_gets_all_of_it_in_fewer_chunks(server: str, link: TokenLink, default_model) -> None:
    tokens = 40_000  # 9 MB of events, more than sockets hold
    link.burst = 100
    with connect(server, "/v1/completions", tokens) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)  # which else grows with what comes
        connection.recv(1, socket.MSG_PEEK)
        until = time.monotonic() + 60
        while link.running:
            assert time.monotonic() < until, "the engine waited for the reader"
            time.sleep(0.05)
        link.burst = 1
        httpx.get(server + "/health", timeout=60).raise_for_status()  # behind all that the engine has said
        data = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    head, _, rest = data.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    chunks = chunks_of(unchunked(rest))
    assert text_of(chunks) == TextModel.load(default_model).tokenizer.decode((link.ids * tokens)[:tokens])
    assert len(chunks) < 0.9 * tokens, "what waited together was sent together"


def test_a_reader_that_leaves_aborts(server: str, link: TokenLink) -> None:
    with connect(server, "/v1/chat/completions", 1 << 18) as connection:
        assert connection.recv(1 << 12).startswith(b"HTTP/1.1 200")
    request = next(m.request.id for m in reversed(link.sent) if isinstance(m, Submit))
    until = time.monotonic() + 20
    while not any(isinstance(m, Abort) and m.request == request for m in link.sent):
        assert time.monotonic() < until, "nobody told the engine"
        time.sleep(0.01)
    assert request not in link.running


def test_stop_strings_end_a_stream(server: str, link: TokenLink) -> None:
    body = body_of("/v1/completions", 1000, stop=["and so"])
    answer = httpx.post(server + "/v1/completions", json=body, headers={"authorization": f"Bearer {SECRET}"})
    chunks = chunks_of(answer.content)
    assert text_of(chunks) == TEXT[: TEXT.index("and so")]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
