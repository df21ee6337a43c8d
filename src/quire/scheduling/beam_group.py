"""Beam search as arithmetic: which continuations live on, which have ended, and when to stop looking.

One step of one group of W beams, as in the field's libraries:

    W beams x their likeliest tokens ─► best candidates by summed log-probability
        ended, and among the first W      ─► finished, scored by length; the best W are kept
        not ended                         ─► the first W are the beams of the next step

Refuses to know: sequences, pages, steps, text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from quire.types.beam import BeamParams
from quire.types.plan import TokenLogprobs


@dataclass(frozen=True)
class Choice:
    """A beam goes on: the `parent`-th beam of its group, with this token."""

    parent: int
    token: int
    score: float  # sum of log-probabilities, less what diversity cost


@dataclass(frozen=True)
class Hypothesis:
    """A finished answer."""

    tokens: list[int]
    score: float  # penalised by length
    ended: bool  # by an end token rather than by the limit


@dataclass
class BeamGroup:
    """The search of one group. `scores` are those of its running beams, best first."""

    params: BeamParams
    width: int
    limit: int  # most tokens of an answer
    ends: Container[int]
    scores: list[float] = field(default_factory=lambda: [0.0])
    finished: list[Hypothesis] = field(default_factory=list)
    done: bool = False

    def advance(
        self, answers: Sequence[list[int]], options: Sequence[TokenLogprobs], taken: Counter[int]
    ) -> list[Choice]:
        """One step. `answers` are the beams' tokens so far, `options` what may follow each, `taken` how often earlier
        groups have chosen a token in this step; returns the beams of the next step, none when done."""
        length = len(answers[0]) + 1
        ranked = sorted(
            (
                Choice(parent, token, score + logprob - self.params.diversity * taken[token])
                for parent, (score, option) in enumerate(zip(self.scores, options, strict=True))
                for token, logprob in zip(option.top_ids, option.top_logprobs, strict=True)
            ),
            key=lambda choice: -choice.score,
        )
        over = [choice.token in self.ends or length >= self.limit for choice in ranked]
        for choice in [c for c, ended in zip(ranked[: self.width], over, strict=False) if ended]:
            score = choice.score / length**self.params.length_penalty
            self.finished.append(Hypothesis([*answers[choice.parent], choice.token], score, choice.token in self.ends))
        self.finished.sort(key=lambda hypothesis: -hypothesis.score)
        del self.finished[self.width :]
        chosen = [choice for choice, ended in zip(ranked, over, strict=True) if not ended][: self.width]
        self.scores = [choice.score for choice in chosen]
        full = len(self.finished) == self.width
        self.done = not chosen or (full and (self.params.early_stopping is True or not self._may_improve(length)))
        return [] if self.done else chosen

    def _may_improve(self, length: int) -> bool:
        """Whether the best running beam looks able to beat the worst finished answer."""
        penalty = self.params.length_penalty
        reach = self.limit if self.params.early_stopping == "never" and penalty > 0 else length
        return self.scores[0] / reach**penalty > self.finished[-1].score
