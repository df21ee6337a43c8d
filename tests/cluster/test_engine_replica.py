"""The actor that hosts an engine process, without Ray: which ends of the process it answers with another one."""

from __future__ import annotations

import os
import queue
import sys
from collections.abc import Iterator

import msgspec
import pytest

from quire.cluster.engine_replica import EngineReplica
from quire.types.membership import RESTART_EXIT_CODE, CurveKeys, ReplicaMembership

# In place of an engine: says that it is ready, who it is, and ends with the exit code that it is told.
ENGINE = """
import json, os, sys
member = json.loads(sys.stdin.buffer.read())
os.write(member["heartbeat_fd"], b".")
with open(sys.argv[1], "w") as said:
    said.write(member["identity"])
with open(sys.argv[2]) as told:
    os._exit(int(told.read()))
"""


class Hosted:
    """An actor whose engine is a script, and what became of both."""

    def __init__(self, folder: str, monkeypatch: pytest.MonkeyPatch):
        self._said, self._told = f"{folder}/said", f"{folder}/told"
        os.mkfifo(self._said)
        os.mkfifo(self._told)
        self.exits: queue.SimpleQueue[int] = queue.SimpleQueue()
        monkeypatch.setattr(os, "_exit", self.exits.put)
        command = [sys.executable, "-c", ENGINE, self._said, self._told]
        start = EngineReplica._start

        def start_script(actor: EngineReplica) -> None:
            actor._command = command
            start(actor)

        monkeypatch.setattr(EngineReplica, "_start", start_script)
        member = ReplicaMembership("", CurveKeys("", "", ""), "00", 64)
        self.actor = EngineReplica(3, "tcp://nowhere", msgspec.json.encode(member), {}, hang_timeout=60.0)

    def identity(self) -> str:
        """Of the process that is there, once it is."""
        with open(self._said) as said:
            return said.read()

    def end(self, code: int) -> None:
        with open(self._told, "w") as told:
            told.write(str(code))


@pytest.fixture
def hosted(tmp_path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosted]:
    made = Hosted(str(tmp_path), monkeypatch)
    yield made
    made.actor._process.kill()


def test_a_process_that_makes_way_for_another_is_followed_by_one(hosted: Hosted) -> None:
    first = hosted.identity()
    hosted.end(RESTART_EXIT_CODE)
    second = hosted.identity()
    assert first and second and first != second
    hosted.actor.check_health()
    assert hosted.exits.empty(), "for Ray nothing happened"
    hosted.end(0)
    assert hosted.exits.get(timeout=20) == 1, "Ray starts another actor"


def test_a_process_that_hangs_is_not_well(hosted: Hosted) -> None:
    hosted.identity()
    hosted.actor.check_health()
    hosted.actor._heard -= 61.0
    with pytest.raises(RuntimeError, match="no sign of life for 61 s"):
        hosted.actor.check_health()
    hosted.end(0)
    hosted.exits.get(timeout=20)
