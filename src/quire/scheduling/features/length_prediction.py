"""Predicted answer lengths as a feature: asked for when a sequence arrives, taught when it ends, checked against what
came true.

Refuses to know: how lengths are predicted, what policies make of them.
"""

from __future__ import annotations

from quire.scheduling.feature import SchedulingFeature
from quire.scheduling.features.timeline_recorder import TimelineRecorder
from quire.scheduling.length_predictor import LengthPredictor
from quire.scheduling.plan_builder import PlanBuilder
from quire.scheduling.sequence import Sequence
from quire.types.plan import StepResult
from quire.types.policy import Expected
from quire.types.request import FinishReason, Request


def runs_to_limit(request: Request) -> bool:
    """Whether nothing but its limit ends an answer: its length is known, and says nothing of others'."""
    params = request.params
    return params.ignore_eos and not (params.stop or params.stop_token_ids or params.grammar)


class LengthPrediction(SchedulingFeature):
    def __init__(self, predictor: LengthPredictor, timeline: TimelineRecorder):
        self._predictor = predictor
        self._timeline = timeline
        self._learned = False

    def arrived(self, seq: Sequence) -> None:
        if seq.draws and not seq.outputs and not runs_to_limit(seq.request):
            seq.expected = self._predictor.predict(seq.request, seq.limit - seq.prompt_len)
            seq.log.expected = (seq.expected.likely, seq.expected.high)

    def finished(self, seq: Sequence, reason: FinishReason | None) -> None:
        if reason not in (FinishReason.STOP, FinishReason.LENGTH) or not seq.draws or seq.request.outputs:
            return
        if runs_to_limit(seq.request):
            return
        expected: Expected = seq.expected
        stats, outputs = self._timeline.stats, seq.outputs
        stats.lengths_predicted += 1
        stats.lengths_below_likely += outputs <= expected.likely
        stats.lengths_below_high += outputs <= expected.high
        self._predictor.learn(seq.request, seq.limit - seq.prompt_len, outputs)
        self._learned = True

    def step_landed(self, step: PlanBuilder, result: StepResult) -> None:
        if self._learned:
            self._learned = False
            self._predictor.train()
