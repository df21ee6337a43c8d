"""Draws that come behind their step: under a grammar, what may be drawn depends on the token before, and that has to be
read first. The forward pass needs it in its slot only, so it is launched meanwhile.

    step n      forward ─► draw ─► tokens to the host ─► grammars take them, and say what may follow ─┐
    step n + 1             forward ──────────────────────────────────────────────────────► draw ◄─────┘
    step n + 2                                                                                    forward ─► ...

A sample waits here with its logits until what was drawn before it is told. If forced tokens followed that, or the
answer ended, nothing is drawn. The next step would write over the logits of a captured one: whatever waits for longer
than a step (a grammar takes long) keeps a copy.

Refuses to know: how tokens are drawn, what a grammar is, how results are told.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch

from quire.generation.grammar.slot_grammars import SlotGrammar
from quire.generation.sampling.logprobs import LogprobTensors, begin_copy
from quire.generation.sampling.sampler import Sampled
from quire.generation.sampling.slot_params import to_device
from quire.types.plan import Sample, TokenLogprobs


class DrawnTokens:
    """Tokens that were drawn together, with their log-probabilities, on their way to the host."""

    def __init__(self, sampled: Sampled):
        self._tokens = begin_copy(sampled.token_ids)
        self._logprobs = sampled.logprobs.start_copy() if sampled.logprobs is not None else None
        self._event = None
        if sampled.token_ids.is_cuda:
            self._event = torch.cuda.Event()
            self._event.record()

    @property
    def arrived(self) -> bool:
        return self._event is None or self._event.query()

    @cached_property
    def tokens(self) -> list[int]:
        """Waits for them."""
        if self._event is not None:
            self._event.synchronize()
        found: list[int] = self._tokens.tolist()
        return found

    @cached_property
    def logprobs(self) -> list[TokenLogprobs | None]:
        """One entry per token, read after these; empty: nobody wants any."""
        return self._logprobs.to_host() if self._logprobs is not None else []


@dataclass(eq=False)
class LateSample:
    sample: Sample
    grammar: SlotGrammar
    row: int  # of its step's logits; of those it was drawn with, once it was
    drawn: DrawnTokens | None = None
    passed: bool = False  # another token is there by now

    @property
    def void(self) -> bool:
        """Whether nobody wants it."""
        return self.passed or self.grammar.position is None


@dataclass
class StepSamples:
    """What a step's samples came to, or will: of the plan with its drafts laid out, by index."""

    drawn: DrawnTokens | None = None  # with the step
    late: dict[int, LateSample] = field(default_factory=dict)  # the others
    scores: dict[int, list[LogprobTensors]] = field(default_factory=dict)  # by row: prompt log-probabilities

    def tokens(self, count: int) -> list[int | None]:
        """Of `count` samples, the tokens; None: not drawn yet, or not at all."""
        drawn = self.drawn.tokens if self.drawn is not None else []
        if not self.late:
            return [*drawn]
        found, rest = [self.late.get(i) for i in range(count)], iter(drawn)
        return [next(rest) if one is None else one.drawn.tokens[one.row] if one.drawn else None for one in found]

    def logprobs(self, indices: list[int]) -> list[TokenLogprobs]:
        """Of samples that were drawn, those that are wanted."""
        found = []
        for index in indices:
            one = self.late.get(index)
            drawn = self.drawn if one is None else one.drawn
            if drawn is not None and drawn.logprobs:
                at = one.row if one is not None else index - sum(late < index for late in self.late)
                found.append(drawn.logprobs[at])
        return [entry for entry in found if entry is not None]


@dataclass
class _Waiting:
    """Of one step."""

    logits: torch.Tensor  # [m, vocab]
    samples: list[LateSample]
    borrowed: bool = True  # the next step may write over the logits

    def rows(self, samples: list[LateSample]) -> torch.Tensor:
        """The logits of some of them."""
        if len(samples) == len(self.logits):
            return self.logits
        return self.logits[to_device(np.array([one.row for one in samples]), self.logits.device)]


class LateDraws:
    def __init__(self) -> None:
        self._waiting: list[_Waiting] = []

    def add(self, logits: torch.Tensor, samples: list[LateSample]) -> None:
        """Samples of the latest step, in the order of the logits."""
        self._waiting.append(_Waiting(logits, samples))

    def keep(self) -> None:
        """Another step is about to be launched."""
        for one in self._waiting:
            if one.borrowed:
                rows = one.rows(one.samples)
                one.logits, one.borrowed = rows.clone() if rows is one.logits else rows, False
                for row, sample in enumerate(one.samples):
                    sample.row = row

    @torch.inference_mode()
    def proceed(self, draw: Callable[[torch.Tensor, list[LateSample]], DrawnTokens]) -> None:
        """Draw what is known to come next. `draw` from logits, a row each, and store the tokens in their slots."""
        for waiting in self._waiting:
            ready: list[LateSample] = []
            left: list[LateSample] = []
            for one in waiting.samples:
                at = one.grammar.position
                one.passed = at is None or at > one.sample.position
                if not one.passed:
                    (ready if at == one.sample.position else left).append(one)
            if ready:
                drawn = draw(waiting.rows(ready), ready)
                for row, one in enumerate(ready):
                    one.drawn, one.row = drawn, row
            waiting.samples = left
        self._waiting = [waiting for waiting in self._waiting if waiting.samples]
