"""Predicted outputs: a proposer that drafts from what the caller thinks the answer will be.

It follows the prediction as long as the answer does. Where the answer leaves it, it looks for the place where the
prediction goes on with the answer's latest tokens, and meanwhile asks another proposer, if there is one.

Refuses to know: models, logits, how others draft.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from quire.types.seams import DraftContext, DraftTree, Proposer

AGREEING = (4, 3, 2)  # tokens of the answer that must stand in the prediction to find the place again, most first


class _Follower:
    """Where in a prediction an answer is."""

    def __init__(self, prediction: Sequence[int]):
        self.prediction = prediction
        self.seen = 0  # tokens of the answer that were followed
        self.at: int | None = 0  # the token of the prediction that should come next; None: not known
        self._after = 0  # the answer was this far in it already
        self._places: dict[tuple[int, ...], list[int]] = {}  # where each n-gram ends, ascending
        for size in AGREEING:
            for end in range(size, len(prediction)):
                self._places.setdefault(tuple(prediction[end - size : end]), []).append(end)

    def follow(self, answer: Sequence[int]) -> None:
        for token in answer[self.seen :]:
            if self.at is not None and self.at < len(self.prediction) and self.prediction[self.at] == token:
                self.at += 1
                self._after = self.at
            else:
                self.at = None
        self.seen = len(answer)
        if self.at is None:
            self.at = self._found(answer)

    def _found(self, answer: Sequence[int]) -> int | None:
        """The next place that agrees with the end of the answer; an edit seldom goes back."""
        for size in AGREEING:
            places = self._places.get(tuple(answer[-size:]), []) if len(answer) >= size else []
            if (place := bisect_left(places, self._after)) < len(places):
                return places[place]
        return None


class PredictedProposer:
    def __init__(self, other: Proposer | None = None):
        """`other` drafts where a prediction does not help."""
        self._other = other
        self._followers: dict[DraftContext, _Follower] = {}

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[int]) -> list[list[int] | DraftTree]:
        drafts: list[list[int] | DraftTree] = [
            self._draft(context, budget) if context.admit.prediction else []
            for context, budget in zip(contexts, budgets, strict=True)
        ]
        left = [i for i, draft in enumerate(drafts) if not draft] if self._other is not None else []
        if left:
            assert self._other is not None
            found = self._other.propose([contexts[i] for i in left], [budgets[i] for i in left])
            for i, draft in zip(left, found, strict=True):
                drafts[i] = draft
        return drafts

    def observe(self, context: DraftContext, tokens: Sequence[int]) -> None:
        if self._other is not None:
            self._other.observe(context, tokens)

    def forget(self, context: DraftContext) -> None:
        self._followers.pop(context, None)
        if self._other is not None:
            self._other.forget(context)

    def _draft(self, context: DraftContext, budget: int) -> list[int]:
        follower = self._followers.get(context)
        if follower is None:
            follower = self._followers[context] = _Follower(context.admit.prediction)
        follower.follow(context.tokens[context.admit.prompt_len :])
        at = follower.at
        return [] if at is None else list(follower.prediction[at : at + budget])
