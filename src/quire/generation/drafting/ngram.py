"""Prompt lookup: proposers that draft what followed the same tokens before, in the sequence (n-gram) or in earlier
answers too (suffix).

They read tokens only, cost microseconds, and pay where answers repeat their prompt, themselves or each other. What is
counted in one salt's answers is used for that salt alone, so that no tenant's text shows in another's speed.

Refuses to know: models, logits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from quire.types.seams import DraftContext

NGRAM_SIZES = (6, 4, 3, 2)  # tokens that must agree, most first
MAX_CONTINUATIONS = 4  # counted after the same tokens
MIN_PROBABILITY = 0.3  # of a whole draft: it ends where that falls below
MAX_NGRAMS = 1 << 18  # counted over all salts


class NGramProposer:
    """What followed the last time the latest few tokens stood in this sequence."""

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[int]) -> list[list[int]]:
        return [self._draft(context, budget) for context, budget in zip(contexts, budgets, strict=True)]

    def observe(self, context: DraftContext, tokens: Sequence[int]) -> None:
        pass  # `propose` reads what is new

    def forget(self, context: DraftContext) -> None:
        pass

    def _draft(self, context: DraftContext, budget: int) -> list[int]:
        tokens, index = context.tokens, _index(context)
        for size in NGRAM_SIZES:
            at = index.last.get(tuple(tokens[-size:])) if len(tokens) > size else None
            if at is not None:
                # A run that reaches the end goes on with itself: so do lists and tables.
                period = len(tokens) - at
                return [tokens[at + i % period] for i in range(budget)]
        return []


class _NGramIndex:
    """Where in a sequence each n-gram ended last, the one at its very end left out."""

    __slots__ = ("indexed", "last")

    def __init__(self) -> None:
        self.last: dict[tuple[int, ...], int] = {}
        self.indexed = 0


def _index(context: DraftContext) -> _NGramIndex:
    if context.state is None:
        context.state = _NGramIndex()
    index: _NGramIndex = context.state
    tokens, last = context.tokens, index.last
    for end in range(max(1, index.indexed), len(tokens)):
        for size in NGRAM_SIZES:
            if end >= size:
                last[tuple(tokens[end - size : end])] = end
    index.indexed = len(tokens)
    return index


class SuffixProposer:
    """The likeliest continuation by counts over earlier answers of the same salt; where they have none, what the
    sequence itself says."""

    def __init__(self, max_ngrams: int = MAX_NGRAMS) -> None:
        self._max_ngrams = max_ngrams
        self._counts: OrderedDict[tuple[str | int, ...], dict[int, int]] = OrderedDict()
        self._in_sequence = NGramProposer()

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[int]) -> list[list[int]]:
        return [
            self._draft(context, budget) or self._in_sequence.propose([context], [budget])[0]
            for context, budget in zip(contexts, budgets, strict=True)
        ]

    def observe(self, context: DraftContext, tokens: Sequence[int]) -> None:
        known, salt = context.tokens, context.admit.salt
        for at in range(len(known) - len(tokens), len(known)):
            for size in NGRAM_SIZES:
                if at >= size:
                    self._count((salt, *known[at - size : at]), known[at])

    def forget(self, context: DraftContext) -> None:
        pass

    def _count(self, key: tuple[str | int, ...], token: int) -> None:
        after = self._counts.setdefault(key, {})
        self._counts.move_to_end(key)
        after[token] = after.get(token, 0) + 1
        if len(after) > MAX_CONTINUATIONS:
            del after[min(after, key=lambda t: after[t])]
        if len(self._counts) > self._max_ngrams:
            self._counts.popitem(last=False)

    def _draft(self, context: DraftContext, budget: int) -> list[int]:
        tail, salt = context.tokens[-NGRAM_SIZES[0] :], context.admit.salt
        draft: list[int] = []
        probability = 1.0
        while len(draft) < budget:
            after = next(
                (a for s in NGRAM_SIZES if len(tail) >= s and (a := self._counts.get((salt, *tail[-s:])))), None
            )
            if not after:
                break
            token = max(after, key=lambda t: after[t])
            probability *= after[token] / sum(after.values())
            if probability < MIN_PROBABILITY:
                break
            draft.append(token)
            tail = [*tail, token][-NGRAM_SIZES[0] :]
        return draft


class SyntheticProposer:
    """For measuring speeds only: arbitrary tokens, of which a set share is accepted. Answers mean nothing."""

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

    def verify(self, draft: Sequence[int], sampled: Sequence[int]) -> int:
        accepted = 0
        while accepted < len(draft) and self._uniform() < self._rate:
            accepted += 1
        return accepted

    def _uniform(self) -> float:
        self._state = (self._state * 6364136223846793005 + 1442695040888963407) % (1 << 64)
        return (self._state >> 11) / (1 << 53)
