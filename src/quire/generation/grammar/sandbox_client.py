"""The grammar sandbox: grammars of clients are compiled first by processes that can be killed, since a call to the
compiler cannot be cancelled, and its time and memory are known only afterwards.

    vocabulary ──► '' ──► grammar ──► '' or why not ──► grammar ──► ...        (lines of JSON, through pipes)

A process compiles one grammar after another, and ends with its parent. The system kills it when a grammar takes too
much CPU time or memory; the next grammar then waits for another process to start.

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

from quire.types.errors import ConfigError, InputError, NotInstalledError, OverloadedError
from quire.types.grammar import GrammarSpec, Vocabulary

MAX_COMPILE_CPU_S = 0.5  # what takes longer is refused; the engine allows more for what passed
MAX_PROCESSES = 4
MAX_WAIT_RATIO = 6.0  # of wall-clock to CPU seconds, on a machine that is busy otherwise
START_TIMEOUT_S = 30.0
MAX_PASSED = 4096  # grammars remembered as compiled
_Child = tuple[Vocabulary, "subprocess.Popen[bytes]"]


class SandboxVocabulary(msgspec.Struct):
    """A vocabulary of single bytes, as it travels."""

    tokens: list[bytes]
    special: list[int]
    ends: list[int]


class GrammarSandbox:
    def __init__(self, seconds: float = MAX_COMPILE_CPU_S):
        self._seconds = seconds
        self._slots = threading.Semaphore(MAX_PROCESSES)
        self._lock = threading.Lock()
        self._idle: list[_Child] = []
        self._passed: OrderedDict[bytes, None] = OrderedDict()
        weakref.finalize(self, _kill, self._idle)

    def check(self, spec: GrammarSpec, vocabulary: Vocabulary) -> None:
        """InputError with the reason if a grammar makes no sense, or takes too long or too much memory. `vocabulary`
        has single bytes and special tokens only."""
        known = f"{id(vocabulary)} {spec.kind} {spec.lead} {spec.source}"
        name = hashlib.blake2b(known.encode(errors="replace")).digest()
        with self._lock:
            if name in self._passed:
                self._passed.move_to_end(name)
                return
        if not self._slots.acquire(timeout=MAX_WAIT_RATIO * self._seconds):
            raise OverloadedError("too many large grammars are being compiled; retry shortly")
        try:
            self._compile(spec, vocabulary)
        finally:
            self._slots.release()
        with self._lock:
            self._passed[name] = None
            if len(self._passed) > MAX_PASSED:
                self._passed.popitem(last=False)

    def _compile(self, spec: GrammarSpec, vocabulary: Vocabulary) -> None:
        child = self._take_idle(vocabulary) or self._start(vocabulary)
        answer = _request(child, spec, MAX_WAIT_RATIO * self._seconds)
        if answer is None:
            timed_out = child[1].wait() == -signal.SIGPROF
            much = f"longer than {self._seconds:g} s to compile" if timed_out else "too much memory"
            raise _refused(f"the grammar takes {much}; make it smaller")
        with self._lock:
            self._idle.append(child)
        if answer:
            raise _refused(answer)

    def _take_idle(self, vocabulary: Vocabulary) -> _Child | None:
        """One that is free, out of the pool; of the others a few are kept."""
        with self._lock:
            living = [child for child in self._idle if child[1].poll() is None]
            found = next((child for child in living if child[0] is vocabulary), None)
            kept = [child for child in living if child is not found][: MAX_PROCESSES - 1]
            _kill([child for child in self._idle if child is not found and child not in kept])
            self._idle[:] = kept
            return found

    def _start(self, vocabulary: Vocabulary) -> _Child:
        pipe = subprocess.PIPE
        alone = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-P", "-m", "quire.generation.grammar.sandbox_process", str(self._seconds)]
        child = vocabulary, subprocess.Popen(command, stdin=pipe, stdout=pipe, env=alone)
        sent = SandboxVocabulary(list(vocabulary.tokens), sorted(vocabulary.special), list(vocabulary.ends))
        if (answer := _request(child, sent, START_TIMEOUT_S)) != "":
            _kill([child])
            raise NotInstalledError(answer) if answer else ConfigError("the process that tries grammars does not start")
        return child


def _request(child: _Child, question: msgspec.Struct, seconds: float) -> str | None:
    """The reply; None if the process was killed over it."""
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
        _kill([child])
        raise
    return None


def _refused(reason: str) -> InputError:
    return InputError(reason, param="grammar", code="invalid_grammar")


def _kill(children: list[_Child]) -> None:
    for _, process in children:
        process.kill()
        process.communicate()
