"""The grammar of one answer: limits count for it alone, and so does the time it takes.

Refuses to know: slots, threads, how a grammar is compiled.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from quire.types.grammar import TokenMasks
from quire.types.seams import Grammar, GrammarBackend

MASK_BUDGET_S = 1.0  # computing that masks of one answer may take beyond what is usual
USUAL_S = 0.005  # for a token
SLOW_S = 0.02  # for a token: what takes longer is kept out of the way of others


class AnswerGrammar:
    """A fork of a compiled grammar; when it fails, which may be for what others, or tokens before, have put into what
    forks share, a grammar of its own, moved along the same tokens. If that fails at once, the answer has: whether it
    does is a matter of its tokens alone."""

    def __init__(self, grammar: Grammar, own: Callable[[], Grammar], first_mask: TokenMasks):
        """`own` makes another, and tells that this one is spoilt."""
        self._grammar = grammar
        self._own = own
        self._tokens: list[int] = []
        self._spent = 0.0
        self._overdrawn = False
        self.slow = False
        self.mask = first_mask.copy()  # of what may come next, after `advance`

    @property
    def error(self) -> str:
        if self._overdrawn:
            return f"to tell what may follow takes more than {MASK_BUDGET_S:g} s of computing; make it less ambiguous"
        return self._grammar.error

    @property
    def done(self) -> bool:
        return self._overdrawn or self._grammar.done

    def advance(self, tokens: Sequence[int], *, most: int) -> tuple[list[int], list[int]]:
        """Tokens were sampled: those that count and those that the grammar forces after them, `most` together, and the
        indices of the latter. Along a draft, forced text may have been sampled in other tokens than those it is forced
        to have: then these count, as without a draft. Afterwards `mask` is what may come next."""
        accepted: list[int] = []
        forced: list[int] = []
        with self._timed():
            self._renew()  # where it failed with others
            while len(accepted) < len(tokens) and not self.done:
                token = tokens[len(accepted)]
                self._accept([token])
                accepted.append(token)
                more = self._grammar.forced()[: max(0, most - len(accepted))] if most and not self.done else []
                if more:
                    self._accept(more)
                    forced += range(len(accepted), len(accepted) + len(more))
                    accepted += more
                    if accepted != list(tokens[: len(accepted)]):
                        break
            if not self.done:
                self._fill(self.mask)
        return accepted, forced

    def look_ahead(self, draft: Sequence[int], found: list[TokenMasks], stop: Callable[[], bool]) -> None:
        """Masks after each token of a draft, as far as the grammar allows those; `stop` ends it early."""
        mask, taken = self.mask, 0
        with self._timed():
            for token in draft:
                if stop() or not mask[token // 8] >> token % 8 & 1:
                    break
                self._accept([token])
                taken += 1
                if self.done:
                    break
                mask = np.empty_like(mask)
                self._fill(mask)
                found.append(mask)
            if taken:
                del self._tokens[-taken:]
                self._grammar.rollback(taken)

    def _accept(self, tokens: Sequence[int]) -> None:
        self._tokens += tokens
        self._grammar.accept(tokens)
        self._renew()

    def _fill(self, mask: npt.NDArray[np.uint8]) -> None:
        self._grammar.fill(mask)
        if self._renew():
            self._grammar.fill(mask)

    def _renew(self) -> bool:
        """On an error, begin again with a grammar of its own."""
        if not self._grammar.error:
            return False
        self._grammar = self._own()
        self._grammar.accept(self._tokens)
        return True

    def charge(self, seconds: float) -> None:
        """So long a token took to compute."""
        self._spent += max(0.0, seconds - USUAL_S)
        self._overdrawn = self._overdrawn or self._spent > MASK_BUDGET_S

    @contextmanager
    def _timed(self) -> Iterator[None]:
        clock = time.perf_counter if self.slow else time.thread_time  # a slow one may compute in another thread
        began = clock()
        yield
        took = clock() - began
        self.slow = took > SLOW_S
        self.charge(took)


def advance_each(
    backend: GrammarBackend, answers: Sequence[AnswerGrammar], tokens: Sequence[int], most: Sequence[int]
) -> list[tuple[list[int], list[int]] | None]:
    """Each answer's `advance` by one token. None: its grammar failed, and the answer is where it was; `advance` moves
    it on a grammar of its own."""
    grammars = [answer._grammar for answer in answers]
    backend.accept_each(grammars, tokens)
    found: list[tuple[list[int], list[int]] | None] = []
    going_on = []
    for at, (grammar, token, limit) in enumerate(zip(grammars, tokens, most, strict=True)):
        more = grammar.forced()[: limit - 1] if limit > 1 and not grammar.done else []
        if more:
            grammar.accept(more)
        found.append(None if grammar.error else ([token, *more], list(range(1, 1 + len(more)))))
        if not grammar.done:
            going_on.append(at)
    masks = backend.fill_each([grammars[at] for at in going_on], len(answers[0].mask))
    for at, mask in zip(going_on, masks, strict=True):
        if grammars[at].error:
            found[at] = None
        answers[at].mask = mask
    for answer, moved in zip(answers, found, strict=True):
        if moved is not None:
            answer._tokens += moved[0]
    return found


class FailedGrammar:
    """Stands for a grammar that failed, until the sample that ends its answer."""

    done, slow = False, False

    def __init__(self, error: str, size: int):
        self.error = error
        self.mask = np.zeros(size, np.uint8)
        self.mask[0] = 1  # something must be sampled

    def advance(self, tokens: Sequence[int], *, most: int) -> tuple[list[int], list[int]]:
        return list(tokens), []

    def look_ahead(self, draft: Sequence[int], found: list[TokenMasks], stop: Callable[[], bool]) -> None: ...
