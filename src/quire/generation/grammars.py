"""Grammars at work: which are compiled, and where the answer in each slot stands in its own.

    admit ──► fork of the compiled grammar, moved along the tokens the answer has so far
    begin ──► masks of the step's draws, made in threads while the forward pass runs; `masks` waits for them
    accept ──► the token drawn, and those the grammar forces after it: they need no step of their own

Forced tokens are those the tokenizer itself would make of the forced text, as far as what follows cannot change them.

Refuses to know: torch, logits, how a grammar is written or parsed.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.types.grammar import GrammarSpec, Vocabulary
from quire.types.plan import Admit
from quire.types.seams import Grammar, GrammarBackend

KEPT = 128  # compiled grammars
Masks = npt.NDArray[np.uint8]  # [rows, bytes]: a bit a token, lowest first


class GrammarStore:
    """Compiled grammars by what they were compiled from, the most recently used; compiled in a thread, one by one."""

    def __init__(self, backend: GrammarBackend, vocabulary: Callable[[], Vocabulary]):
        self._backend = backend
        self._load = vocabulary
        self._vocabulary: Vocabulary | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="quire-grammars")
        self._lock = threading.Lock()
        self._compiled: OrderedDict[GrammarSpec, Future[Grammar]] = OrderedDict()

    def prepare(self, spec: GrammarSpec) -> Future[Grammar]:
        with self._lock:
            known = self._compiled.get(spec)
            if known is None or (known.done() and known.exception()):  # what failed may have lacked time only
                self._compiled[spec] = self._thread.submit(self._compile, spec)
            self._compiled.move_to_end(spec)
            if len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
            return self._compiled[spec]

    def _compile(self, spec: GrammarSpec) -> Grammar:
        if self._vocabulary is None:
            self._vocabulary = self._load()
        return self._backend.compile(spec, self._vocabulary)

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)


@dataclass
class _Live:
    grammar: Grammar
    end: int  # position beyond which no token is wanted
    jumps: bool  # whether forced tokens are taken without a step


@dataclass(frozen=True)
class Accepted:
    tokens: list[int]  # the drawn one and those forced after it
    done: bool = False
    error: str = ""


class SlotGrammars:
    def __init__(self, store: GrammarStore, *, vocab_size: int, max_len: int):
        self._store = store
        self._bytes = -(-vocab_size // 8)
        self._max_len = max_len
        self._live: dict[int, _Live] = {}
        self._workers = max(1, min(8, (os.cpu_count() or 2) // 2))
        self._pool = ThreadPoolExecutor(self._workers, thread_name_prefix="quire-masks")
        self._begun: tuple[Masks, list[Future[None]]] | None = None

    def apply(self, frees: Sequence[int], admits: Sequence[Admit]) -> None:
        """Follow a plan's changes of slots."""
        for slot in frees:
            self._live.pop(slot, None)
        for admit in admits:
            spec = admit.params.grammar
            if spec is not None:
                grammar = self._store.prepare(spec).result().fork()
                grammar.accept(admit.tokens[admit.prompt_len :])
                end = min(self._max_len, admit.prompt_len + (admit.params.max_tokens or self._max_len))
                # Where log-probabilities are wanted, every token has to come from the model.
                self._live[admit.slot] = _Live(grammar, end, admit.params.logprobs is None)

    def begin(self, slots: Sequence[int]) -> None:
        """Start to fill the masks for a draw in each of these slots."""
        grammars = [live.grammar for slot in slots if (live := self._live.get(slot))] if self._live else []
        if not grammars:
            self._begun = None
            return
        masks = np.empty((len(grammars), self._bytes), np.uint8)
        share = -(-len(grammars) // self._workers)
        parts = [slice(at, at + share) for at in range(0, len(grammars), share)]
        self._begun = masks, [self._pool.submit(_fill, grammars[part], masks[part]) for part in parts]

    def masks(self) -> Masks | None:
        """The masks begun last, one row for each of the slots that has a grammar; waits for them."""
        if self._begun is None:
            return None
        masks, parts = self._begun
        for part in parts:
            part.result()
        return masks

    def accept(self, slot: int, position: int, token: int) -> Accepted:
        """The token at `position` of a slot was drawn."""
        live = self._live.get(slot)
        if live is None:
            return Accepted([token])
        grammar = live.grammar
        grammar.accept([token])
        forced = grammar.forced()[: live.end - position - 1] if live.jumps else []
        if forced:
            grammar.accept(forced)
        return Accepted([token, *forced], grammar.done, grammar.error)

    def close(self) -> None:
        self._pool.shutdown()
        self._store.close()


def _fill(grammars: list[Grammar], masks: Masks) -> None:
    for grammar, row in zip(grammars, masks, strict=True):
        grammar.fill(row)
