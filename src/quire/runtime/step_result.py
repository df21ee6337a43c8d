"""A step that was launched: what it came to, still on the device, and its way to the host.

Copies begin at once and nothing waits for them; `result` is asked for a step later. Refuses to know: models, captures.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from quire.generation.drafting.speculation import Expanded, Speculation
from quire.generation.grammar.grammar_store import Accepted, SlotGrammars
from quire.generation.sampling.logprobs import LogprobTensors, begin_copy
from quire.generation.sampling.sampler import Sampled
from quire.types.plan import StepResult, TokenLogprobs
from quire.types.seams import Tree


@dataclass
class Computed:
    """What a step came to, on the device."""

    sampled: Sampled | None
    scores: dict[int, list[LogprobTensors]] = field(default_factory=dict)
    pooled: dict[int, torch.Tensor] = field(default_factory=dict)
    mass: dict[int, torch.Tensor] = field(default_factory=dict)  # by row: attention paid to each page
    padding: int = 0
    shown: torch.Tensor | None = None  # [samples, hidden or more], what was drawn from; if somebody wants to know
    probed: torch.Tensor | None = None  # [tokens of all probes]


class PendingStep:
    """A step whose results are on their way to the host; `result` waits for them."""

    def __init__(
        self,
        asked: Expanded,
        computed: Computed,
        began: float,
        device: torch.device,
        grammars: SlotGrammars,
        speculation: Speculation | None,
        keep: Callable[[int, int, list[int], list[int]], None],
    ):
        self._asked = asked
        self._keep = keep
        self._counted: list[list[int]] = []  # by sample: its draws that count
        self._grammars = grammars
        self._speculation = speculation
        self._padding = computed.padding
        self._shown = computed.shown
        self._began = began
        sampled = computed.sampled
        self._tokens = begin_copy(sampled.token_ids) if sampled is not None else None
        logprobs = sampled.logprobs if sampled is not None else None
        self._logprobs = logprobs.start_copy() if logprobs is not None else None
        by_row = asked.by_original_row
        self._scores = {row: [part.start_copy() for part in parts] for row, parts in by_row(computed.scores).items()}
        self._pooled = {row: begin_copy(vector) for row, vector in by_row(computed.pooled).items()}
        self._mass = {row: begin_copy(paid) for row, paid in by_row(computed.mass).items()}
        self._probed = begin_copy(computed.probed) if computed.probed is not None else None
        self._event = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()
            self._event.record()

    def result(self) -> StepResult:
        if self._event is not None:
            self._event.synchronize()
        accepted = self._accept(self._tokens.tolist()) if self._tokens is not None else []
        return StepResult(
            step=self._asked.plan.step,
            tokens=[a.tokens for a in accepted],
            drafts={
                i: (draws - 1, a.drawn - 1)
                for i, ((_, _, draws), a) in enumerate(zip(self._asked.samples(), accepted, strict=True))
                if draws > 1
            },
            ended=[i for i, a in enumerate(accepted) if a.done],
            errors={i: a.error for i, a in enumerate(accepted) if a.error},
            logprobs=self._drawn_logprobs(self._logprobs.to_host()) if self._logprobs is not None else {},
            scores={
                row: [entry for part in parts for entry in part.to_host() if entry is not None]
                for row, parts in self._scores.items()
            },
            pooled={row: vector.tolist() for row, vector in self._pooled.items()},
            mass={row: paid.tolist() for row, paid in self._mass.items()},
            deviations=self._deviations(),
            seconds=time.perf_counter() - self._began,
            padding=self._padding,
        )

    def _deviations(self) -> list[list[float]]:
        """By probe."""
        if self._probed is None:
            return []
        return [part.tolist() for part in self._probed.split([p.count for p in self._asked.plan.probes])]

    def _accept(self, drawn: list[int]) -> list[Accepted]:
        """What the draws of each sample come to: those that its draft led to, as its grammar allows."""
        found, end = [], 0
        for sample, draft, draws in self._asked.samples():
            begin, end = end, end + draws
            tokens, which = drawn[begin:end], [0]
            if draft:
                assert self._speculation is not None
                tokens, which = self._speculation.settled(draft, tokens)
                if isinstance(draft, Tree):
                    self._keep(sample.slot, sample.position, tokens, [i - 1 for i in which[1:]])
            accepted = self._grammars.accept(sample.slot, sample.position, tokens)
            which = [begin + i for i in which[: accepted.drawn]]
            if self._speculation is not None:
                seen = None
                if self._shown is not None:
                    seen = self._shown[which if isinstance(draft, Tree) else slice(begin, begin + accepted.drawn)]
                self._speculation.observe(sample.slot, sample.position, accepted.tokens, seen)
            self._counted.append(which)
            found.append(accepted)
        return found

    def _drawn_logprobs(self, entries: list[TokenLogprobs | None]) -> dict[int, list[TokenLogprobs]]:
        """By sample, of the draws that count."""
        found = {}
        for i, which in enumerate(self._counted):
            if some := [entry for j in which if (entry := entries[j]) is not None]:
                found[i] = some
        return found
