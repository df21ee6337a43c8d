"""Several clients of one engine process, over the fake executor: each has its own requests and sees no others', and one
that goes takes its own along."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from quire.engine.client import RestartPolicy
from quire.engine.core import EngineCore
from quire.engine.engine_process import EngineProcess
from quire.engine.pair_link import PairLink
from quire.engine.worker_client import EnginePlaces, WorkerClient, WorkerLink
from quire.types.config import EngineOptions
from quire.types.errors import EngineDeadError
from quire.types.events import TokenEvent
from quire.types.fakes import FakeExecutor, fake_token
from quire.types.kv import KVGroup, KVLayout
from quire.types.messages import (
    Abort,
    AdapterInfo,
    Attach,
    Detach,
    EngineInfo,
    Events,
    FinishAt,
    GetStats,
    Query,
    Ready,
    Reply,
    Shutdown,
    Submit,
)
from quire.types.plan import Capacity
from quire.types.request import FinishReason, Request
from quire.types.sampling_params import SamplingParams

LAYOUT = KVLayout((KVGroup(layers=(0,), tokens_per_page=4, kv_heads=1, head_dim=1),), "float32")
VOCAB = 97


class Gated(FakeExecutor):
    """Takes a step when it is let."""

    def __init__(self, *arguments: Any, **more: Any):
        super().__init__(*arguments, **more)
        self.gate = threading.Semaphore(0)

    def submit(self, plan: Any) -> Any:
        assert self.gate.acquire(timeout=60)
        return super().submit(plan)


class Owner(PairLink):
    """The client that started the engine."""

    def _ended(self) -> str:
        return ""


class Engine:
    def __init__(self, folder: Path):
        self.owner = Owner(folder / "owner.sock")
        executor = Gated(
            LAYOUT, Capacity(pages=64, slots=8, max_model_len=60, max_batch_tokens=16, depth=1), vocab=VOCAB
        )
        self.gate, self.core = executor.gate, EngineCore(EngineOptions(), executor)
        self._process = EngineProcess(self.owner.address)
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()
        assert isinstance(said(self.owner, Ready), Ready)
        self._folder, self._paths = folder, 0

    def _serve(self) -> None:
        self._process.announce(self.core, EngineInfo("fake", 60, VOCAB, 63, 4, 16, 1, "none", "none", []))
        self._process.serve(self.core)
        self._process.close()

    def attached(self, name: str) -> WorkerLink:
        link = WorkerLink(self.path())
        self.owner.send(Attach(name, link.address))
        link.info = said(link, Ready).info
        return link

    def path(self) -> Path:
        self._paths += 1
        return self._folder / f"{self._paths}.sock"

    def end(self) -> None:
        self.gate.release(1000)
        self.owner.send(Shutdown())
        self._thread.join(60)
        assert not self._thread.is_alive()
        self.owner._release()


@contextmanager
def running(folder: Path) -> Iterator[Engine]:
    engine = Engine(folder)
    try:
        yield engine
    finally:
        engine.end()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    with running(tmp_path) as found:
        yield found


def said(link: PairLink, kind: type[Any], engine: Engine | None = None) -> Any:
    """The next message of that kind; those before it are dropped, those behind it wait. Meanwhile the engine is let
    take a step whenever nothing comes."""
    waiting = vars(link).setdefault("waiting", [])
    for _ in range(600):
        while waiting:
            if isinstance(found := waiting.pop(0), kind):
                return found
        waiting += (came := link.receive(0.1))
        if engine is not None and not came:
            engine.gate.release()
    raise AssertionError(f"no {kind.__name__} came")


def told(link: PairLink, until: Callable[[list[TokenEvent]], bool], engine: Engine | None = None) -> list[TokenEvent]:
    events: list[TokenEvent] = []
    while not until(events):
        events += said(link, Events, engine).events
    return events


def ended(count: int = 1) -> Callable[[list[TokenEvent]], bool]:
    return lambda events: sum(event.finish is not None for event in events) == count


def ask(name: str, prompt: list[int], **params: Any) -> Submit:
    return Submit(Request(id=name, prompt=prompt, params=SamplingParams(**{"max_tokens": 6, "seed": 1, **params})))


def expected(prompt: list[int], count: int = 6) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(fake_token(tokens, 1, 0, VOCAB))
    return tokens[len(prompt) :]


def test_each_is_told_of_its_own_requests_only(engine: Engine) -> None:
    clients = [engine.owner, engine.attached("a"), engine.attached("b")]
    for number, client in enumerate(clients):
        client.send(ask(f"r{number}", [number + 1]), Query(GetStats()))
    engine.gate.release(1000)
    for number, client in enumerate(clients):
        events = told(client, ended())
        assert {event.request for event in events} == {f"r{number}"}
        assert [token for event in events for token in event.tokens] == expected([number + 1])
    clients[1].send(Query(GetStats(), id=77))
    assert said(clients[1], Reply).id == 77
    for client in clients[1:]:
        client.close()


def begun(events: list[TokenEvent]) -> bool:
    return len(events) >= 1


def running_in(engine: Engine) -> int:
    engine.owner.send(Query(GetStats()))
    return int(said(engine.owner, Reply, engine).answer.stats.running)


def test_ids_that_are_in_use_are_refused_and_what_is_anothers_cannot_be_touched(engine: Engine) -> None:
    a, b = engine.attached("a"), engine.attached("b")
    a.send(ask("same", [1], max_tokens=50))
    told(a, begun, engine)
    b.send(ask("same", [2]), Abort("same"), FinishAt("same", 0, 1))
    [refusal] = told(b, ended(), engine)
    assert refusal.finish is FinishReason.ERROR and "already in use" in refusal.message
    assert not any(event.finish for event in told(a, begun, engine)) and running_in(engine) == 1
    engine.owner.send(Abort("same"))  # an operator may end any
    assert told(a, ended(), engine)[-1].finish is FinishReason.ABORT
    a.close()
    b.close()


def test_one_that_is_gone_takes_its_requests_along(engine: Engine) -> None:
    a, b = engine.attached("a"), engine.attached("b")
    a.send(ask("gone", [1], max_tokens=50))
    b.send(ask("stays", [2], max_tokens=10))
    told(a, begun, engine)
    told(b, begun, engine)
    a.close()
    engine.owner.send(Detach("a"), Detach("never was"))
    assert told(b, ended(), engine)[-1].finish is FinishReason.LENGTH
    assert running_in(engine) == 0
    again = engine.attached("a")
    again.send(ask("gone", [1]))
    assert [token for event in told(again, ended(), engine) for token in event.tokens] == expected([1])
    again.close()
    b.close()


def test_one_that_speaks_nonsense_is_let_go_alone(engine: Engine) -> None:
    a, b = engine.attached("a"), engine.attached("b")
    a.send(ask("r", [1], max_tokens=50))
    told(a, begun, engine)
    a._socket.send(b"\xc1")
    b._socket.send(b"")
    engine.owner.send(ask("fine", [2]))
    assert told(engine.owner, ended(), engine)[-1].finish is FinishReason.LENGTH
    assert running_in(engine) == 0
    a.close()
    b.close()


async def test_a_worker_follows_the_engine_from_one_to_the_next(tmp_path: Path) -> None:
    """What was under way ends with an error, once; adapters are those that the main process loaded."""
    places = EnginePlaces()
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()

    def come(engine: Engine) -> None:
        path = engine.path()
        places.comes_to(path)
        engine.owner.send(Attach("a", f"ipc://{path}"))

    with running(tmp_path / "first") as engine:
        come(engine)
        client = await WorkerClient.follow(places, RestartPolicy())
        client.adapters = [AdapterInfo("poet", "files")]
        engine.gate.release(1)
        events = client.submit(Request(id="r", prompt=[1], params=SamplingParams(max_tokens=50)))
        assert (await anext(events))[0].tokens
        places.lost("it was killed")
        with pytest.raises(EngineDeadError, match="the engine stopped"):
            await anext(events)
        assert not client.alive and client.trouble() is not None
        places.comes_to(engine.path())  # where nobody comes: lost again meanwhile
    with running(tmp_path / "second") as engine:
        engine.gate.release(1000)
        come(engine)
        while not client.alive:
            await asyncio.sleep(0.01)
        assert client.restarts == 1 and client.adapters == []
        collected = [event async for batch in client.submit(request("s")) for event in batch]
        assert collected[-1].finish is FinishReason.LENGTH
        await client.close()
        with pytest.raises(EngineDeadError, match="shutting down"):
            await anext(client.submit(request("t")))


def request(name: str) -> Request:
    return Request(id=name, prompt=[1], params=SamplingParams(max_tokens=6))
