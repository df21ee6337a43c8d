"""How the client replaces its engine: deaths, silences, restarts and their limit, over links that die on command."""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
import time

import msgspec
import pytest

from quire.engine.client import AsyncClient, RestartPolicy
from quire.engine.text_output import RequestText
from quire.text import TextModel
from quire.types import messages
from quire.types.counts import Counts
from quire.types.errors import ConfigError, EngineDeadError
from quire.types.events import EngineStats, TokenEvent
from quire.types.exit_codes import exit_reason
from quire.types.messages import (
    Abort,
    EngineInfo,
    Events,
    GetView,
    Query,
    Refused,
    Reply,
    Stats,
    Submit,
    ToClient,
    ToEngine,
    received,
    wall_clock,
)
from quire.types.request import FinishReason, Request
from quire.types.sampling_params import SamplingParams
from quire.types.timeline import Preemption, Timeline

INFO = EngineInfo(
    model="m", max_model_len=64, vocab_size=9, pages=4, page_size=16, max_batch_tokens=64, depth=1, device="cpu",
    dtype="float32", reasons=[],
)  # fmt: skip


class FakeLink:
    """Answers every request with one token and then nothing; `die` and `hush` make it end and fall silent."""

    def __init__(self) -> None:
        self.info = INFO
        self.heard = time.monotonic()
        self.sent: list[ToEngine] = []
        self.closed = threading.Event()
        self.forced = False
        self.silent = False
        self._late: Query | None = None
        self._inbox: queue.Queue[ToClient | Exception | None] = queue.Queue()

    def send(self, *messages: ToEngine) -> None:
        for message in messages:
            self.sent.append(message)
            self._answer(message)

    def _answer(self, message: ToEngine) -> None:
        if isinstance(message, Submit):
            self._inbox.put(Events([TokenEvent(message.request.id, 0, 0, [1])]))
        elif isinstance(message, Query) and isinstance(message.question, GetView):
            self._late = message  # answered after the query that follows
        elif isinstance(message, Query):
            self._inbox.put(Reply(message.id, Stats(EngineStats(steps=7))))
            if self._late is not None:
                self._inbox.put(Reply(self._late.id, Refused("ConfigError", "no view here")))

    def receive(self, timeout: float | None) -> list[ToClient]:
        try:
            message = self._inbox.get(timeout=min(timeout or 0.01, 0.01))
        except queue.Empty:
            message = None
        if isinstance(message, Exception):
            raise message
        if not self.silent:
            self.heard = time.monotonic()
        return [] if message is None else [message]

    def wake(self) -> None:
        self._inbox.put(None)

    def close(self, *, force: bool = False) -> None:
        self.forced = force
        self.closed.set()

    def die(self) -> None:
        self._inbox.put(EngineDeadError("the engine process ended with exit code -9"))


def request(id: str = "r") -> Request:
    return Request(id=id, prompt=[1], params=SamplingParams())


