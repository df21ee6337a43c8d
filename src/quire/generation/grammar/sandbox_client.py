"""Grammars compiled on trial by processes that can be ended: no call to the compiler can be taken back, and what it
takes in time and memory is known only afterwards.

    vocabulary ──► '' ──► grammar ──► '' or why not ──► grammar ──► ...        (lines of JSON, through pipes)

A process takes one grammar after another, and ends with its parent. The system ends it when a grammar computes too long
or takes too much memory; the next one then has to wait for another process to start.

Knows: `quire.generation.grammar.sandbox_process` by name. Refuses to know: the compiler.
"""

from __future__ import annotations

import hashlib
import os
import select
import signal
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict

import msgspec

from quire.types.errors import ConfigError, InputError, OverloadedError
from quire.types.grammar import GrammarSpec, Vocabulary

SECONDS = 0.5  # of computing; what takes longer is refused. An engine waits longer for what was let in
PROCESSES = 4  # at once
PATIENCE = 6.0  # times the seconds of computing are waited for them, on a machine that is busy otherwise
START = 30.0  # seconds for a process to start
PASSED = 4096  # grammars known to be good
_Child = tuple[Vocabulary, "subprocess.Popen[bytes]"]


class Alphabet(msgspec.Struct):
    """A vocabulary of single bytes, as it travels."""

    tokens: list[bytes]
    special: list[int]
    ends: list[int]


class GrammarSandbox:
    def __init__(self, seconds: float = SECONDS):
        self._seconds = seconds
        self._room = threading.Semaphore(PROCESSES)
        self._lock = threading.Lock()
        self._idle: list[_Child] = []
        self._passed: OrderedDict[bytes, None] = OrderedDict()
        weakref.finalize(self, _end, self._idle)

    def check(self, spec: GrammarSpec, vocabulary: Vocabulary) -> None:
        """InputError with the reason if a grammar makes no sense, or takes too long or too much memory. `vocabulary`
        has single bytes and special tokens only."""
        name = hashlib.blake2b(f"{id(vocabulary)} {spec.kind} {spec.source}".encode(errors="replace")).digest()
        with self._lock:
            if name in self._passed:
                self._passed.move_to_end(name)
                return
        if not self._room.acquire(timeout=PATIENCE * self._seconds):
            raise OverloadedError("too many large grammars are being compiled; retry shortly")
        try:
            self._try(spec, vocabulary)
        finally:
            self._room.release()
        with self._lock:
            self._passed[name] = None
            if len(self._passed) > PASSED:
                self._passed.popitem(last=False)

    def _try(self, spec: GrammarSpec, vocabulary: Vocabulary) -> None:
        child = self._idling(vocabulary) or self._started(vocabulary)
        answer = _ask(child, spec, PATIENCE * self._seconds)
        if answer is None:
            late = child[1].wait() == -signal.SIGPROF
            much = f"longer than {self._seconds:g} s to compile" if late else "too much memory"
            raise _refused(f"the grammar takes {much}; make it smaller")
        with self._lock:
            self._idle.append(child)
        if answer:
            raise _refused(answer)

    def _idling(self, vocabulary: Vocabulary) -> _Child | None:
        """One that is free; of those that are not wanted, few are kept."""
        with self._lock:
            living = [child for child in self._idle if child[1].poll() is None]
            found = next((child for child in living if child[0] is vocabulary), None)
            kept = [child for child in living if child is not found][: PROCESSES - 1]
            _end([child for child in self._idle if child is not found and child not in kept])
            self._idle[:] = kept
            return found

    def _started(self, vocabulary: Vocabulary) -> _Child:
        pipe = subprocess.PIPE
        alone = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "quire.generation.grammar.sandbox_process", str(self._seconds)]
        child = vocabulary, subprocess.Popen(command, stdin=pipe, stdout=pipe, env=alone)
        alphabet = Alphabet(list(vocabulary.tokens), sorted(vocabulary.special), list(vocabulary.ends))
        if (answer := _ask(child, alphabet, START)) != "":
            _end([child])
            raise ConfigError(answer or "the process that tries grammars does not start")
        return child


def _ask(child: _Child, question: msgspec.Struct, seconds: float) -> str | None:
    """The answer; nothing if the process ended over it."""
    _, process = child
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(msgspec.json.encode(question) + b"\n")
        process.stdin.flush()
        waiting = select.poll()
        waiting.register(process.stdout, select.POLLIN)
        if not waiting.poll(1000 * seconds):
            raise OverloadedError(f"no grammar was compiled within {seconds:.1f} s, the machine is busy; retry shortly")
        if line := process.stdout.readline():
            return msgspec.json.decode(line, type=str)
    except BrokenPipeError:
        pass
    except BaseException:
        _end([child])
        raise
    return None


def _refused(reason: str) -> InputError:
    return InputError(reason, param="grammar", code="invalid_grammar")


def _end(children: list[_Child]) -> None:
    for _, process in children:
        process.kill()
        process.communicate()
