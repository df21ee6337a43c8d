"""The grammar state of each slot, and the masks of a step's samples. No step waits for a grammar that takes long.

    apply ──► an answer's grammar, with the mask of how it may begin
    begin_masks ──► along drafts: masks as if each token of them had been sampled, filled in threads while the forward
              pass runs; `masks` gives them, and those made before
    accept ──► in a thread: the tokens sampled, those the grammar forces after them (jump-ahead: they need no step of
              their own), and the mask of what may come next. What is not done soon is told of when it is; until then
              its answer takes part in no step

Forced tokens are those the tokenizer itself would make of the forced text, as far as what follows cannot change them.
Answers that have been slow share one thread, of low priority.

Refuses to know: torch, logits, how a grammar is written or parsed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np

from quire.generation.grammar.answer_grammar import AnswerGrammar, FailedGrammar
from quire.generation.grammar.grammar_store import GrammarStore
from quire.types.grammar import GrammarSpec, TokenMasks
from quire.types.memory_use import usable_cores
from quire.types.plan import Admit
from quire.types.seams import Grammar

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


@dataclass(eq=False)
class SlotGrammar:
    grammar: AnswerGrammar | FailedGrammar
    end: int  # position beyond which no token is wanted
    jump_ahead: bool  # whether forced tokens are accepted without a step
    lock: threading.Lock = field(default_factory=threading.Lock)  # one thread at a time
    replay: Future[None] | None = None  # after preemption
    draft: list[int] = field(default_factory=list)  # of the step under way
    ahead: list[TokenMasks] = field(default_factory=list)  # masks after its tokens
    looking: Future[None] | None = None  # until they are all there
    stopped: bool = False  # they are no longer waited for
    sure: int = 1  # how many of the step's samples were drawn under a mask of their own


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
        for admit in admits:
            spec = admit.params.grammar
            if spec is not None:
                end = min(self._max_len, admit.prompt_len + (admit.params.max_tokens or self._max_len))
                # Where log-probabilities are wanted, every token has to come from the model.
                live = SlotGrammar(self._begin(spec, admit.branch), end, admit.params.logprobs is None)
                if tokens := admit.tokens[admit.prompt_len :]:
                    live.replay = self._lane(live).submit(_replay, live, tokens)
                self._by_slot[admit.slot] = live

    def _begin(self, spec: GrammarSpec, branch: int) -> AnswerGrammar | FailedGrammar:
        """For one more answer. What was not prepared, or cannot go on, is a grammar with an error."""
        try:
            compiled = self._store.compiled(spec)
            if compiled is None:
                return FailedGrammar("it was not prepared", self._bytes)
            part = compiled.part(spec, branch)

            def own() -> Grammar:
                compiled.spoiled = True
                return self._store.fresh(spec, branch)

            return AnswerGrammar(compiled.parts[part].fork(), own, compiled.first_masks[part][: self._bytes])
        except Exception as error:  # one answer's, not the step's
            return FailedGrammar(f"{type(error).__name__}: {error}", self._bytes)

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

    def accept(self, slot: int, position: int, tokens: list[int]) -> Future[Accepted] | None:
        """These tokens were sampled for a slot from `position` on; None: for one without a grammar."""
        live = self._by_slot.get(slot)
        return self._lane(live).submit(_accept, live, position, tokens) if live is not None else None

    def settle(self, accepting: Sequence[Future[Accepted]]) -> None:
        """Wait a little for these."""
        wait(accepting, PATIENCE_S)

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


def _accept(live: SlotGrammar, position: int, tokens: list[int]) -> Accepted:
    with live.lock:
        grammar = live.grammar
        try:
            accepted, forced = grammar.advance(tokens[: live.sure], most=live.end - position if live.jump_ahead else 0)
            sampled = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(accepted, tokens, strict=False)))
            return Accepted(accepted, sampled, forced, grammar.done, grammar.error)
        except Exception as error:  # one answer's, not the step's
            return Accepted(tokens[:1], 1, error=f"{type(error).__name__}: {error}")


def _lower_priority() -> None:
    with suppress(OSError, AttributeError):  # where a thread has a priority of its own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), SLOW_NICENESS)
