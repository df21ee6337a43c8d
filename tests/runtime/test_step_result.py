"""What a step tells of its samples, and when."""

from concurrent.futures import Future
from types import SimpleNamespace

import torch

from quire.generation.drafting.speculation import ExpandedPlan
from quire.generation.grammar.slot_grammars import Accepted, Accepting
from quire.generation.sampling.sampler import Sampled
from quire.runtime.late_draws import DrawnTokens, LateDraws, StepSamples
from quire.runtime.sampling_head import AcceptedSample, SamplingHead
from quire.runtime.step_result import PendingStep
from quire.runtime.worker import ForwardOutput
from quire.types.plan import Row, Sample, StepPlan


class DoneMeanwhile(Future):
    """A thread sets it between two questions."""

    asked = 0

    def done(self) -> bool:
        self.asked += 1
        return self.asked > 1


def test_a_sample_that_becomes_known_meanwhile_is_told_once():
    task = DoneMeanwhile()
    task.set_result([Accepted([7], 1)])
    sample = Sample(row=0, slot=0, position=1)
    head = SamplingHead.__new__(SamplingHead)
    head.device, head._deferred, head._speculation = torch.device("cpu"), [], None
    head._late, head._grammars = LateDraws(), SimpleNamespace(accept=lambda *_: None, settle=lambda *_: None)
    accepting = Accepting(SimpleNamespace(position=1), 1, [7], (task, 0))
    head.accept = lambda *_: [AcceptedSample(0, sample, [7], [0], None, drafted=False, accepting=accepting)]
    plan = StepPlan(step=1, rows=[Row(slot=0, start=0, count=1)], samples=[sample])
    step = PendingStep(
        ExpandedPlan.without_drafts(plan),
        ForwardOutput(),
        StepSamples(DrawnTokens(Sampled(torch.tensor([7])))),
        head,
        0.0,
    )
    result = step.result()
    assert (result.tokens, result.deferred) == ([[]], [0])
    (late,) = head.deferred_results(0.0)
    assert (late.tokens, late.deferred) == ([[7]], [])
