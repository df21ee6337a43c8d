"""Compiled grammars by what they were compiled from.

Answers begin with a fork of a compiled grammar. Forks share the compiler's lexer: what it has learnt, which makes them
cheap; a lock, because of which further copies are compiled while many answers use the grammar; and its limits and
errors, which are no other answer's business. An answer that fails is tried again on a grammar of its own
(`answer_grammar`), and what it was forked from is not used for new requests.

Refuses to know: slots, steps, how a grammar is written or parsed.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from weakref import WeakValueDictionary

import numpy as np

from quire.generation.grammar.thought_grammar import compile_answer
from quire.types.errors import InputError, OverloadedError
from quire.types.grammar import GrammarSpec, TokenMasks, Vocabulary
from quire.types.seams import Grammar, GrammarBackend

MAX_COMPILED_GRAMMARS = 128  # most recently used
FORKS = 8  # of one grammar at a time, which wait for each other, until another is compiled beside it
MAX_COPIED = 8  # so many grammars keep their copies when nobody uses them
QUICK_COMPILE_S = 0.1  # and another, if that took no longer


@dataclass(eq=False)
class GrammarCopy:
    """One of several that were compiled from the same."""

    grammar: Grammar
    kin: list[GrammarCopy]  # all of them
    answers: int = 0  # that go on with forks of it

    def __post_init__(self) -> None:
        self.number = len(self.kin)
        self.kin.append(self)


@dataclass
class CompiledGrammar:
    """One grammar for all answers to a request, or one for each of them."""

    parts: list[list[GrammarCopy]]
    first_masks: list[TokenMasks]  # what each may begin with
    copying: bool = False  # others are being compiled, or take too long
    spoiled: bool = False  # an answer failed on what its forks share

    def part(self, spec: GrammarSpec, branch: int) -> int:
        return branch if spec.kind == "each" else 0


class GrammarStore:
    """Grammars are compiled in a thread, one by one. Kept are the most recently used, and those whose future from
    `prepare` is still referenced."""

    def __init__(self, backend: GrammarBackend, vocabulary: Callable[[], Vocabulary]):
        self.backend = backend
        self._load_vocabulary = vocabulary
        self._vocabulary: Vocabulary | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="quire-grammars")
        self._lock = threading.Lock()
        self._compiled: WeakValueDictionary[GrammarSpec, Future[CompiledGrammar]] = WeakValueDictionary()
        self._copied: OrderedDict[int, list[GrammarCopy]] = OrderedDict()  # those with several copies
        self._recent: OrderedDict[GrammarSpec, Future[CompiledGrammar]] = OrderedDict()

    def prepare(self, spec: GrammarSpec) -> Future[CompiledGrammar]:
        """Done when answers can begin under this grammar; they can as long as it is kept."""
        with self._lock:
            known = self._compiled.get(spec)
            # What failed may have lacked time only.
            if known is None or (known.done() and (known.exception() or known.result().spoiled)):
                known = self._compiled[spec] = self._thread.submit(self._compile, spec)
            self._recent[spec] = known
            self._recent.move_to_end(spec)
            if len(self._recent) > MAX_COMPILED_GRAMMARS:
                self._recent.popitem(last=False)
            return known

    def _compile(self, spec: GrammarSpec) -> CompiledGrammar:
        whole = compile_answer(self.backend, spec, self._known_vocabulary())
        parts = [compile_answer(self.backend, part, self._known_vocabulary()) for part in spec.parts] or [whole]
        masks = np.zeros((len(parts), -(-len(self._known_vocabulary().tokens) // 8)), np.uint8)
        for part, row in zip(parts, masks, strict=True):
            part.fork().fill(row)
        return CompiledGrammar([GrammarCopy(part, []).kin for part in parts], list(masks))

    def _known_vocabulary(self) -> Vocabulary:
        if self._vocabulary is None:
            self._vocabulary = self._load_vocabulary()
        return self._vocabulary

    def compiled(self, spec: GrammarSpec) -> CompiledGrammar | None:
        """What was prepared, if that is done; waits for nothing."""
        with self._lock:
            known = self._compiled.get(spec)
        return known.result() if known is not None and known.done() else None

    def copy_for(self, compiled: CompiledGrammar, spec: GrammarSpec, branch: int) -> GrammarCopy:
        """The one with the fewest answers. Where they are many, there will be others for answers to come."""
        copies = compiled.parts[compiled.part(spec, branch)]
        if self._crowded(copies) and not compiled.copying:
            compiled.copying = True
            self._thread.submit(self._copy, compiled, copies, spec, branch)
        return min(copies, key=lambda copy: copy.answers)

    def _crowded(self, copies: list[GrammarCopy]) -> bool:
        return len(copies) < self.backend.threads and sum(copy.answers for copy in copies) >= FORKS * len(copies)

    def _copy(self, compiled: CompiledGrammar, copies: list[GrammarCopy], spec: GrammarSpec, branch: int) -> None:
        """One at a time: other grammars wait for the thread too."""
        began = time.perf_counter()
        with suppress(InputError, OverloadedError):  # it goes without
            GrammarCopy(self.fresh(spec, branch), copies)
            self._keep_few(copies)
            if time.perf_counter() - began > QUICK_COMPILE_S:
                return
            compiled.copying = self._crowded(copies)
            if compiled.copying:
                self._thread.submit(self._copy, compiled, copies, spec, branch)

    def _keep_few(self, copies: list[GrammarCopy]) -> None:
        """Of grammars that many answers used once, the first copy stays."""
        self._copied[id(copies)] = copies
        self._copied.move_to_end(id(copies))
        for kept in list(self._copied.values())[:-MAX_COPIED]:
            if not any(copy.answers for copy in kept):
                del kept[1:], self._copied[id(kept)]

    def fresh(self, spec: GrammarSpec, branch: int) -> Grammar:
        """A grammar that shares nothing with other answers; compiled by the caller's own thread."""
        part = spec.parts[branch] if spec.kind == "each" else spec
        return compile_answer(self.backend, part, self._known_vocabulary())

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)