async def until(condition, seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


class Links:
    """Opens links; those of `failures` do not start."""

    def __init__(self, failures: int = 0) -> None:
        self.made: list[FakeLink] = []
        self.failures = failures

    def __call__(self, stop: threading.Event) -> FakeLink:
        if self.failures:
            self.failures -= 1
            raise ConfigError("no memory today")
        self.made.append(FakeLink())
        return self.made[-1]


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.engine.client.FIRST_BACKOFF_S", 0.01)


async def test_a_death_ends_every_stream_and_the_next_engine_serves() -> None:
    links = Links()
    client = AsyncClient(links(threading.Event()), RestartPolicy(max_restarts=2), links)
    streams = [client.submit(request(f"r{i}")) for i in range(16)]
    for stream in streams:
        assert (await anext(stream))[0].tokens == [1]
    waiting = [asyncio.ensure_future(anext(stream)) for stream in streams]
    links.made[0].die()
    for error in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(error, EngineDeadError) and "-9" not in str(error)
    await until(lambda: client.trouble() is None)
    assert links.made[0].closed.is_set() and links.made[0].forced
    again = client.submit(request())
    assert (await anext(again))[0].tokens == [1]
    assert (await client.stats()).steps == 7
    assert client.restarts == 1
    assert not [m for m in links.made[1].sent if isinstance(m, Abort)]  # nobody aborts what the dead one did
    await again.aclose()
    await client.close()
    assert not links.made[1].forced


async def test_while_there_is_no_engine_requests_are_refused() -> None:
    started, go = threading.Event(), threading.Event()

    def slow(stop: threading.Event) -> FakeLink:
        started.set()
        assert go.wait(10)
        return FakeLink()

    link = FakeLink()
    client = AsyncClient(link, RestartPolicy(max_restarts=1), slow)
    link.die()
    await asyncio.to_thread(started.wait, 10)
    assert "engine stopped" in (client.trouble() or "")
    with pytest.raises(EngineDeadError) as refused:
        await anext(client.submit(request()))
    assert refused.value.retry_after > 0
    with pytest.raises(EngineDeadError):
        await client.stats()
    go.set()
    await until(lambda: client.trouble() is None)
    await client.close()


async def test_too_many_deaths_are_the_end(caplog: pytest.LogCaptureFixture) -> None:
    links = Links()
    client = AsyncClient(links(threading.Event()), RestartPolicy(max_restarts=2), links)
    for life in range(3):
        await until(lambda life=life: len(links.made) == life + 1 and client.trouble() is None)
        links.made[life].die()
        await until(lambda: client.trouble() is not None)
    error = await asyncio.wait_for(client.lost(), 10)
    assert "exit code -9" in str(error)  # the operator is told why
    assert caplog.messages[-1] == "no more restarts: 2 within 10 minutes (max_restarts)"
    assert len(links.made) == 3
    await client.close()


async def test_lines_about_an_engine_name_its_model_where_there_are_several(caplog: pytest.LogCaptureFixture) -> None:
    links = Links()
    for name in ("b", ""):
        client = AsyncClient(links(threading.Event()), RestartPolicy(max_restarts=1), links, name)
        links.made[-1].die()
        await until(lambda client=client: client.restarts == 1)
        await client.close()
    told = [(record.getMessage().split(",")[0], record.fields) for record in caplog.records]
    assert [each for each in told if not each[0].startswith("the engine is ready again")] == [
        (line, fields)
        for fields in ({"model": "b"}, {})
        for line in ("the engine is lost", "restarting the engine (1 of 1)")
    ]
    assert not any(record.exc_info for record in caplog.records)  # a line, no traceback of this process


async def test_a_client_that_is_closed_during_a_restart_tells_of_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    started = threading.Event()

    def slow(stop: threading.Event) -> FakeLink:
        started.set()
        assert stop.wait(10)
        raise EngineDeadError("the engine was told to stop before it was ready")

    link = FakeLink()
    client = AsyncClient(link, RestartPolicy(max_restarts=1), slow)
    link.die()
    await asyncio.to_thread(started.wait, 10)
    await client.close()
    why = "the engine process ended with exit code -9"
    assert caplog.messages == [f"the engine is lost, and 0 requests with it: {why}", "restarting the engine (1 of 1)"]


async def test_engines_that_do_not_start_count_as_restarts() -> None:
    links = Links()
    client = AsyncClient(links(threading.Event()), RestartPolicy(max_restarts=3), links)
    links.failures = 2
    links.made[0].die()
    await until(lambda: len(links.made) == 2 and client.trouble() is None)
    links.made[1].die()
    await asyncio.wait_for(client.lost(), 10)
    await client.close()


async def test_silence_is_trouble_and_long_silence_death() -> None:
    links = Links()
    policy = RestartPolicy(heartbeat=0.1, hang_timeout=0.5, max_restarts=1)
    client = AsyncClient(links(threading.Event()), policy, links)
    assert client.trouble() is None
    stream = client.submit(request())
    await anext(stream)
    links.made[0].silent = True
    await until(lambda: "no sign of life" in (client.trouble() or ""))
    assert len(links.made) == 1
    with pytest.raises(EngineDeadError):
        await anext(stream)
    await until(lambda: len(links.made) == 2 and client.trouble() is None)
    assert links.made[0].forced
    await client.close()


async def test_an_engine_that_does_not_answer_is_listed_and_its_silence_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.engine.client.STATS_TIMEOUT_S", 0.01)
    caplog.set_level("INFO")
    link = FakeLink()
    monkeypatch.setattr(link, "send", lambda *messages: None)
    client = AsyncClient(link, RestartPolicy(heartbeat=0.1))
    [one] = await asyncio.wait_for(client.replicas(), 10)
    assert one.state == "ready" and not caplog.messages
    link.silent = True
    await until(lambda: any("no sign of life" in line for line in caplog.messages))
    [one] = await asyncio.wait_for(client.replicas(), 10)
    assert one.state == "unresponsive" and "no sign of life" in one.lost
    link.silent = False
    await until(lambda: client.trouble() is None)
    [one] = await asyncio.wait_for(client.replicas(), 10)
    assert one.state == "ready" and not one.lost
    await until(lambda: caplog.messages[-1] == "the engine gives signs of life again")
    assert len(caplog.messages) == 2
    await client.close()


@pytest.mark.parametrize(
    ("code", "words"),
    [(3, "exit code 3"), (-9, "exit code -9 (SIGKILL, which the system sends when memory runs out)"),
     (-11, "exit code -11 (SIGSEGV)"), (-63, "exit code -63 (signal 63)")],
)  # fmt: skip
def test_exit_codes_in_words(code: int, words: str) -> None:
    assert exit_reason(code) == words


async def test_closing_ends_what_is_open_and_a_restart_under_way() -> None:
    started, stopped = threading.Event(), threading.Event()

    def never(stop: threading.Event) -> FakeLink:
        started.set()
        assert stop.wait(10)
        stopped.set()
        raise EngineDeadError("told to stop")

    link = FakeLink()
    client = AsyncClient(link, RestartPolicy(max_restarts=5), never)
    stream = client.submit(request())
    await anext(stream)
    link.die()
    with pytest.raises(EngineDeadError):
        await anext(stream)
    await asyncio.to_thread(started.wait, 10)
    await asyncio.wait_for(client.close(), 10)
    assert stopped.is_set()

    other = AsyncClient(FakeLink())
    stream = other.submit(request())
    await anext(stream)
    await other.close()
    with pytest.raises(EngineDeadError, match="shutting down"):
        await anext(stream)
    await other.close()


async def test_a_reader_that_leaves_aborts() -> None:
    link = FakeLink()
    client = AsyncClient(link)
    stream = client.submit(request())
    await anext(stream)
    await stream.aclose()
    await until(lambda: any(isinstance(m, Abort) for m in link.sent))
    finished = client.submit(request("done"))
    await anext(finished)
    link._inbox.put(Events([TokenEvent("done", 0, 1, [2], finish=FinishReason.STOP)]))
    assert [e.tokens for batch in [b async for b in finished] for e in batch] == [[2]]
    await client.close()
    assert [m.request for m in link.sent if isinstance(m, Abort)] == ["r"]


async def test_replies_are_matched_by_id_not_by_order() -> None:
    client = AsyncClient(FakeLink())
    view = asyncio.create_task(client.view())
    await asyncio.sleep(0)
    assert (await client.stats()).steps == 7
    with pytest.raises(ConfigError, match="no view here"):
        await view
    await client.close()


def test_times_on_the_wire_are_wall_clock() -> None:
    """An engine converts what it receives to its own clock and what it tells back."""
    sent = Request(id="r", prompt=[1], params=SamplingParams(), arrival=time.time() - 2, deadline=time.time() + 3)
    got = received(sent)
    assert got.arrival == pytest.approx(time.monotonic() - 2, abs=0.1)
    assert got.deadline == pytest.approx(time.monotonic() + 3, abs=0.1)
    assert sent.arrival == pytest.approx(time.time() - 2, abs=0.1), "the caller's own is left alone"
    assert received(request()).arrival == pytest.approx(time.monotonic(), abs=0.1) and not received(request()).deadline
    now = time.monotonic()
    told = wall_clock(
        Timeline(request="r", branch=0, prompt=1, arrival=now, chunks=[(now, 3)], preemptions=[Preemption(now, 2)])
    )
    assert (told.admitted, told.preemptions[0].resumed) == (0.0, 0.0), "what has not come has no time"
    assert told.arrival == told.chunks[0][0] == told.preemptions[0].at == pytest.approx(time.time(), abs=0.1)


def test_text_goes_on_after_tokens_that_another_engine_drew(default_model) -> None:
    text = TextModel.load(default_model)
    whole = text.tokenizer.encode("one two — STOP three", add_special=False)
    cut = next(i for i in range(len(whole)) if text.tokenizer.decode(whole[:i]).endswith("—"))
    params = SamplingParams(n=1, stop=["— STOP"])
    resumed = RequestText(Request(id="r", prompt=[1], params=params, outputs=whole[:cut]), text)
    delta, end = resumed.take(TokenEvent("r", 0, cut - 1, whole[cut - 1 :]))
    assert delta is not None and delta.stop_reason == "— STOP" and delta.text == "", "a stop that began before"
    assert end == cut + len(delta.token_ids)
    early = SamplingParams(n=1, stop=["one", "three"], min_tokens=len(whole) - 1)
    resumed = RequestText(Request(id="r", prompt=[1], params=early, outputs=whole[:cut]), text)
    delta, _ = resumed.take(TokenEvent("r", 0, cut, whole[cut:]))
    assert delta is not None and delta.stop_reason == "three", "a stop that came too early there is none here"


def test_forced_tokens_behind_a_stop_string_are_not_the_answers(default_model) -> None:
    text = TextModel.load(default_model)
    tokens = text.tokenizer.encode("one STOP two three", add_special=False)
    view = RequestText(Request(id="r", prompt=[1], params=SamplingParams(stop=["STOP"])), text)
    forced = [0, len(tokens) - 2, len(tokens) - 1]
    delta, _ = view.take(TokenEvent("r", 0, 0, tokens, counts=Counts(forced=3, drafted=2), forced=forced))
    assert delta is not None and len(delta.token_ids) == len(tokens) - 2
    assert delta.counts == Counts(forced=1, drafted=2)


async def test_a_waiting_reader_is_spared_what_its_sink_takes() -> None:
    link, taken = FakeLink(), []
    client = AsyncClient(link)
    stream, other = client.submit(request()), client.submit(request("other"))
    stream.sink = lambda event: event.finish is None and event.tokens != [9] and not taken.append(event.tokens)
    reader = asyncio.create_task(anext(stream))
    assert [e.tokens for e in await anext(other)] == [[1]] and await asyncio.wait_for(anext_or(reader), 5) is None
    link._inbox.put(Events([TokenEvent("r", 0, 1, [2]), TokenEvent("r", 0, 2, [9]), TokenEvent("r", 0, 3, [3])]))
    assert [e.tokens for e in await reader] == [[9], [3]], "what comes after one that was not taken waits behind it"
    assert taken == [[1], [2]]

    def broken(event: TokenEvent) -> bool:
        raise ValueError("a bug")

    stream.sink = broken
    reader, waiting = asyncio.create_task(anext(stream)), asyncio.create_task(anext(other))
    await asyncio.sleep(0)
    link._inbox.put(Events([TokenEvent("r", 0, 4, [4]), TokenEvent("other", 0, 1, [5])]))
    assert [e.tokens for e in await waiting] == [[5]], "a sink that fails ends its own stream only"
    with pytest.raises(ValueError, match="a bug"):
        await reader
    await client.close()


async def anext_or(reader: asyncio.Task) -> object:
    """What the reader has, once things had time to arrive; None if it waits."""
    await asyncio.sleep(0.1)
    return reader.result() if reader.done() else None


def test_requests_of_one_moment_stay_together_and_a_clock_that_is_set_is_followed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Read anew for each request, clocks come apart by microseconds, and a batch lost its order."""
    monotonic, wall = itertools.count(100.0, 1e-6), itertools.count(5000.0, 3e-6)
    monkeypatch.setattr(messages.time, "monotonic", lambda: next(monotonic))
    monkeypatch.setattr(messages.time, "time", lambda: next(wall))
    monkeypatch.setattr(messages, "_wall_offset", messages._WallOffset())
    requests = [Request(id=str(i), prompt=[1], params=SamplingParams(), arrival=4999.5) for i in range(20)]
    moments = {messages.received(one).arrival for one in requests}
    assert len(moments) == 1 and moments.pop() == pytest.approx(99.5, abs=1e-3)
    monkeypatch.setattr(messages.time, "time", lambda: 6000.0)
    assert messages.received(msgspec.structs.replace(requests[0], arrival=5999.0)).arrival == pytest.approx(
        99, abs=1e-3
    )
