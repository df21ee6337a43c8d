"""One step: launched through worker and sampling head, its results on their way to the host.

Copies begin at once and nothing waits for them; `result` is asked for a step later. Refuses to know: how tokens are
computed, sampled and accepted.
"""

from __future__ import annotations

import time

import torch

from quire.generation.drafting.speculation import ExpandedPlan
from quire.generation.sampling.logprobs import begin_copy
from quire.runtime.late_draws import StepSamples
from quire.runtime.sampling_head import AcceptedSample, SamplingHead, by_known
from quire.runtime.worker import ForwardOutput, ForwardWorker
from quire.types.plan import StepPlan, StepResult

LATE_WAIT_S = 0.02  # of a plan that computes nothing, for the first deferred sample to become known


@torch.inference_mode()
def run_step(plan: StepPlan, worker: ForwardWorker, head: SamplingHead) -> PendingStep:
    """Launch a step; nothing waits for the device."""
    began = time.perf_counter()
    expanded = head.expand(plan)
    output = worker.forward(expanded, draws=worker.captures_ready and head.captured(expanded))
    return PendingStep(expanded, output, head.sample(expanded, output), head, began)


class PendingStep:
    """A step whose results are on their way to the host; `result` waits for them."""

    def __init__(
        self, expanded: ExpandedPlan, output: ForwardOutput, samples: StepSamples, head: SamplingHead, began: float
    ):
        self._expanded = expanded
        self._head = head
        self.exchanged_bytes = 0  # that this rank sent to others
        self._began = began
        self._padding = output.padding
        self._attention_bytes = output.attention_bytes
        self._hidden = output.hidden
        self._samples = samples
        by_row = expanded.by_original_row
        self._scores = {row: [part.start_copy() for part in parts] for row, parts in by_row(samples.scores).items()}
        self._pooled = {row: begin_copy(vector) for row, vector in by_row(output.pooled).items()}
        self._mass = {row: begin_copy(mass) for row, mass in by_row(output.mass).items()}
        self._deviations = begin_copy(output.deviations) if output.deviations is not None else None
        self._event = None
        if head.device.type == "cuda":
            self._event = torch.cuda.Event()
            self._event.record()
        self._launch_seconds = time.perf_counter() - began

    def result(self) -> StepResult:
        if self._event is not None:
            self._event.synchronize()
        found = self._head.accept(self._expanded, self._samples, self._hidden)
        late = self._head.deferred_results(0.0 if self._expanded.plan.computes else LATE_WAIT_S)
        known, rest = by_known(found)
        if rest:
            self._head.defer(rest, self._tell)
        result = self._tell(known)
        self._head.draw_late()
        result.late = late
        result.scores = {
            row: [entry for part in parts for entry in part.to_host() if entry is not None]
            for row, parts in self._scores.items()
        }
        result.pooled = {row: vector.tolist() for row, vector in self._pooled.items()}
        result.mass = {row: mass.tolist() for row, mass in self._mass.items()}
        result.deviations = self._deviations_by_probe()
        result.seconds = time.perf_counter() - self._began
        result.launch_seconds = self._launch_seconds
        result.padding = self._padding
        result.attention_bytes = self._attention_bytes
        result.exchanged_bytes = self.exchanged_bytes
        return result

    def _tell(self, known: list[AcceptedSample]) -> StepResult:
        """What became of some of the samples; the others are deferred."""
        counts = [count for _, _, count in self._expanded.samples()]
        result = StepResult(step=self._expanded.plan.step, tokens=[[] for _ in counts])
        for one in known:
            i, accepted = one.index, self._head.observe(one)
            result.tokens[i] = accepted.tokens
            if counts[i] > 1:
                result.drafts[i] = counts[i] - 1, accepted.sampled - 1
            if accepted.forced:
                result.forced[i] = list(accepted.forced)
            if accepted.done:
                result.ended.append(i)
            if accepted.error:
                result.errors[i] = accepted.error
            if some := self._samples.logprobs(one.indices[: accepted.sampled]):
                result.logprobs[i] = some
        told = {one.index for one in known}
        result.deferred = [i for i in range(len(counts)) if i not in told]
        return result

    def _deviations_by_probe(self) -> list[list[float]]:
        if self._deviations is None:
            return []
        return [part.tolist() for part in self._deviations.split([p.count for p in self._expanded.plan.probes])]
