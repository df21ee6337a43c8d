"""Faults against a real server with its engine in a process of its own: kills, stops, drains, clients that vanish.

The server is `quire serve` itself. Times have wide margins; the log gets the details when something fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest
from running_server import HEARTBEAT, Running, wait_for

BODY = {
    "model": "faulty", "messages": [{"role": "user", "content": "Count to a thousand."}], "stream": True,
    "ignore_eos": True, "temperature": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def server(default_model: Any) -> Iterator[Running]:
    running = Running("--max-restarts", "2", "--grace", "60")
    yield running
    running.close()


async def stream(url: str, started: asyncio.Semaphore, max_tokens: int) -> list[dict[str, Any]]:
    """All events of one stream, checked to end as streams do."""
    async with (
        httpx.AsyncClient(base_url=url, timeout=120) as http,
        http.stream("POST", "/v1/chat/completions", json=BODY | {"max_tokens": max_tokens}) as response,
    ):
        assert response.status_code == 200
        events = []
        async for line in response.aiter_lines():
            if line:
                if not events:
                    started.release()
                events.append(line.removeprefix("data: "))
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


async def under_load(url: str, count: int, max_tokens: int, act: Any) -> list[list[dict[str, Any]]]:
    """`count` streams; `act` is called once all of them have begun."""
    started = asyncio.Semaphore(0)
    tasks = [asyncio.ensure_future(stream(url, started, max_tokens)) for _ in range(count)]
    for _ in tasks:
        await asyncio.wait_for(started.acquire(), 60)
    await asyncio.to_thread(act)
    return await asyncio.gather(*tasks)


def test_kill_the_engine_under_sixteen_streams(server: Running) -> None:
    def kill() -> None:
        victim = server.engine
        victim.kill()
        wait_for(lambda: not server.ready(), 1.0)

    streams = asyncio.run(under_load(server.url, 16, 900, kill))
    assert len(streams) == 16
    for events in streams:
        assert events[-1]["error"]["code"] == "engine_dead"
    wait_for(server.ready, 120)
    answer = server.http.post("/v1/chat/completions", json=BODY | {"stream": False, "max_tokens": 4})
    assert answer.json()["usage"]["completion_tokens"] == 4
    assert server.metric("quire_engine_restarts_total") == 1


def test_the_spare_becomes_the_engine_of_a_server_with_one_model(server: Running) -> None:
    """Its imports are done before the engine dies; afterwards there is another."""
    before = server.engine_pid

    def spare() -> int | None:
        children = psutil.Process(server.process.pid).children()
        engines = [each.pid for each in children if "quire.engine.engine_process" in each.cmdline()]
        return next((pid for pid in engines if pid not in (before, server.engine_pid)), None)

    ready = wait_for(spare, 120)
    os.kill(before, signal.SIGKILL)
    wait_for(lambda: not server.ready(), 10)
    wait_for(server.ready, 120)
    assert server.engine_pid == ready
    answer = server.http.post("/v1/chat/completions", json=BODY | {"stream": False, "max_tokens": 4})
    assert answer.json()["usage"]["completion_tokens"] == 4
    assert wait_for(spare, 120) != ready


def test_a_stopped_engine_is_not_ready(server: Running) -> None:
    assert server.ready()
    engine = server.engine
    engine.suspend()
    try:
        wait_for(lambda: not server.ready(), HEARTBEAT + 1.0)
        refused = server.http.post("/v1/chat/completions", json=BODY | {"max_tokens": 4})
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
        assert server.http.get("/health").status_code == 200
        assert server.metric("quire_replica_ready") == 0
        [listed] = httpx.get(f"{server.admin}/v1/replicas", timeout=60).json()["data"]
        assert listed["state"] == "unresponsive" and "no sign of life" in listed["lost"]
        for route in ("/is_sleeping", "/v1/cache"):
            silent = httpx.get(f"{server.admin}{route}", timeout=60)
            assert silent.status_code == 503 and silent.json()["error"]["code"] == "engine_dead"
    finally:
        engine.resume()
    wait_for(server.ready, 10)


def test_a_thousand_clients_vanish_and_no_page_leaks(server: Running) -> None:
    restarts = server.metric("quire_engine_restarts_total")
    rng = random.Random(0)
    host, port = server.url.removeprefix("http://").split(":")
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {}\r\n\r\n"

    async def vanish(turn: asyncio.Semaphore, number: int) -> None:
        async with turn:
            content = f"{number % 37} " + "word " * rng.randrange(1, 60)
            fields = {"messages": [{"role": "user", "content": content}], "max_tokens": rng.randrange(1, 100)}
            body = json.dumps(BODY | fields | {"n": rng.choice((1, 1, 1, 3))}).encode()
            message = head.format(len(body)).encode() + body
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(message if rng.random() < 0.9 else message[: rng.randrange(len(message))])
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(reader.read(1 << 20 if rng.random() < 0.3 else 1), rng.random() * 0.2)
            writer.transport.abort() if rng.random() < 0.5 else writer.close()

    async def all_of_them() -> None:
        turn = asyncio.Semaphore(64)
        await asyncio.gather(*(vanish(turn, number) for number in range(1000)))

    asyncio.run(all_of_them())
    wait_for(server.idle, 60)
    # Idle, the engine checks its own books every second, and would die of an imbalance.
    time.sleep(1.5)
    assert server.idle() and server.metric("quire_engine_restarts_total") == restarts


def test_a_deadline_ends_the_work(server: Running) -> None:
    body = BODY | {"stream": False, "max_tokens": 900, "deadline_ms": 300}
    late = server.http.post("/v1/chat/completions", json=body)
    assert (late.status_code, late.json()["error"]["code"]) == (408, "deadline_exceeded")
    wait_for(server.idle, 10)


def test_sigterm_under_load_truncates_nothing_and_leaves_nothing(server: Running) -> None:
    engine = server.engine

    def terminate() -> None:
        server.process.send_signal(signal.SIGTERM)
        engine.send_signal(signal.SIGTERM)  # as a service manager does: to the whole group
        wait_for(lambda: not server.ready(), 5)
        refused = server.http.post("/v1/chat/completions", json=BODY)
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1

    streams = asyncio.run(under_load(server.url, 8, 60, terminate))
    for events in streams:
        assert events[-1]["choices"][0]["finish_reason"] == "length", events[-1]
    assert server.process.wait(30) == 0, server.log.read_text()
    wait_for(lambda: not engine.is_running(), 5)
    assert server.left_behind() == []


@pytest.mark.slow
def test_the_grace_period_ends(default_model: Any) -> None:
    server = Running("--grace", "0.5")
    try:
        terminate = lambda: server.process.send_signal(signal.SIGTERM)  # noqa: E731
        for events in asyncio.run(under_load(server.url, 4, 900, terminate)):
            assert "shutting down" in events[-1]["error"]["message"]
        assert server.process.wait(30) == 0
        assert server.left_behind() == []
    finally:
        server.close()


def test_a_killed_server_takes_its_engine_with_it(default_model: Any) -> None:
    server = Running("--max-restarts", "0")
    try:
        engine = server.engine
        server.process.kill()
        server.process.wait()
        wait_for(lambda: not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE, 10)
        # Uploaded files are what it could not take along; sockets are not.
        assert not [path for path in server.left_behind() if "quire-files-" not in path]
    finally:
        server.close()


def test_sigterm_before_the_server_is_up_leaves_nothing(default_model: Any) -> None:
    server = Running(await_welcome=False)
    try:
        [engine] = wait_for(psutil.Process(server.process.pid).children, 120)
        server.process.terminate()
        assert server.process.wait(60) == 0
        assert not engine.is_running() and server.left_behind() == []
    finally:
        server.close()


def test_an_engine_that_cannot_be_replaced_ends_the_server(default_model: Any) -> None:
    server = Running("--max-restarts", "0")
    try:
        server.engine.kill()
        assert server.process.wait(30) == 1
        assert "error: the engine process ended with exit code -9" in server.log.read_text()
        assert server.left_behind() == []
    finally:
        server.close()
