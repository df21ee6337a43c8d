"""Proposers that look up what followed before: in the sequence itself (n-gram), or in earlier answers too (suffix).

They know tokens only, cost microseconds, and pay where answers repeat their prompt, themselves or each other. What is
learnt from one salt's answers is used for that salt alone, so no tenant's words show in another's speed.

Refuses to know: models, logits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from quire.types.seams import DraftContext

SIZES = (6, 4, 3, 2)  # tokens that must agree, most first
NEXT = 4  # different continuations remembered after the same tokens
SURE = 0.3  # a guess ends where its chance falls below
KEPT = 1 << 18  # token runs remembered over all salts


class NGramProposer:
    """What followed the last time the latest few tokens stood in this sequence."""

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[int]) -> list[list[int]]:
        return [self._guess(context, budget) for context, budget in zip(contexts, budgets, strict=True)]

    def observe(self, context: DraftContext, tokens: Sequence[int]) -> None:
        pass  # `propose` reads what is new

    def forget(self, context: DraftContext) -> None:
        pass

    def _guess(self, context: DraftContext, budget: int) -> list[int]:
        tokens, seen = context.tokens, _seen(context)
        for size in SIZES:
            at = seen.last.get(tuple(tokens[-size:])) if len(tokens) > size else None
            if at is not None:
                # A run that reaches the end goes on with itself: so do lists and tables.
                period = len(tokens) - at
                return [tokens[at + i % period] for i in range(budget)]
        return []


class _Seen:
    """Where in a sequence each short run of tokens ended last, the run at its very end left out."""

    __slots__ = ("last", "upto")

    def __init__(self) -> None:
        self.last: dict[tuple[int, ...], int] = {}
        self.upto = 0


def _seen(context: DraftContext) -> _Seen:
    if context.state is None:
        context.state = _Seen()
    seen: _Seen = context.state
    tokens, last = context.tokens, seen.last
    for end in range(max(1, seen.upto), len(tokens)):
        for size in SIZES:
            if end >= size:
                last[tuple(tokens[end - size : end])] = end
    seen.upto = len(tokens)
    return seen


class SuffixProposer:
    """The likeliest continuation by counts over earlier answers of the same salt; where they have none, what the
    sequence itself says."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._counts: OrderedDict[tuple[str | int, ...], dict[int, int]] = OrderedDict()
        self._own = NGramProposer()

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[int]) -> list[list[int]]:
        return [
            self._guess(context, budget) or self._own.propose([context], [budget])[0]
            for context, budget in zip(contexts, budgets, strict=True)
        ]

    def observe(self, context: DraftContext, tokens: Sequence[int]) -> None:
        known, salt = context.tokens, context.admit.salt
        for at in range(len(known) - len(tokens), len(known)):
            for size in SIZES:
                if at >= size:
                    self._count((salt, *known[at - size : at]), known[at])

    def forget(self, context: DraftContext) -> None:
        pass

    def _count(self, key: tuple[str | int, ...], token: int) -> None:
        after = self._counts.setdefault(key, {})
        self._counts.move_to_end(key)
        after[token] = after.get(token, 0) + 1
        if len(after) > NEXT:
            del after[min(after, key=lambda t: after[t])]
        if len(self._counts) > self._kept:
            self._counts.popitem(last=False)

    def _guess(self, context: DraftContext, budget: int) -> list[int]:
        tail, salt = context.tokens[-SIZES[0] :], context.admit.salt
        guess: list[int] = []
        chance = 1.0
        while len(guess) < budget:
            after = next((a for s in SIZES if len(tail) >= s and (a := self._counts.get((salt, *tail[-s:])))), None)
            if not after:
                break
            token = max(after, key=lambda t: after[t])
            chance *= after[token] / sum(after.values())
            if chance < SURE:
                break
            guess.append(token)
            tail = [*tail, token][-SIZES[0] :]
        return guess


class SyntheticProposer:
    """For measuring speeds only: any tokens, of which a set share is taken for right. Answers mean nothing."""

    def __init__(self, rate: float, vocab: int):
        self._rate, self._vocab = rate, vocab
        self._state = 1

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[int]) -> list[list[int]]:
        return [[(context.tokens[-1] + i) % self._vocab for i in range(1, b + 1)] for context, b in
                zip(contexts, budgets, strict=True)]  # fmt: skip

    def observe(self, context: DraftContext, tokens: Sequence[int]) -> None:
        pass

    def forget(self, context: DraftContext) -> None:
        pass

    def verify(self, draft: Sequence[int], drawn: Sequence[int]) -> int:
        right = 0
        while right < len(draft) and self._chance() < self._rate:
            right += 1
        return right

    def _chance(self) -> float:
        self._state = (self._state * 6364136223846793005 + 1442695040888963407) % (1 << 64)
        return (self._state >> 11) / (1 << 53)
