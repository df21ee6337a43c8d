"""What an API worker passes on to the main process, and what it answers itself: both over the fake frontend."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_frontend import FakeFrontend

from quire.serve.core.api_keys import INFERENCE, Key, KeyRing, digest
from quire.serve.core.server_state import Serving
from quire.serve.http.app import PUBLIC, WORKER_PATHS, create_app, create_serving, create_worker_app
from quire.serve.http.bounded_server import Server
from quire.types.serving import ServeOptions

CHAT = {"model": FakeFrontend.model_name, "messages": [{"role": "user", "content": "hello"}]}
SECRET = "sk-quire-0123456789abcdef"


class Two:
    """The main process and a worker, with a client of the worker."""

    main: Serving
    worker: Serving
    http: httpx.AsyncClient


@pytest.fixture
async def two(tmp_path: Path) -> AsyncIterator[Two]:
    found, keys = Two(), KeyRing([Key("alice", digest(SECRET), frozenset({INFERENCE}))])
    options = ServeOptions(files=str(tmp_path / "files"), max_body="64K")
    frontend: Any = FakeFrontend()
    found.main = create_serving(frontend, options, keys)
    found.worker = create_serving(FakeFrontend(), options, keys, is_worker=True)  # type: ignore[arg-type]
    listener, public = socket.socket(socket.AF_UNIX), socket.create_server(("127.0.0.1", 0))
    listener.bind(str(tmp_path / "main.sock"))
    servers = [
        Server(create_app(found.main), options, behind=True),
        Server(create_worker_app(found.worker, tmp_path / "main.sock"), options),
    ]
    running = [asyncio.ensure_future(each.serve([end])) for each, end in zip(servers, (listener, public), strict=True)]
    for server in servers:
        await server.up.wait()
    url = f"http://127.0.0.1:{public.getsockname()[1]}"
    async with httpx.AsyncClient(base_url=url, headers={"x-api-key": SECRET}, timeout=30) as found.http:
        yield found
    for server in servers:
        server.should_exit = True
    await asyncio.gather(*running)


def requests_of(serving: Serving) -> int:
    return len(list(serving.ledger.latest()))


async def test_work_is_the_workers_and_what_is_kept_the_main_processes(two: Two) -> None:
    for _ in range(2):
        assert (await two.http.post("/v1/chat/completions", json=CHAT)).status_code == 200
    lines = (await two.http.post("/v1/chat/completions", json=CHAT | {"stream": True})).text
    assert lines.endswith("data: [DONE]\n\n")
    assert (requests_of(two.worker), requests_of(two.main)) == (3, 0)
    made = (await two.http.post("/v1/chat/completions", json=CHAT | {"store": True})).json()
    assert (requests_of(two.worker), requests_of(two.main)) == (3, 1)
    kept = await two.http.get(f"/v1/chat/completions/{made['id']}")
    assert kept.json()["id"] == made["id"]
    assert (await two.http.get("/v1/models")).json()["data"][0]["id"] == FakeFrontend.model_name
    assert (await two.http.get("/no/such/route")).status_code == 404
    assert two.worker.options.files is None, "the folder is the main process's"
    assert two.worker.admission.inflight == two.main.admission.inflight == 0


@pytest.mark.parametrize(
    ("more", "kept"),
    [
        ({"store": False}, False),
        ({}, True),
        ({"store": False, "conversation": "conv_x"}, True),
        ({"store": False, "previous_response_id": "resp_x"}, True),
        ({"store": False, "input": [{"type": "item_reference", "id": "msg_x"}]}, True),
    ],
)
async def test_responses_that_need_nothing_kept_are_the_workers(two: Two, more: dict[str, Any], kept: bool) -> None:
    answer = await two.http.post("/v1/responses", json={"model": CHAT["model"], "input": "hello"} | more)
    assert (answer.status_code == 200) == (set(more) <= {"store"}), answer.text
    assert requests_of(two.worker) == (not kept)


async def test_answers_pass_as_they_are(two: Two) -> None:
    """Streams as they come, in chunks or of a length; bodies of either kind; errors; answers without a body."""
    body = {"model": CHAT["model"], "input": "hello", "stream": True}
    async with two.http.stream("POST", "/v1/responses", json=body) as streamed:
        assert streamed.headers["content-type"].startswith("text/event-stream")
        assert "response.completed" in (await streamed.aread()).decode()
    told = await two.http.get("/v1/models", headers={"x-request-id": "mine"})
    assert told.headers.get_list("x-request-id") == ["mine"] and len(told.headers.get_list("date")) == 1

    async def pieces() -> AsyncIterator[bytes]:
        yield b'{"model": "%b", "input": ' % CHAT["model"].encode()  # type: ignore[attr-defined]
        yield b'"hello"}'

    answer = await two.http.post("/v1/responses", content=pieces(), headers={"content-type": "application/json"})
    assert answer.json()["status"] == "completed"
    page = await two.http.head("/")
    assert page.status_code == 200 and int(page.headers["content-length"]) > 100 and page.content == b""
    large = await two.http.post("/v1/responses/input_tokens", json={"input": "x" * 100_000})
    assert large.status_code == 413
    assert (await two.http.get("/v1/models", headers={"x-api-key": "sk-quire-another-one-0"})).status_code == 401
    file = {"file": ("lines.jsonl", b"{}" * 200_000)}
    sent = await two.http.post("/v1/files", files=file, data={"purpose": "batch"})
    content = await two.http.get(f"/v1/files/{sent.json()['id']}/content")
    assert content.content == b"{}" * 200_000


async def test_a_client_that_hangs_up_is_gone_for_the_main_process_too(two: Two) -> None:
    hangs = {"model": CHAT["model"], "input": "hang", "stream": True}
    async with two.http.stream("POST", "/v1/responses", json=hangs) as answer:
        await anext(answer.aiter_lines())
        assert two.main.admission.inflight == 1
    async with asyncio.timeout(20):
        await two.main.admission.idle()


async def test_an_answer_before_the_body_was_read_is_the_answer(tmp_path: Path) -> None:
    """Whoever refuses a request by its head answers and closes; what is sent then has no reader."""
    listener, closed = socket.socket(socket.AF_UNIX), threading.Event()
    listener.bind(str(tmp_path / "main.sock"))
    listener.listen()

    def refuse() -> None:
        with listener.accept()[0] as peer:
            peer.recv(1 << 16)
            peer.sendall(b"HTTP/1.1 403 Forbidden\r\ncontent-length: 2\r\nconnection: close\r\n\r\nno")
        closed.set()

    async def body() -> AsyncIterator[bytes]:
        yield b"x"
        thread.start()
        closed.wait(10)  # the loop does not run meanwhile: nobody has read the answer
        yield b"y" * 30_000

    thread = threading.Thread(target=refuse)
    frontend: Any = FakeFrontend()
    app = create_worker_app(create_serving(frontend, is_worker=True), tmp_path / "main.sock")
    with listener:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
            answer = await http.post("/v1/files", content=body())
    thread.join(10)
    assert (answer.status_code, answer.text) == (403, "no")


async def test_a_head_that_a_worker_takes_the_main_process_takes(two: Two) -> None:
    bound = two.worker.options.header_bytes
    for size in range(bound - 700, bound, 50):
        answer = await two.http.get("/v1/models", headers={"x": "a" * size})
        assert answer.status_code == 200 or "x-request-id" not in answer.headers  # refused before it was passed on
    assert answer.status_code == 431


async def test_without_a_main_process_it_says_so(tmp_path: Path) -> None:
    frontend: Any = FakeFrontend()
    app = create_worker_app(create_serving(frontend, is_worker=True), tmp_path / "nobody.sock")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
        answer = await http.get("/v1/models")
        assert answer.status_code == 503 and "main process" in answer.json()["error"]["message"]


def test_paths_of_workers_are_routes_that_there_are() -> None:
    serving = create_serving(FakeFrontend())  # type: ignore[arg-type]
    posts = {
        route.path  # type: ignore[attr-defined]
        for router in PUBLIC
        for route in router(serving).routes
        if "POST" in getattr(route, "methods", ())
    }
    assert posts >= WORKER_PATHS
