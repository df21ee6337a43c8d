"""The engine in a process of its own: the same answers, errors that cross over, and an orderly death."""

import os
import signal
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.types.errors import ConfigError, EngineDeadError
from quire.types.messages import GetStats, Query, Reply

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


def test_a_killed_engine_is_an_error_not_a_hang(default_model):
    llm = LLM("smollm2-135m", kv_memory="128M", process=True)
    stream = llm.stream("Once", SamplingParams(temperature=0, max_tokens=400))
    next(stream)
    os.kill(llm._link.pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="exit code -9"):
        for _ in stream:
            pass
    llm.close()


def test_words_that_come_just_after_a_look_are_not_lost(default_model):
    """A message that arrives between the poll that found nothing and the reading of the socket."""
    with LLM("smollm2-135m", kv_memory="128M", process=True) as llm:
        link = llm._link
        poll = link._poller.poll

        def too_early(milliseconds):
            """Gives up, and then there is something to read."""
            poll(60_000)
            return []

        link._poller.poll = too_early
        link.send(Query(GetStats()))
        assert [type(message) for message in link.receive(0.5)] == [Reply]
        link._poller.poll = poll
