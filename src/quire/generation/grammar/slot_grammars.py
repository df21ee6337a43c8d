"""The grammar state of each slot, and the masks of a step's samples. No step waits for a grammar that takes long.

    apply ──► an answer's grammar, with the mask of how it may begin
    begin_masks ──► along drafts: masks as if each token of them had been sampled, filled in threads while the forward
              pass runs; `masks` gives them, and those made before
    accept ──► in threads: the tokens sampled, those the grammar forces after them (jump-ahead: they need no step of
              their own), and the mask of what may come next. What is not done soon is told of when it is; until then
              its answer takes part in no step

Answers that have one token each are moved together, which is quick and says nothing of what each of them takes. If it
took too long, each of them goes by itself for a while, by the clock. Answers that have been slow then share one thread,
of low priority. Forced tokens are those the tokenizer itself would make of the forced text, as far as what follows
cannot change them.

Refuses to know: torch, logits, how a grammar is written or parsed.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

import numpy as np

from quire.generation.grammar.answer_grammar import USUAL_S, AnswerGrammar, FailedGrammar, advance_each
from quire.generation.grammar.grammar_store import GrammarCopy, GrammarStore
from quire.types.grammar import GrammarSpec, TokenMasks
from quire.types.memory_use import usable_cores
from quire.types.plan import Admit
from quire.types.seams import Grammar, GrammarBackend

ALONE_TOKENS = 16  # by the clock, of an answer that was moved together with a slow one
PATIENCE_S = 0.01  # a step waits so long for its grammars to say what follows
REPLAY_S = 1.0  # and so long for that of a preempted answer to be where it was
SLOW_NICENESS = 10


@dataclass(frozen=True)
class Accepted:
    tokens: list[int]  # those sampled, up to where the grammar ends, and those forced after them
    sampled: int = 1  # how many were sampled
    forced: Sequence[int] = ()  # indices of those that the grammar forced, sampled along a draft or not
    done: bool = False
    error: str = ""


@dataclass(frozen=True, eq=False)
class Accepting:
    """What a thread makes of the tokens sampled for one of some answers."""

    task: Future[list[Accepted]]
    index: int

    @property
    def known(self) -> bool:
        return self.task.done()

    def result(self) -> Accepted:
        return self.task.result()[self.index]


@dataclass(eq=False)
class SlotGrammar:
    grammar: AnswerGrammar | FailedGrammar
    copy: GrammarCopy | None  # that it is a fork of
    end: int  # position beyond which no token is wanted
    jump_ahead: bool  # whether forced tokens are accepted without a step
    lock: threading.Lock = field(default_factory=threading.Lock)  # one thread at a time
    replay: Future[None] | None = None  # after preemption
    draft: list[int] = field(default_factory=list)  # of the step under way
    ahead: list[TokenMasks] = field(default_factory=list)  # masks after its tokens
    looking: Future[None] | None = None  # until they are all there
    stopped: bool = False  # they are no longer waited for
    sure: int = 1  # how many of the step's samples were drawn under a mask of their own
    alone: int = 0  # so many tokens are taken by itself

    def most(self, position: int) -> int:
        """Tokens that may be accepted from there on with those forced; 0: none are to be forced."""
        return self.end - position if self.jump_ahead else 0


class SlotGrammars:
    def __init__(self, store: GrammarStore, *, vocab_size: int, max_len: int):
        self._store = store
        self._bytes = -(-vocab_size // 8)
        self._max_len = max_len
        self._by_slot: dict[int, SlotGrammar] = {}
        workers = max(2, min(8, usable_cores() // 2))
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="quire-masks")
        self._slow = ThreadPoolExecutor(1, thread_name_prefix="quire-slow-masks", initializer=_lower_priority)
        self._step: list[SlotGrammar] = []  # whose masks the step under way needs

    def apply(self, frees: Sequence[int], admits: Sequence[Admit]) -> None:
        """Follow a plan's changes of slots."""
        for slot in frees:
            if freed := self._by_slot.pop(slot, None):
                freed.stopped = True
                if freed.copy is not None:
                    freed.copy.answers -= 1
        for admit in admits:
            spec = admit.params.grammar
            if spec is not None:
                end = min(self._max_len, admit.prompt_len + (admit.params.max_tokens or self._max_len))
                # Where log-probabilities are wanted, every token has to come from the model.
                live = SlotGrammar(*self._begin(spec, admit.branch), end, admit.params.logprobs is None)
                if tokens := admit.tokens[admit.prompt_len :]:
                    live.replay = self._lane(live).submit(_replay, live, tokens)
                self._by_slot[admit.slot] = live

    def _begin(self, spec: GrammarSpec, branch: int) -> tuple[AnswerGrammar | FailedGrammar, GrammarCopy | None]:
        """For one more answer. What was not prepared, or cannot go on, is a grammar with an error."""
        try:
            compiled = self._store.compiled(spec)
            if compiled is None:
                return FailedGrammar("it was not prepared", self._bytes), None

            def own() -> Grammar:
                compiled.spoiled = True
                return self._store.fresh(spec, branch)

            copy = self._store.copy_for(compiled, spec, branch)
            first_mask = compiled.first_masks[compiled.part(spec, branch)][: self._bytes]
            answer = AnswerGrammar(copy.grammar.fork(), own, first_mask)
            copy.answers += 1
            return answer, copy
        except Exception as error:  # one answer's, not the step's
            return FailedGrammar(f"{type(error).__name__}: {error}", self._bytes), None

    def begin_masks(self, drafts: Sequence[tuple[int, list[int]]]) -> None:
        """Start to look ahead along drafts; of the samples in slots, those that have a grammar need masks."""
        self._step = []
        for slot, draft in drafts if self._by_slot else ():
            if live := self._by_slot.get(slot):
                live.draft, live.ahead, live.stopped, live.sure = draft, [], False, 1
                live.looking = self._lane(live).submit(_look_ahead, live) if draft else None
                self._step.append(live)

    def masks(self) -> TokenMasks | None:
        """One for each sample with a grammar after its known tokens, and one after each token of its draft."""
        if not self._step:
            return None
        wait([live.replay for live in self._step if live.replay], REPLAY_S)
        wait([live.looking for live in self._step if live.looking], PATIENCE_S)
        masks = np.empty((sum(len(live.draft) + 1 for live in self._step), self._bytes), np.uint8)
        row = 0
        for live in self._step:
            if live.replay is not None and not live.replay.done():
                live.grammar = FailedGrammar("its answer was preempted, and takes too long to go on", self._bytes)
            live.replay, live.stopped = None, True
            end = row + len(live.draft) + 1
            masks[row:end] = live.grammar.mask  # after a token that is not allowed: never looked at
            complete = live.looking is None or live.looking.done()
            for at, mask in enumerate(ahead := list(live.ahead)):
                masks[row + 1 + at] = mask
            live.sure = len(live.draft) + 1 if complete else len(ahead) + 1
            row = end
        return masks

    def accept(self, sampled: Sequence[tuple[int, int, list[int]]]) -> list[Accepting | None]:
        """Of (slot, position, tokens sampled from there on); None: for a slot without a grammar. Waits a little."""
        found: list[Accepting | None] = [None] * len(sampled)
        places: list[int] = []
        moves: list[_Move] = []
        for at, (slot, position, tokens) in enumerate(sampled if self._by_slot else ()):
            if live := self._by_slot.get(slot):
                if len(tokens) == 1 and not live.alone and isinstance(live.grammar, AnswerGrammar):
                    places.append(at)
                    moves.append(_Move(live, live.grammar, position, tokens[0]))
                else:
                    found[at] = Accepting(self._lane(live).submit(_accept, live, position, tokens), 0)
        if moves:
            task = self._pool.submit(_accept_each, self._store.backend, moves)
            for index, at in enumerate(places):
                found[at] = Accepting(task, index)
        wait({one.task for one in found if one is not None}, PATIENCE_S)
        return found

    def _lane(self, live: SlotGrammar) -> ThreadPoolExecutor:
        return self._slow if live.grammar.slow else self._pool

    def close(self) -> None:
        """Compiled grammars stay in their store."""
        self._pool.shutdown(cancel_futures=True)
        self._slow.shutdown(cancel_futures=True)


