"""The main process over its API workers, which are no processes here: who is told what, who is replaced when."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from fake_frontend import FakeClient, FakeFrontend

from quire.assets import LocalModel
from quire.engine.client import AsyncClient
from quire.serve.core.api_keys import KeyRing
from quire.serve.http.app import create_serving
from quire.serve.http.server import background_server
from quire.serve.workers import control, supervisor
from quire.serve.workers.supervisor import ApiWorkers
from quire.types.errors import ConfigError, ModelFileError, QuireError
from quire.types.messages import AdapterInfo, Attach, Detach, ToEngine
from quire.types.serving import ServeOptions

OPTIONS = ServeOptions(api_workers=2, heartbeat=5.0, hang_timeout=10.0)


class SilentLink:
    """To an engine that says nothing; keeps what it is told."""

    info = FakeClient.info

    def __init__(self) -> None:
        self.told: list[ToEngine] = []

    @property
    def heard(self) -> float:
        return time.monotonic()

    def send(self, *messages: ToEngine) -> None:
        self.told += messages

    def receive(self, timeout: float | None) -> list[Any]:
        time.sleep(0.005)
        return []

    def wake(self) -> None: ...

    def close(self, *, force: bool = False) -> None: ...


class Worker:
    """Stands for a process. `fails`: why the next one does not come up."""

    made: list[Worker] = []
    fails: QuireError | None = None

    def __init__(self, number: int, directory: Any, counts: Any, start: control.Start, on_report: Any):
        self.number, self.name, self.start = number, f"API worker {number}", start
        self.began, self.up, self.gone = time.monotonic(), asyncio.get_running_loop().create_future(), asyncio.Event()
        self.told: list[Any] = []
        self.requests: set[str] = set()
        self.open = self.preparing = self.memory = 0
        self.why = ""
        Worker.made.append(self)

    @property
    def ready(self) -> bool:
        return self.up.done() and self.up.exception() is None and not self.gone.is_set()

    async def connect(self) -> None:
        if Worker.fails is None:
            self.up.set_result(None)
        else:
            self.up.set_exception(Worker.fails)
            self.gone.set()

    def send(self, message: Any) -> None:
        self.told.append(message)
        if isinstance(message, control.Stop):
            self.gone.set()

    def kill(self, why: str = "") -> None:
        self.why = self.why or why
        self.gone.set()

    async def ended(self) -> str:
        await self.gone.wait()
        return "exit code -9"

    def heard(self, kind: type[Any]) -> list[Any]:
        return [message for message in self.told if isinstance(message, kind)]


class Group:
    def __init__(self) -> None:
        self.link = SilentLink()
        frontend: Any = FakeFrontend()
        self.client = frontend.client = AsyncClient(self.link)
        frontend.text.files = LocalModel("fake", Path("/no/such/file.gguf"), "gguf")
        self.workers = ApiWorkers(OPTIONS, KeyRing())
        self.serving = create_serving(frontend, OPTIONS, counts=self.workers.counts, workers=self.workers)
        self.listener = socket.create_server(("127.0.0.1", 0))

    async def start(self) -> None:
        await self.workers.start(self.serving, self.listener)

    async def end(self) -> None:
        await self.workers.stop()
        self.workers.close()
        self.listener.close()
        await self.client.close()
        assert not self.workers.directory.exists()


@pytest.fixture
async def group(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Group]:
    monkeypatch.setattr(supervisor, "WorkerProcess", Worker)
    monkeypatch.setattr(supervisor, "FIRST_BACKOFF_S", 0.01)
    monkeypatch.setattr(supervisor, "WATCH_INTERVAL_S", 0.01)
    Worker.made, Worker.fails = [], None
    found = Group()
    yield found
    Worker.fails = None
    await found.end()


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not true():
            await asyncio.sleep(0.005)


async def test_all_are_told_of_the_engine_as_it_goes_and_comes(group: Group) -> None:
    await group.start()
    first, second = Worker.made
    await until(lambda: len(group.link.told) == 2)
    came = [worker.heard(control.EngineComes)[0].path for worker in (first, second)]
    assert [(m.client, m.address) for m in group.link.told if isinstance(m, Attach)] == [
        ("API worker 1", f"ipc://{came[0]}"),
        ("API worker 2", f"ipc://{came[1]}"),
    ]
    group.client._fail("it was killed")
    assert all(len(worker.heard(control.EngineLost)) == 1 for worker in (first, second))
    following = SilentLink()
    group.client._link, group.client._outbox = following, group.client._outbox
    group.client._revive(following, group.client._outbox)
    again = [worker.heard(control.EngineComes)[1].path for worker in (first, second)]
    assert len({*came, *again}) == 4
    poet = AdapterInfo("poet", "files")
    group.client.adapters = [poet]
    group.client.on_change()
    assert all(worker.told[-1] == control.AdaptersAre([poet]) for worker in (first, second))
    first.gone.set()  # who follows one that died is told at once
    await until(lambda: len(Worker.made) == 3 and bool(Worker.made[2].heard(control.EngineComes)))
    assert Worker.made[2].told[0] == control.AdaptersAre([poet]) and second.ready
    await until(
        lambda: any(isinstance(message, Detach) and message.client == "API worker 1" for message in said(group))
    )


def said(group: Group) -> list[ToEngine]:
    return group.link.told


async def test_one_that_dies_is_replaced_and_its_counts_are_taken_back(group: Group, caplog: Any) -> None:
    await group.start()
    first = Worker.made[0]
    group.workers.counts._cells[group.workers.counts._at(1, "inflight")] = 3
    assert group.serving.admission.inflight == 3
    first.gone.set()
    await until(lambda: group.workers.restarts == 1 and group.workers.up == 2)
    assert group.serving.admission.inflight == 0
    assert "API worker 1 is lost (exit code -9), another starts in 0.01 s" in caplog.text
    Worker.made[-1].gone.set()  # one that follows soon waits twice as long
    await until(lambda: group.workers.restarts == 2 and group.workers.up == 2)
    assert "another starts in 0.02 s" in caplog.text


async def test_one_that_is_silent_gets_no_connections_and_then_is_ended(group: Group, caplog: Any) -> None:
    await group.start()
    first, second = Worker.made
    beat = group.workers.counts._at(1, "beat")
    group.workers.counts._cells[beat] = time.monotonic() - 7
    assert group.workers._takers() == [second]
    group.workers.counts._cells[beat] = time.monotonic() - 11
    await until(first.gone.is_set)
    assert first.why == "it gave no sign of life for 11 s and was ended"


async def test_what_keeps_the_first_from_starting_is_told(group: Group) -> None:
    Worker.fails = ModelFileError("the tokenizer is gone")
    with pytest.raises(ModelFileError, match="the tokenizer is gone"):
        await group.start()


def test_without_an_engine_process_it_is_refused() -> None:
    with (
        pytest.raises(ConfigError, match="api_workers need an engine process"),
        background_server(FakeFrontend, ServeOptions(port=0, api_workers=2, grace=1)),  # type: ignore[arg-type]
    ):
        pass
