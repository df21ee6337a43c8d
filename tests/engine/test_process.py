"""The engine in a process of its own: the same answers, errors that cross over, and an orderly death."""

import asyncio
import errno
import os
import signal
import threading
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.engine import spare_process
from quire.engine.client import AsyncClient, RestartPolicy
from quire.engine.link import ProcessLink
from quire.engine.spare_process import SpareProcess
from quire.engine.weight_holder import WeightHolder
from quire.types.config import EngineOptions
from quire.types.errors import ConfigError, EngineDeadError
from quire.types.messages import GetStats, Query, Reply
from quire.types.request import Request

PARAMS = SamplingParams(temperature=0, max_tokens=6)


def test_answers_and_leaves_nothing_behind(default_model):
    with LLM("smollm2-135m", kv_memory="128M", process=True) as llm:
        directory, pid = llm._link._directory, llm._link.pid
        assert not directory.exists()  # both ends hold the connection: nobody needs the file
        assert llm.generate("The capital of France is", PARAMS)[0].outputs[0].text.startswith(" Paris")
        assert llm.stats().output_tokens == 6
    assert not directory.exists() and not Path(f"/proc/{pid}").exists()


def test_start_errors_cross_the_boundary(default_model):
    with pytest.raises(ConfigError, match="needs more KV memory"):
        LLM("smollm2-135m", max_model_len=4000, kv_pages=10, process=True)


@pytest.fixture(scope="module")
def short_lived(default_model):
    """An engine in another process, until it is killed."""
    llm = LLM("smollm2-135m", kv_memory="128M", process=True)
    yield llm
    llm.close()


def test_words_that_come_just_after_a_look_are_not_lost(short_lived):
    """A message that arrives between the poll that found nothing and the reading of the socket."""
    link = short_lived._link
    poll = link._poller.poll

    def too_early(milliseconds):
        """Gives up, and then there is something to read."""
        poll(60_000)
        return []

    link._poller.poll = too_early
    link.send(Query(GetStats()))
    assert [type(message) for message in link.receive(0.5)] == [Reply]
    link._poller.poll = poll


def test_a_killed_engine_is_an_error_not_a_hang(short_lived):
    stream = short_lived.stream("Once", SamplingParams(temperature=0, max_tokens=400))
    next(stream)
    os.kill(short_lived._link.pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="exit code -9"):
        for _ in stream:
            pass


def test_a_spare_process_becomes_the_engine_it_is_told_to(default_model, capfd):
    """Started ahead, it waits; taken, it answers like any other; left over, it ends."""
    spare = SpareProcess(delay=3600)
    spare.prepare()
    spare.prepare()  # there is one
    link = spare.take()
    assert link is not None and link.running and spare.take() is None
    link.start(EngineOptions.of(kv_memory="128M"), name="b")
    lines = [line for line in capfd.readouterr().err.splitlines() if " engine INFO " in line]
    assert lines and all(line.endswith(" model=b") for line in lines)
    assert link.info.model == "smollm2-135m" and "imports" in link.info.reasons[-1] and not link._directory.exists()
    link.send(Query(GetStats()))
    assert [type(message) for message in link.receive(60)] == [Reply]
    link.close()
    assert not link.running
    spare.prepare()
    [left] = [spare._link]
    spare.close()
    assert not left.running and not left._directory.exists() and spare.take() is None


def test_a_spare_that_died_is_not_handed_out():
    spare = SpareProcess(delay=3600)
    spare.prepare()
    died = spare._link
    os.kill(died.pid, signal.SIGKILL)
    died._process.wait()
    assert spare.take() is None and not died._directory.exists()


def test_a_spare_that_hangs_is_ended(monkeypatch):
    """Whoever waits for an engine then starts another, instead of waiting as long as a load may take."""
    monkeypatch.setattr("quire.engine.link.SPARE_TIMEOUT_S", 0.1)
    spare = SpareProcess(delay=3600)
    spare.prepare()
    link = spare.take()
    os.kill(link.pid, signal.SIGSTOP)
    with pytest.raises(EngineDeadError, match="did not take its options"):
        link.start(EngineOptions())
    assert not link.running and not link._directory.exists()


