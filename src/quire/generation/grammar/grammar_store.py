"""Compiled grammars, and the grammar state of each slot.

    admit ──► fork of the compiled grammar, moved along the tokens the answer has so far
    begin_masks ──► masks of the step's samples, filled in threads while the forward pass runs; `masks` waits for them,
              or fills them itself where they are so few that waking a thread takes longer
              (along a draft: as if each of its tokens had been sampled, while the grammar allows them)
    accept ──► the tokens sampled, and those the grammar forces after them (jump-ahead): they need no step of their own

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
from itertools import accumulate, takewhile
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from quire.types.grammar import GrammarSpec, TokenMasks, Vocabulary
from quire.types.plan import Admit
from quire.types.seams import Grammar, GrammarBackend

MAX_COMPILED_GRAMMARS = 128  # most recently used
MAX_INLINE_MASKS = 8  # filled without a thread, at 5 to 100 µs each
_MaskJob = tuple[Grammar, list[int], npt.NDArray[np.uint8]]  # a grammar, a draft, where its masks go


class GrammarStore:
    """Compiled grammars by what they were compiled from, in a thread, one by one: the most recently used, and those
    whose future from `prepare` is still referenced."""

    def __init__(self, backend: GrammarBackend, vocabulary: Callable[[], Vocabulary]):
        self._backend = backend
        self._load_vocabulary = vocabulary
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
            if len(self._recent) > MAX_COMPILED_GRAMMARS:
                self._recent.popitem(last=False)
            return known

    def _compile(self, spec: GrammarSpec) -> list[Grammar]:
        if self._vocabulary is None:
            self._vocabulary = self._load_vocabulary()
        whole = self._backend.compile(spec, self._vocabulary)
        return [self._backend.compile(part, self._vocabulary) for part in spec.parts] or [whole]

    def start(self, spec: GrammarSpec, branch: int, tokens: list[int]) -> Grammar:
        """For one more answer, which has these tokens so far. Waits for nothing: what was not prepared, or cannot go
        on, is a grammar with an error."""
        with self._lock:
            known = self._compiled.get(spec)
        if known is None or not known.done():
            return _FailedGrammar("it was not prepared")
        try:
            parts = known.result()
            grammar: Grammar = parts[branch if spec.kind == "each" else 0].fork()
            grammar.accept(tokens)
        except Exception as error:  # one answer's, not the step's
            return _FailedGrammar(f"{type(error).__name__}: {error}")
        return grammar

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)


class _FailedGrammar:
    """Stands for a grammar that failed, until the sample that ends its answer."""

    done = False

    def __init__(self, error: str):
        self.error = error

    def fill(self, row: npt.NDArray[np.uint8]) -> None:
        row[:] = 0
        row[0] = 1  # something must be sampled

    def accept(self, tokens: Sequence[int]) -> None: ...

    def forced(self) -> list[int]:
        return []

    def rollback(self, count: int) -> None: ...

    def fork(self) -> _FailedGrammar:
        return self


@dataclass
class _SlotGrammar:
    grammar: Grammar
    end: int  # position beyond which no token is wanted
    jump_ahead: bool  # whether forced tokens are accepted without a step


@dataclass(frozen=True)
class Accepted:
    tokens: list[int]  # those sampled, up to where the grammar ends, and those forced after them
    sampled: int = 1  # how many were sampled
    forced: Sequence[int] = ()  # indices of those that the grammar forced, sampled along a draft or not
    done: bool = False
    error: str = ""


class SlotGrammars:
    def __init__(self, store: GrammarStore, *, vocab_size: int, max_len: int):
        self._store = store
        self._bytes = -(-vocab_size // 8)
        self._max_len = max_len
        self._by_slot: dict[int, _SlotGrammar] = {}
        self._workers = max(1, min(8, (os.cpu_count() or 2) // 2))
        self._pool = ThreadPoolExecutor(self._workers, thread_name_prefix="quire-masks")
        self._pending: tuple[TokenMasks, list[_MaskJob], list[Future[None]]] | None = None

    def apply(self, frees: Sequence[int], admits: Sequence[Admit]) -> None:
        """Follow a plan's changes of slots."""
        for slot in frees:
            self._by_slot.pop(slot, None)
        for admit in admits:
            spec = admit.params.grammar
            if spec is not None:
                grammar = self._store.start(spec, admit.branch, admit.tokens[admit.prompt_len :])
                end = min(self._max_len, admit.prompt_len + (admit.params.max_tokens or self._max_len))
                # Where log-probabilities are wanted, every token has to come from the model.
                self._by_slot[admit.slot] = _SlotGrammar(grammar, end, admit.params.logprobs is None)

    def begin_masks(self, drafts: Sequence[tuple[int, list[int]]]) -> None:
        """Start to fill the masks of samples in slots: one after the known tokens, one after each token of a draft."""
        self._pending = None
        found = (
            [(live.grammar, draft) for slot, draft in drafts if (live := self._by_slot.get(slot))]
            if self._by_slot
            else []
        )
        if not found:
            return
        ends = list(accumulate(len(draft) + 1 for _, draft in found))
        masks = np.empty((ends[-1], self._bytes), np.uint8)
        work = [(*job, masks[end - len(job[1]) - 1 : end]) for job, end in zip(found, ends, strict=True)]
        if len(masks) <= MAX_INLINE_MASKS:
            self._pending = masks, work, []
            return
        share = -(-len(work) // self._workers)
        parts = [work[at : at + share] for at in range(0, len(work), share)]
        self._pending = masks, [], [self._pool.submit(_fill, part) for part in parts]

    def masks(self) -> TokenMasks | None:
        """The masks begun last, one row for each of the slots that has a grammar; waits for them."""
        if self._pending is None:
            return None
        masks, left, parts = self._pending
        _fill(left)
        for part in parts:
            part.result()
        return masks

    def accept(self, slot: int, position: int, tokens: list[int]) -> Accepted:
        """These tokens were sampled for a slot from `position` on. Along a draft, forced text may have been sampled in
        other tokens than those it is forced to have: then these count, as without a draft."""
        live = self._by_slot.get(slot)
        if live is None:
            return Accepted(tokens, len(tokens))
        grammar = live.grammar
        accepted: list[int] = []
        forced: list[int] = []
        while len(accepted) < len(tokens) and accepted == tokens[: len(accepted)] and not grammar.done:
            grammar.accept(tokens[len(accepted) : len(accepted) + 1])
            accepted.append(tokens[len(accepted)])
            more = grammar.forced()[: live.end - position - len(accepted)] if live.jump_ahead else []
            if more:
                grammar.accept(more)
                forced += range(len(accepted), len(accepted) + len(more))
                accepted += more
        sampled = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(accepted, tokens, strict=False)))
        return Accepted(accepted, sampled, forced, grammar.done, grammar.error)

    def close(self) -> None:
        """Compiled grammars stay in their store."""
        self._pool.shutdown()


def _fill(work: list[_MaskJob]) -> None:
    for grammar, draft, masks in work:
        grammar.fill(masks[0])
        taken = 0
        while taken < len(draft) and not grammar.done and masks[taken, draft[taken] // 8] >> draft[taken] % 8 & 1:
            grammar.accept(draft[taken : taken + 1])
            taken += 1
            if grammar.done:
                break
            grammar.fill(masks[taken])
        masks[taken + 1 :] = masks[0]  # after a token that is not allowed: never looked at
        if taken:
            grammar.rollback(taken)