def _replay(live: SlotGrammar, tokens: list[int]) -> None:
    with live.lock:
        live.grammar.advance(tokens, most=0)


def _look_ahead(live: SlotGrammar) -> None:
    with live.lock:
        live.grammar.look_ahead(live.draft, live.ahead, lambda: live.stopped)


def _accept(live: SlotGrammar, position: int, tokens: list[int]) -> list[Accepted]:
    with live.lock:
        grammar = live.grammar
        try:
            accepted, forced = grammar.advance(tokens[: live.sure], most=live.most(position))
            live.alone = ALONE_TOKENS if grammar.slow else max(0, live.alone - 1)
            sampled = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(accepted, tokens, strict=False)))
            return [Accepted(accepted, sampled, forced, grammar.done, grammar.error)]
        except Exception as error:  # one answer's, not the step's
            return [_failed(tokens, error)]


class _Move(NamedTuple):
    live: SlotGrammar
    answer: AnswerGrammar
    position: int
    token: int


def _accept_each(backend: GrammarBackend, moves: Sequence[_Move]) -> list[Accepted]:
    with ExitStack() as stack:
        for move in moves:
            stack.enter_context(move.live.lock)
        answers, tokens = [move.answer for move in moves], [move.token for move in moves]
        began = time.perf_counter()
        try:
            found = advance_each(backend, answers, tokens, [move.live.most(move.position) for move in moves])
        except Exception as error:
            return [_failed([token], error) for token in tokens]
        if time.perf_counter() - began > USUAL_S * (1 + len(moves) / backend.threads):
            for move in moves:
                move.live.alone = ALONE_TOKENS
        return [
            Accepted(accepted, 1, forced, answer.done, answer.error)
            for (accepted, forced), answer in zip(found, answers, strict=True)
        ]


def _failed(tokens: list[int], error: Exception) -> Accepted:
    return Accepted(tokens[:1], 1, error=f"{type(error).__name__}: {error}")


def _lower_priority() -> None:
    with suppress(OSError, AttributeError):  # where a thread has a priority of its own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), SLOW_NICENESS)
