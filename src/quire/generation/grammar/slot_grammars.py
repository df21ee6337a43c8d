"""The grammar state of each slot, and the masks of a step's samples. No step waits for a grammar that takes long.

    apply ──► an answer's grammar, with the mask of how it may begin
    begin_masks ──► along drafts: masks as if each token of them had been sampled, filled in threads while the forward
              pass runs; `masks` gives them, and those made before
    accept ──► in threads: the tokens sampled, those the grammar forces after them (jump-ahead: they need no step of
              their own), and the mask of what may come next. What is not done soon is told of when it is; until then
              nothing more is drawn for its answer

Answers that have one token each are moved together, which is quick and says nothing of what each of them takes: those
under one grammar, if they are many, share the time that they took; of others, if it took too long, each goes by itself
for a while, by the clock. Answers that were slow stay by themselves, and share one thread, of low priority. A grammar
that fails among others goes on by itself.

Forced tokens are those the tokenizer itself would make of the forced text, as far as what follows cannot change them.

Refuses to know: torch, logits, how a grammar is written or parsed.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile

from quire.generation.grammar.answer_grammar import USUAL_S, AnswerGrammar, FailedGrammar, advance_each
from quire.generation.grammar.grammar_store import GrammarCopy, GrammarStore
from quire.types.grammar import GrammarSpec, TokenMasks
from quire.types.memory_use import usable_cores
from quire.types.plan import Admit
from quire.types.seams import Grammar, GrammarBackend

MANY = 8  # answers under one grammar that are moved apart from others
SUSPECT_TOKENS = 4  # that an answer takes by itself, by the clock, when one it was moved with was slow
MAX_DOUBLED = 8  # ... and twice as many each time
PATIENCE_S = 0.01  # a step waits so long for its grammars to say what follows
REPLAY_S = 1.0  # and so long for that of a preempted answer to be where it was
SLOW_NICENESS = 10


@dataclass(slots=True)
class Accepted:
    tokens: list[int]  # those sampled, up to where the grammar ends, and those forced after them
    sampled: int = 1  # how many were sampled
    forced: Sequence[int] = ()  # indices of those that the grammar forced, sampled along a draft or not
    done: bool = False
    error: str = ""


@dataclass(eq=False)
class SlotGrammar:
    grammar: AnswerGrammar | FailedGrammar
    copy: GrammarCopy | None  # that it is a fork of
    position: int | None  # of the token that its mask is for, as far as is told; None: none follows
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
    suspected: int = 0  # how often

    def most(self, position: int) -> int:
        """Tokens that may be accepted from there on with those forced; 0: none are to be forced."""
        return self.end - position if self.jump_ahead else 0


@dataclass(eq=False)
class Accepting:
    """Tokens sampled from `position` on, which a grammar takes."""

    live: SlotGrammar
    position: int
    tokens: list[int]
    place: tuple[Future[list[Accepted | None]], int] | None = None  # where it will be; with None there, it has moved on

    @property
    def known(self) -> bool:
        if self.place is None:
            return False
        task, index = self.place
        return task.done() and task.result()[index] is not None

    def told(self) -> Accepted:
        """What the grammar made of them; what comes next may be drawn from now on."""
        accepted = None
        while accepted is None:
            assert self.place is not None
            task, index = self.place
            accepted = task.result()[index]
        if self.live.position is not None:
            ended = accepted.done or accepted.error
            self.live.position = None if ended else self.position + len(accepted.tokens)
        return accepted


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
                freed.stopped, freed.position = True, None
                if freed.copy is not None:
                    freed.copy.answers -= 1
        for admit in admits:
            spec = admit.params.grammar
            if spec is not None:
                end = min(self._max_len, admit.prompt_len + (admit.params.max_tokens or self._max_len))
                # Where log-probabilities are wanted, every token has to come from the model.
                live = SlotGrammar(
                    *self._begin(spec, admit.branch), len(admit.tokens), end, jump_ahead=admit.params.logprobs is None
                )
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

    def of(self, slot: int) -> SlotGrammar | None:
        return self._by_slot.get(slot)

    def begin_masks(self, drafts: Sequence[tuple[int, list[int]]]) -> None:
        """Start to look ahead along drafts; of the samples in slots, those that have a grammar need masks."""
        self._step = []
        for slot, draft in drafts if self._by_slot else ():
            if live := self._by_slot.get(slot):
                live.draft, live.ahead, live.stopped, live.sure = draft, [], False, 1
                live.looking = self._lane(live).submit(_look_ahead, live) if draft else None
                self._step.append(live)

    def masks(self) -> list[TokenMasks]:
        """One for each sample with a grammar after its known tokens, and one after each token of its draft."""
        if not self._step:
            return []
        wait([live.replay for live in self._step if live.replay], REPLAY_S)
        wait([live.looking for live in self._step if live.looking], PATIENCE_S)
        masks: list[TokenMasks] = []
        for live in self._step:
            if live.replay is not None and not live.replay.done():
                live.grammar = FailedGrammar("its answer was preempted, and takes too long to go on", self._bytes)
            live.replay, live.stopped = None, True
            complete = live.looking is None or live.looking.done()
            found = [live.grammar.mask, *live.ahead]
            live.sure = len(live.draft) + 1 if complete else len(found)
            masks += found
            masks += [live.grammar.mask] * (len(live.draft) + 1 - len(found))  # after a token that is not allowed
        return masks

    def accept(self, sampled: Sequence[Accepting]) -> None:
        """Have their grammars take these."""
        by_grammar: dict[int, list[Accepting]] = {}
        for one in sampled:
            live = one.live
            busy = live.looking is not None and not live.looking.done()
            if len(one.tokens) > 1 or live.alone or busy or not isinstance(live.grammar, AnswerGrammar):
                self._accept_alone(one)
            else:
                by_grammar.setdefault(id(live.copy.kin) if live.copy is not None else 0, []).append(one)
        mixed: list[Accepting] = []
        for kin in by_grammar.values():
            if len(kin) < MANY:
                mixed += kin
            else:  # forks of a copy wait for each other, so that threads had better not take turns at them
                kin.sort(key=lambda one: one.live.copy.number if one.live.copy is not None else 0)
                self._accept_each(kin, same=True)
        if len(mixed) > 1:
            self._accept_each(mixed, same=False)
        elif mixed:
            self._accept_alone(mixed[0])

    def _accept_alone(self, one: Accepting) -> None:
        one.place = self._lane(one.live).submit(_accept, one.live, one.position, one.tokens), 0

    def _accept_each(self, moves: Sequence[Accepting], *, same: bool) -> None:
        task = self._pool.submit(_accept_each, self._store.backend, moves, same, self._accept_alone)
        for index, one in enumerate(moves):
            one.place = task, index

    def settle(self, accepting: Sequence[Accepting], patience: float | None = None) -> None:
        """Wait a little for these; with `patience`, so long for the first that is known."""
        tasks = {one.place[0] for one in accepting if one.place is not None}
        if patience is None:
            wait(tasks, PATIENCE_S)
        else:
            wait(tasks, patience, FIRST_COMPLETED)

    def _lane(self, live: SlotGrammar) -> ThreadPoolExecutor:
        return self._slow if live.grammar.slow else self._pool

    def close(self) -> None:
        """Compiled grammars stay in their store."""
        self.apply(list(self._by_slot), [])
        self._pool.shutdown(cancel_futures=True)
        self._slow.shutdown(cancel_futures=True)


def _replay(live: SlotGrammar, tokens: list[int]) -> None:
    with live.lock:
        live.grammar.advance(tokens, most=0)


def _look_ahead(live: SlotGrammar) -> None:
    with live.lock:
        live.grammar.look_ahead(live.draft, live.ahead, lambda: live.stopped)


def _accept(live: SlotGrammar, position: int, tokens: list[int]) -> list[Accepted | None]:
    with live.lock:
        grammar = live.grammar
        try:
            accepted, forced = grammar.advance(tokens[: live.sure], most=live.most(position))
            live.alone = live.end if grammar.slow else max(0, live.alone - 1)
            sampled = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(accepted, tokens, strict=False)))
            return [Accepted(accepted, sampled, forced, grammar.done, grammar.error)]
        except Exception as error:  # one answer's, not the step's
            return [_failed(tokens, error)]


def _accept_each(
    backend: GrammarBackend, moves: Sequence[Accepting], same: bool, alone: Callable[[Accepting], None]
) -> list[Accepted | None]:
    """Of one token each, all under the `same` grammar or not. Those whose grammars fail are left `alone`."""
    answers = [move.live.grammar for move in moves if isinstance(move.live.grammar, AnswerGrammar)]
    tokens, most = [move.tokens[0] for move in moves], [move.live.most(move.position) for move in moves]
    for move in moves:
        move.live.lock.acquire()
    began = time.perf_counter()
    try:
        moved = advance_each(backend, answers, tokens, most)
    except Exception as error:
        return [_failed(move.tokens, error) for move in moves]
    finally:
        _note_time(backend, moves, same, time.perf_counter() - began)
        for move in moves:
            move.live.lock.release()
    found: list[Accepted | None] = []
    for move, answer, accepted in zip(moves, answers, moved, strict=True):
        if accepted is None:
            alone(move)
        found.append(None if accepted is None else Accepted(accepted[0], 1, accepted[1], answer.done, answer.error))
    return found


def _note_time(backend: GrammarBackend, moves: Sequence[Accepting], same: bool, seconds: float) -> None:
    """What answers took that were moved together: of several grammars, any of them; of one, all alike."""
    longest = PATIENCE_S
    copy = moves[0].live.copy
    if same and copy is not None:
        threads = min(backend.threads, len(copy.kin))
        longest += USUAL_S * len(moves) / threads
        for move in moves:
            if isinstance(move.live.grammar, AnswerGrammar):
                move.live.grammar.charge(seconds * threads / len(moves))
    if seconds > longest:
        for move in moves:
            move.live.alone = SUSPECT_TOKENS << min(move.live.suspected, MAX_DOUBLED)
            move.live.suspected += 1


def _failed(tokens: list[int], error: Exception) -> Accepted:
    return Accepted(tokens[:1], 1, error=f"{type(error).__name__}: {error}")


def _lower_priority() -> None:
    with suppress(OSError, AttributeError):  # where a thread has a priority of its own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), SLOW_NICENESS)