@pytest.mark.slow
def test_a_spare_refuses_what_an_engine_refuses(default_model):
    spare = SpareProcess(delay=3600)
    spare.prepare()
    link = spare.take()
    with pytest.raises(ConfigError, match="needs more KV memory"):
        link.start(EngineOptions.of(max_model_len=4000, kv_pages=10))
    assert not link.running


def test_a_process_that_cannot_be_started_leaves_nothing_behind(monkeypatch, tmp_path, caplog):
    """As where the system allows no more of them. A spare is then not there, and nobody is told of it but the log."""

    def refuse(*args, **kwargs):
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr("subprocess.Popen", refuse)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="no engine process could be started"):
            ProcessLink(EngineOptions())
    assert not list(tmp_path.iterdir()) and len(list(Path("/proc/self/fd").iterdir())) <= before
    spare = SpareProcess(delay=3600)
    spare.prepare()
    assert spare.take() is None and "no spare engine process" in caplog.text
    spare.close()


def test_a_spare_waits_until_the_server_is_idle_but_not_for_ever(monkeypatch):
    started = threading.Event()
    monkeypatch.setattr(spare_process, "ProcessLink", lambda options, holder: started.set())
    asked = []
    SpareProcess(delay=0, busy=lambda: len(asked) < 3 and not asked.append(1)).prepare(later=True)
    assert started.wait(60) and len(asked) == 3
    started.clear()
    SpareProcess(delay=0, busy=lambda: True).prepare(later=True)
    assert started.wait(60)


def test_there_is_no_spare_where_memory_is_scarce(monkeypatch):
    monkeypatch.setattr(spare_process, "available_bytes", lambda: (2 << 30) - 1)
    spare = SpareProcess(delay=3600)
    spare.prepare()
    assert spare.take() is None


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs the memory files of Linux")
@pytest.mark.parametrize("path", ["compiled", pytest.param("torch", marks=pytest.mark.slow)])
async def test_an_engine_that_is_killed_maps_the_weights_that_were_held(default_model, dense_model, path):
    holder = WeightHolder(1 << 30)
    spare = SpareProcess(delay=3600, holder=holder)
    spare.prepare()
    model = {"dtype": "float32", "model": dense_model} if path == "torch" else {}
    options = EngineOptions.of(kv_memory="64M", max_model_len=64, **model)
    client = await AsyncClient.open(options, policy=RestartPolicy(max_restarts=1), holder=holder, spare=spare)

    async def tokens(name):
        asked = Request(id=name, prompt=[1, 2, 3, 4, 5], params=PARAMS)
        return [token async for events in client.submit(asked) for event in events for token in event.tokens]

    try:
        assert any("weights held" in reason for reason in client.info.reasons)
        first = await tokens("first")
        os.kill(client.pid, signal.SIGKILL)
        while not client.restarts:
            await asyncio.sleep(0.01)
        assert any("weights mapped" in reason for reason in client.info.reasons)
        assert "memfd:quire-weights" in Path(f"/proc/{client.pid}/maps").read_text()
        assert await tokens("second") == first and len(first) == 6
        await client.power(asleep=True)
        assert "memfd:quire-weights" not in Path(f"/proc/{client.pid}/maps").read_text() and holder.held_bytes
        assert await tokens("third") == first
        assert "memfd:quire-weights" in Path(f"/proc/{client.pid}/maps").read_text()
        await client.power(asleep=True, level=2)
        assert not holder.held_bytes
        assert await tokens("fourth") == first and holder.held_bytes
    finally:
        await client.close()
        spare.close()
        holder.close()


@pytest.mark.slow
async def test_an_engine_that_is_killed_is_replaced_by_the_spare(default_model):
    spare = SpareProcess(delay=0)
    spare.prepare()
    first = spare._link.pid
    client = await AsyncClient.open(
        EngineOptions.of(kv_memory="128M"), policy=RestartPolicy(max_restarts=1), spare=spare
    )
    try:
        assert client.pid == first
        while spare._link is None:  # another is started once the first was taken
            await asyncio.sleep(0.01)
        second = spare._link.pid
        os.kill(first, signal.SIGKILL)
        while not client.restarts:
            await asyncio.sleep(0.01)
        assert client.pid == second and (await client.stats()).running == 0
    finally:
        await client.close()
        spare.close()
