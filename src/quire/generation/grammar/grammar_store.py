"""Grammars at work: which are compiled, and where the answer in each slot stands in its own.

    admit ──► fork of the compiled grammar, moved along the tokens the answer has so far
    begin ──► masks of the step's draws, made in threads while the forward pass runs; `masks` waits for them, or makes
              them where they are so few that waking a thread takes longer
              (along a draft: as if each of its tokens had been drawn, while the grammar allows them)
    accept ──► the tokens drawn, and those the grammar forces after them: they need no step of their own

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
from itertools import accumulate
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from quire.types.grammar import GrammarSpec, Vocabulary
from quire.types.plan import Admit
from quire.types.seams import Grammar, GrammarBackend

KEPT = 128  # compiled grammars
FEW = 8  # masks, of 5 to 100 µs each
_Work = tuple[Grammar, list[int], npt.NDArray[np.uint8]]  # a grammar, a draft, where its masks go
Masks = npt.NDArray[np.uint8]  # [rows, bytes]: a bit a token, lowest first


class GrammarStore:
    """Compiled grammars by what they were compiled from, in a thread, one by one: the most recently used, and as long
    as somebody keeps what `prepare` gave them, theirs."""

    def __init__(self, backend: GrammarBackend, vocabulary: Callable[[], Vocabulary]):
        self._backend = backend
        self._load = vocabulary
        self._vocabulary: Vocabulary | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="quire-grammars")
        self._lock = threading.Lock()
        self._compiled: WeakValueDictionary[GrammarSpec, Future[Any]] = WeakValueDictionary()
        self._recent: OrderedDict[GrammarSpec, Future[Any]] = OrderedDict()

    def prepare(self, spec: GrammarSpec) -> Future[Any]:
        """Done when answers can begin under this grammar; they can as long as it is kept."""
        with self._lock:
            known = self._compiled.get(spec)
            if known is None or (known.done() and known.exception()):  # what failed may have lacked time only
                known = self._compiled[spec] = self._thread.submit(self._compile, spec)
            self._recent[spec] = known
            self._recent.move_to_end(spec)
            if len(self._recent) > KEPT:
                self._recent.popitem(last=False)
            return known

    def _compile(self, spec: GrammarSpec) -> list[Grammar]:
        if self._vocabulary is None:
            self._vocabulary = self._load()
        whole = self._backend.compile(spec, self._vocabulary)
        return [self._backend.compile(part, self._vocabulary) for part in spec.parts] or [whole]

    def begin(self, spec: GrammarSpec, branch: int, tokens: list[int]) -> Grammar:
        """For one more answer, which has these tokens so far. Waits for nothing: what was not prepared, or cannot go
        on, is a grammar with an error."""
        with self._lock:
            known = self._compiled.get(spec)
        if known is None or not known.done():
            return _Failed("it was not prepared")
        try:
            parts = known.result()
            grammar: Grammar = parts[branch if spec.kind == "each" else 0].fork()
            grammar.accept(tokens)
        except Exception as error:  # one answer's, not the step's
            return _Failed(f"{type(error).__name__}: {error}")
        return grammar

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)


class _Failed:
    """What stands for a grammar that there is none of, until the draw that ends its answer."""

    done = False

    def __init__(self, error: str):
        self.error = error

    def fill(self, row: npt.NDArray[np.uint8]) -> None:
        row[:] = 0
        row[0] = 1  # something is drawn

    def accept(self, tokens: Sequence[int]) -> None: ...

    def forced(self) -> list[int]:
        return []

    def rollback(self, count: int) -> None: ...

    def fork(self) -> _Failed:
        return self


@dataclass
class _Live:
    grammar: Grammar
    end: int  # position beyond which no token is wanted
    jumps: bool  # whether forced tokens are taken without a step


@dataclass(frozen=True)
class Accepted:
    tokens: list[int]  # those drawn, up to where the grammar ends, and those forced after them
    drawn: int = 1  # how many were drawn
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
        self._begun: tuple[Masks, list[_Work], list[Future[None]]] | None = None

    def apply(self, frees: Sequence[int], admits: Sequence[Admit]) -> None:
        """Follow a plan's changes of slots."""
        for slot in frees:
            self._live.pop(slot, None)
        for admit in admits:
            spec = admit.params.grammar
            if spec is not None:
                grammar = self._store.begin(spec, admit.branch, admit.tokens[admit.prompt_len :])
                end = min(self._max_len, admit.prompt_len + (admit.params.max_tokens or self._max_len))
                # Where log-probabilities are wanted, every token has to come from the model.
                self._live[admit.slot] = _Live(grammar, end, admit.params.logprobs is None)

    def begin(self, draws: Sequence[tuple[int, list[int]]]) -> None:
        """Start to fill the masks for draws in slots: one after the tokens known, one after each token of a draft."""
        self._begun = None
        found = [(live.grammar, draft) for slot, draft in draws if (live := self._live.get(slot))] if self._live else []
        if not found:
            return
        ends = list(accumulate(len(draft) + 1 for _, draft in found))
        masks = np.empty((ends[-1], self._bytes), np.uint8)
        work = [(*job, masks[end - len(job[1]) - 1 : end]) for job, end in zip(found, ends, strict=True)]
        if len(masks) <= FEW:
            self._begun = masks, work, []
            return
        share = -(-len(work) // self._workers)
        parts = [work[at : at + share] for at in range(0, len(work), share)]
        self._begun = masks, [], [self._pool.submit(_fill, part) for part in parts]

    def masks(self) -> Masks | None:
        """The masks begun last, one row for each of the slots that has a grammar; waits for them."""
        if self._begun is None:
            return None
        masks, left, parts = self._begun
        _fill(left)
        for part in parts:
            part.result()
        return masks

    def accept(self, slot: int, position: int, tokens: list[int]) -> Accepted:
        """These tokens were drawn for a slot from `position` on."""
        live = self._live.get(slot)
        if live is None:
            return Accepted(tokens, len(tokens))
        grammar = live.grammar
        drawn = 0
        while drawn < len(tokens) and not grammar.done:
            grammar.accept(tokens[drawn : drawn + 1])
            drawn += 1
        forced = grammar.forced()[: live.end - position - drawn] if live.jumps else []
        if forced:
            grammar.accept(forced)
        return Accepted(tokens[:drawn] + forced, drawn, grammar.done, grammar.error)

    def close(self) -> None:
        """What is compiled stays with its store, for the next to have slots."""
        self._pool.shutdown()


def _fill(work: list[_Work]) -> None:
    for grammar, draft, masks in work:
        grammar.fill(masks[0])
        taken = 0
        while taken < len(draft) and not grammar.done and masks[taken, draft[taken] // 8] >> draft[taken] % 8 & 1:
            grammar.accept(draft[taken : taken + 1])
            taken += 1
            if grammar.done:
                break
            grammar.fill(masks[taken])
        masks[taken + 1 :] = masks[0]  # what follows a token that may not be: never looked at
        if taken:
            grammar.rollback(taken)
