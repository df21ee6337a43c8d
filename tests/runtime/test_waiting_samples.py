"""Samples that wait for their grammars: each is drawn once, from its own logits, or not at all."""

from types import SimpleNamespace

import torch

from quire.generation.sampling.sampler import Sampled
from quire.runtime.late_draws import DrawnTokens, LateDraws, LateSample, StepSamples
from quire.types.plan import Sample


class Waiting:
    """Samples of positions 5 in three slots, whose grammars are one token behind; the likeliest token is 10 * slot."""

    def __init__(self):
        self.draws, self.order = LateDraws(), []
        self.grammars = [SimpleNamespace(position=4) for _ in range(3)]
        self.logits = torch.zeros(3, 30)
        self.logits[range(3), [0, 10, 20]] = 1.0
        self.samples = [LateSample(Sample(i, i, 5), grammar, i) for i, grammar in enumerate(self.grammars)]
        self.draws.add(self.logits, self.samples)

    def proceed(self):
        self.draws.proceed(self.draw)

    def draw(self, logits, samples):
        self.order.append([one.sample.slot for one in samples])
        return DrawnTokens(Sampled(logits.argmax(-1)))

    def launch(self):
        """The next step, which writes where the last one left its logits."""
        self.draws.keep()
        self.logits.fill_(torch.nan)

    def tokens(self):
        return StepSamples(None, dict(enumerate(self.samples))).tokens(3)


def test_nothing_is_drawn_before_its_turn():
    waiting = Waiting()
    waiting.proceed()
    assert waiting.tokens() == [None] * 3 and not waiting.order
    for grammar in waiting.grammars:
        grammar.position = 5
    waiting.proceed()
    waiting.proceed()
    assert waiting.tokens() == [0, 10, 20] and waiting.order == [[0, 1, 2]]


def test_logits_outlast_the_steps_after_theirs():
    waiting = Waiting()
    waiting.grammars[1].position = 5
    waiting.proceed()
    waiting.launch()
    assert waiting.tokens() == [None, 10, None]
    waiting.launch()
    waiting.grammars[2].position = 5
    waiting.proceed()
    waiting.launch()
    waiting.grammars[0].position = 5
    waiting.proceed()
    assert waiting.tokens() == [0, 10, 20] and waiting.order == [[1], [2], [0]]


def test_what_has_been_passed_or_is_over_is_not_drawn():
    waiting = Waiting()
    waiting.grammars[0].position, waiting.grammars[1].position = 8, None  # forced tokens followed; the answer ended
    waiting.proceed()
    assert [one.void for one in waiting.samples] == [True, True, False]
    waiting.launch()
    waiting.grammars[2].position = 5
    waiting.proceed()
    assert waiting.tokens() == [None, None, 20] and waiting.order == [[2]]
    waiting.grammars[2].position = None
    assert waiting.samples[2].void, "its slot was given back"


def test_tokens_of_a_step_come_from_wherever_they_were_drawn():
    late = LateSample(Sample(1, 1, 5), SimpleNamespace(position=5), 0)
    step = StepSamples(DrawnTokens(Sampled(torch.tensor([7, 9]))), {1: late})
    assert step.tokens(3) == [7, None, 9]
    late.drawn = DrawnTokens(Sampled(torch.tensor([8])))
    assert late.drawn.arrived and step.tokens(3) == [7, 8, 9] and step.logprobs([0, 1, 2]) == []
