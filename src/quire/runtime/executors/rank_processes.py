"""The processes of an engine's other ranks, as rank 0 sees them: started, told what to do, watched, ended.

A rank that dies is noticed at once, by a thread that waits for it: whatever rank 0 waits for is then given up, and
`error` says why. Refuses to know: what ranks compute.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

import msgspec

from quire.runtime.executors.rank_messages import EndRank, FromRank, RankFailed, ToRank
from quire.types.config import EngineOptions
from quire.types.errors import EngineDeadError

log = logging.getLogger(__name__)

END_WAIT_S = 5.0  # that a rank has to end by itself
DEATH_WAIT_S = 1.0  # for the end of a process to be known whose connections broke
T = TypeVar("T", bound=FromRank)


class RankProcesses:
    """Ranks 1, 2, ..., one for each of these options."""

    def __init__(self, options: Sequence[EngineOptions]):
        self.directory = Path(tempfile.mkdtemp(prefix="quire-ranks-"))  # mode 0700
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromRank)
        self._links: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ending = False
        self._death = ""
        self._killed = ""  # ... if a signal ended it
        self._died = threading.Event()
        self._give_up: Callable[[], None] = lambda: None
        for rank, one in enumerate(options, 1):
            self._start(rank, one)

    def _start(self, rank: int, options: EngineOptions) -> None:
        ours, theirs = Pipe()
        said = (str(theirs.fileno()), str(os.getpid()), str(self.directory), str(rank), json.dumps(options.flat()))
        command = [sys.executable, "-P", "-m", "quire.runtime.executors.rank_process", *said]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        theirs.close()
        self._links.append(ours)
        self._processes.append(process)
        threading.Thread(target=self._watch, args=(rank, process), name=f"quire-rank-{rank}", daemon=True).start()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if not self._ending:
            how = f"was ended by signal {-code}" if code < 0 else f"ended with status {code}"
            found = f"rank {rank} (process {process.pid}) {how}"
            self._death = self._death or found
            self._killed = self._killed or (found if code < 0 else "")
            self._died.set()
            self._give_up()

    def when_one_dies(self, give_up: Callable[[], None]) -> None:
        """What to do, in a thread, so that nothing waits for a rank that is gone."""
        self._give_up = give_up

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def send(self, message: ToRank) -> None:
        """To all of them."""
        frame = self._encoder.encode(message)
        try:
            for link in self._links:
                link.send_bytes(frame)
        except OSError:
            raise self.error("it does not listen any more") from None

    def receive(self, kind: type[T]) -> list[T]:
        """What each says next, if it is of this kind; else why not."""
        found = []
        for link in self._links:
            try:
                said = self._decoder.decode(link.recv_bytes())
            except (EOFError, OSError):
                raise self.error("it ended before it was ready") from None
            if isinstance(said, RankFailed):
                raise EngineDeadError(f"a rank failed: {self._cause(said)}")
            assert isinstance(said, kind), said
            found.append(said)
        return found

    def error(self, otherwise: str) -> EngineDeadError:
        """Why the engine cannot go on: what a rank said last, how it ended, or what rank 0 found."""
        for link in self._links:
            try:
                while link.poll(0):
                    if isinstance(said := self._decoder.decode(link.recv_bytes()), RankFailed):
                        return EngineDeadError(f"a rank failed: {self._cause(said)}")
            except (EOFError, OSError):
                continue
        self._died.wait(DEATH_WAIT_S)  # what rank 0 found may be what a death looks like from there
        return EngineDeadError(f"a rank failed: {self._death or otherwise}")

    def _cause(self, said: RankFailed) -> str:
        """What a rank says may be what the death of another looks like from there."""
        self._died.wait(DEATH_WAIT_S)
        return self._killed or said.reason

    @property
    def dead(self) -> bool:
        return bool(self._death)

    def close(self) -> None:
        self._ending = True
        for link in self._links:
            try:
                link.send_bytes(self._encoder.encode(EndRank()))
            except OSError:
                continue
        for process in self._processes:
            try:
                process.wait(END_WAIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for link in self._links:
            link.close()
        shutil.rmtree(self.directory, ignore_errors=True)
