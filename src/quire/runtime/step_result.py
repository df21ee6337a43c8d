"""One step: launched through worker and sampling head, its results on their way to the host.

Copies begin at once and nothing waits for them; `result` is asked for a step later. Refuses to know: how tokens are
computed, sampled and accepted.
"""

from __future__ import annotations

import time

import torch

from quire.generation.drafting.speculation import ExpandedPlan
from quire.generation.sampling.logprobs import begin_copy
from quire.runtime.sampling_head import SamplingHead, StepSamples
from quire.runtime.worker import ForwardOutput, ForwardWorker
from quire.types.plan import StepPlan, StepResult, TokenLogprobs


@torch.inference_mode()
def run_step(plan: StepPlan, worker: ForwardWorker, head: SamplingHead) -> PendingStep:
    """Launch a step; nothing waits for the device."""
    began = time.perf_counter()
    expanded = head.expand(plan)
    output = worker.forward(expanded, greedy=worker.captures_ready and head.all_greedy(expanded.plan))
    return PendingStep(expanded, output, head.sample(expanded, output), head, began)


class PendingStep:
    """A step whose results are on their way to the host; `result` waits for them."""

    def __init__(
        self, expanded: ExpandedPlan, output: ForwardOutput, samples: StepSamples, head: SamplingHead, began: float
    ):
        self._expanded = expanded
        self._head = head
        self._began = began
        self._padding = output.padding
        self._hidden = output.hidden
        sampled = samples.sampled
        self._tokens = begin_copy(sampled.token_ids) if sampled is not None else None
        logprobs = sampled.logprobs if sampled is not None else None
        self._logprobs = logprobs.start_copy() if logprobs is not None else None
        by_row = expanded.by_original_row
        self._scores = {row: [part.start_copy() for part in parts] for row, parts in by_row(samples.scores).items()}
        self._pooled = {row: begin_copy(vector) for row, vector in by_row(output.pooled).items()}
        self._mass = {row: begin_copy(mass) for row, mass in by_row(output.mass).items()}
        self._deviations = begin_copy(output.deviations) if output.deviations is not None else None
        self._event = None
        if head.device.type == "cuda":
            self._event = torch.cuda.Event()
            self._event.record()

    def result(self) -> StepResult:
        if self._event is not None:
            self._event.synchronize()
        found = []
        if self._tokens is not None:
            found = self._head.accept(self._expanded, self._tokens.tolist(), self._hidden)
        accepted = [one for one, _ in found]
        return StepResult(
            step=self._expanded.plan.step,
            tokens=[one.tokens for one in accepted],
            drafts={
                i: (count - 1, one.sampled - 1)
                for i, ((_, _, count), one) in enumerate(zip(self._expanded.samples(), accepted, strict=True))
                if count > 1
            },
            forced={i: list(one.forced) for i, one in enumerate(accepted) if one.forced},
            ended=[i for i, one in enumerate(accepted) if one.done],
            errors={i: one.error for i, one in enumerate(accepted) if one.error},
            logprobs=self._sampled_logprobs([indices for _, indices in found]),
            scores={
                row: [entry for part in parts for entry in part.to_host() if entry is not None]
                for row, parts in self._scores.items()
            },
            pooled={row: vector.tolist() for row, vector in self._pooled.items()},
            mass={row: mass.tolist() for row, mass in self._mass.items()},
            deviations=self._deviations_by_probe(),
            seconds=time.perf_counter() - self._began,
            padding=self._padding,
        )

    def _deviations_by_probe(self) -> list[list[float]]:
        if self._deviations is None:
            return []
        return [part.tolist() for part in self._deviations.split([p.count for p in self._expanded.plan.probes])]

    def _sampled_logprobs(self, accepted: list[list[int]]) -> dict[int, list[TokenLogprobs]]:
        """By sample, of those accepted."""
        if self._logprobs is None:
            return {}
        entries = self._logprobs.to_host()
        found = {}
        for i, indices in enumerate(accepted):
            if some := [entry for j in indices if (entry := entries[j]) is not None]:
                found[i] = some
        return found
