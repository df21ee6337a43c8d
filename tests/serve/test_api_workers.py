"""A server with two API workers: whichever of them a request came to, limits, counts and what is kept are the server's;
what happens to one is nobody else's affair."""

from __future__ import annotations

import contextlib
import json
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest
from running_server import Running, wait_for

CHAT = "/v1/chat/completions"
BODY = {"model": "faulty", "messages": [{"role": "user", "content": "Count."}], "ignore_eos": True, "temperature": 0}
AT_ONCE = 6  # of a key
WELL = "well"


@pytest.fixture(scope="module")
def server(default_model: Any) -> Iterator[Running]:
    running = Running("--api-workers", "2", "--key-concurrency", str(AT_ONCE), "--max-restarts", "2", "--grace", "60")
    yield running
    running.close()


def workers(server: Running) -> list[psutil.Process]:
    children = psutil.Process(server.process.pid).children()
    return [child for child in children if "quire.serve.workers.api_worker" in child.cmdline()]


def ask(server: Running, **more: Any) -> httpx.Response:
    """On a connection of its own: it goes to the worker that has the fewest."""
    return httpx.post(server.url + CHAT, json=BODY | {"max_tokens": 4} | more, timeout=60)


class Streams:
    """Streams that were begun one after the other; each ends well, by an error, or with what broke it."""

    def __init__(self, server: Running, count: int, max_tokens: int):
        self._pool = ThreadPoolExecutor(count)
        self.ids: list[str] = []
        self.ends = [self._begin(server, max_tokens) for _ in range(count)]

    def _begin(self, server: Running, max_tokens: int) -> Callable[[], str]:
        begun = threading.Event()

        def read() -> str:
            last = ""
            body = BODY | {"stream": True, "max_tokens": max_tokens}
            try:
                with httpx.stream("POST", server.url + CHAT, json=body, timeout=60) as response:
                    for line in response.iter_lines():
                        if not begun.is_set():
                            self.ids.append(line.partition('"id":"')[2].partition('"')[0])
                            begun.set()
                        last = line if "finish_reason" in line or "error" in line else last
            except httpx.HTTPError as error:
                return type(error).__name__
            ended = json.loads(last.removeprefix("data: "))
            return str(ended["error"]["code"]) if "error" in ended else WELL

        end = self._pool.submit(read)
        assert begun.wait(60)
        return end.result


def test_one_view_of_limits_and_of_what_is_under_way(server: Running) -> None:
    streams = Streams(server, AT_ONCE, 200)
    refused = [ask(server) for _ in range(3)]
    assert [answer.status_code for answer in refused] == [429] * 3
    assert server.metric("quire_requests_inflight") == AT_ONCE
    assert httpx.get(server.url + "/load").json() == {"server_load": AT_ONCE}
    listed = {one["id"]: one for one in httpx.get(server.admin + "/v1/requests").json()["data"]}
    assert set(streams.ids) <= listed.keys() and not any(listed[id]["ended"] for id in streams.ids)
    assert all(listed[id]["output_tokens"] > 0 for id in streams.ids)
    for id in streams.ids[:4]:  # two of each worker
        assert httpx.delete(f"{server.admin}/v1/requests/{id}").json()["cancelled"]
        assert len(httpx.get(f"{server.url}/v1/requests/{id}/explain").json()["data"][0]["branches"]) == 1
    ends = [end() for end in streams.ends]
    assert ends == ["engine_dead"] * 4 + [WELL] * 2
    wait_for(lambda: server.metric("quire_requests_inflight") == 0, 10)
    assert server.metric("quire_admission_refused_total") == 3


def test_what_is_kept_is_kept_for_all(server: Running) -> None:
    made = ask(server, store=True).json()
    assert all(httpx.get(f"{server.url}{CHAT}/{made['id']}").status_code == 200 for _ in range(2))
    first = httpx.post(server.url + "/v1/responses", json={"input": "Hi", "max_output_tokens": 4}, timeout=60).json()
    for _ in range(2):
        follows = {"input": "And?", "previous_response_id": first["id"], "max_output_tokens": 4}
        assert httpx.post(server.url + "/v1/responses", json=follows, timeout=60).status_code == 200
    file = {"file": ("lines.jsonl", b"{}" * 40_000)}
    sent = httpx.post(server.url + "/v1/files", files=file, data={"purpose": "batch"}, timeout=60).json()
    assert sent["bytes"] == 80_000
    assert [httpx.get(f"{server.url}/v1/files/{sent['id']}/content").content for _ in range(2)] == [b"{}" * 40_000] * 2


def test_a_killed_worker_ends_its_own_streams_only_and_another_follows(server: Running) -> None:
    before = server.metric("quire_generation_tokens_total")
    streams = Streams(server, AT_ONCE, 150)
    assert httpx.get(server.admin + "/v1/requests").status_code == 200  # who lists them knows all from then on
    victim = workers(server)[0]
    victim.kill()
    broken = [end() for end in streams.ends]
    assert sorted(end == WELL for end in broken) == [False] * 3 + [True] * 3
    assert {end for end in broken if end != WELL} <= {"RemoteProtocolError", "ReadError"}
    wait_for(lambda: server.metric("quire_api_workers") == 2, 60)
    wait_for(lambda: server.metric("quire_requests_inflight") == server.metric("quire_num_requests_running") == 0, 10)
    assert server.metric("quire_api_worker_restarts_total") == 1
    assert server.metric("quire_generation_tokens_total") >= before + 3 * 150
    listed = {one["id"]: one for one in httpx.get(server.admin + "/v1/requests").json()["data"]}
    assert sum(listed.get(id, {}).get("error") == "api_worker_died" for id in streams.ids) == 3
    assert [ask(server).status_code for _ in range(4)] == [200] * 4
    lines = [line for line in server.log.read_text().splitlines() if "is lost" in line]
    assert len(lines) == 1 and "API worker 1 is lost (exit code -9" in lines[0]


def test_workers_go_on_with_the_engine_that_follows(server: Running) -> None:
    streams = Streams(server, 4, 800)
    server.engine.kill()
    assert [end() for end in streams.ends] == ["engine_dead"] * 4
    wait_for(lambda: ask(server).status_code == 200, 120)
    assert [ask(server).status_code for _ in range(4)] == [200] * 4
    assert server.metric("quire_api_worker_restarts_total") == 1


def test_a_drained_server_leaves_nothing(server: Running) -> None:
    everyone = psutil.Process(server.process.pid).children(recursive=True)
    streams = Streams(server, 4, 100)
    server.process.send_signal(signal.SIGTERM)
    for process in workers(server):
        process.send_signal(signal.SIGTERM)  # as a service manager does: to the whole group
    wait_for(lambda: not server.ready(), 5)
    assert ask(server).status_code == 503
    assert [end() for end in streams.ends] == [WELL] * 4
    assert server.process.wait(30) == 0, server.log.read_text()
    wait_for(lambda: not any(process.is_running() for process in everyone), 5)
    assert server.left_behind() == []


def test_a_killed_server_takes_its_workers_with_it(default_model: Any) -> None:
    server = Running("--api-workers", "2", "--max-restarts", "0")
    try:
        everyone = psutil.Process(server.process.pid).children(recursive=True)
        assert len(everyone) >= 3
        server.process.kill()
        server.process.wait()

        def over(process: psutil.Process) -> bool:
            with contextlib.suppress(psutil.NoSuchProcess):
                return process.status() == psutil.STATUS_ZOMBIE
            return True

        wait_for(lambda: all(map(over, everyone)), 10)
        assert not [path for path in server.left_behind() if "quire-files-" not in path]
    finally:
        server.close()
