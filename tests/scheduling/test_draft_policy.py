"""Budgets follow what guesses bring and what they cost: full where they pay, none where they lose, with rare trials."""

import pytest

from quire.memory.manager import PageTable
from quire.scheduling.features.draft_budgets import Drafting
from quire.scheduling.plan_builder import PlanBuilder
from quire.scheduling.sequence import Sequence
from quire.types.clock import Clock
from quire.types.plan import Capacity, Row, Sample, StepResult
from quire.types.request import Request
from quire.types.sampling_params import SamplingParams

MOST = 4


class World:
    """Steps of `rows` sequences that take `seconds(tokens)`, and `asking` more where anything is guessed; guesses are
    right with chance `rate`."""

    def __init__(self, rows, rate, seconds, depth=1, adapts=True, asking=0.0):
        capacity = Capacity(
            pages=9, slots=rows, max_model_len=10**6, max_batch_tokens=4096, depth=depth, drafts=MOST, adapts=adapts
        )
        self.clock = Clock()
        self.policy = Drafting(capacity, self.clock)
        self.seconds, self.rate, self.now, self.step = seconds, rate, 0.0, 0
        self.seqs = []
        for i in range(rows):
            request = Request(id=str(i), prompt=[1], params=SamplingParams(max_tokens=None))
            seq = Sequence(request, 0, id=i, limit=10**6, table=PageTable(1))
            seq.tokens += [1, 2]
            seq.computed = 2
            self.seqs.append(seq)
        self.owed = 0.0
        self.asking, self.rested = asking, 0

    def run(self, steps):
        """Tokens drawn per second, and guesses per row and step."""
        began, drawn, guessed = self.now, 0, 0
        for _ in range(steps):
            self.step += 1
            budgets = self.policy.budgets(self.seqs)
            step = PlanBuilder(self.step, self.now)
            step.plan.rows = [Row(i, 2, 1, drafts=budgets.get(s, 0)) for i, s in enumerate(self.seqs)]
            step.plan.samples = [Sample(i, i, 3) for i in range(len(self.seqs))]
            step.rows = step.samples = [(seq, seq.epoch) for seq in self.seqs]
            self.policy.planned(step)
            self.rested += self.policy.rests
            assert not (self.policy.rests and budgets)
            drafts = {}
            for i, seq in enumerate(self.seqs):
                if budget := budgets.get(seq, 0):
                    self.owed += sum(self.rate**j for j in range(1, budget + 1))
                    right = min(budget, int(self.owed))
                    self.owed -= right
                    drafts[i] = (budget, right)
                    drawn, guessed = drawn + right, guessed + budget
            self.now += self.seconds(len(self.seqs) + sum(b for b, _ in drafts.values())) + self.asking * bool(drafts)
            self.clock.now = self.now
            self.policy.step_landed(step, StepResult(step=self.step, tokens=[], drafts=drafts))
            drawn += len(self.seqs)
        return drawn / (self.now - began), guessed / len(self.seqs) / steps


def cheap(tokens):
    return 1.0 + 0.01 * tokens


def dear(tokens):
    return 1.0 * tokens


@pytest.mark.parametrize("depth", [1, 2])
def test_guesses_that_pay_are_made_in_full(depth):
    world = World(1, 0.9, cheap, depth)
    world.run(50)
    speed, guessed = world.run(400)
    assert guessed > 0.9 * MOST
    assert speed > 3 / cheap(1)


@pytest.mark.parametrize(("rate", "seconds"), [(0.9, dear), (0.0, cheap), (0.2, dear), (0.02, lambda n: 1 + 0.05 * n)])
def test_where_guesses_lose_they_end_and_trials_are_rare(rate, seconds):
    world = World(32, rate, seconds)
    world.run(100)
    speed, guessed = world.run(2000)
    assert speed > 0.97 * 32 / seconds(32)
    assert guessed < 0.1


def test_what_it_costs_to_ask_is_paid_once_however_much_is_guessed():
    world = World(1, 0.6, lambda tokens: 1.0, asking=0.9)  # one token is worth less than asking, four are worth more
    world.run(100)
    speed, guessed = world.run(1000)
    assert guessed > 0.9 * MOST and speed > 1.15


@pytest.mark.parametrize("rows", [1, 8])
def test_where_asking_is_dear_it_rests(rows):
    world = World(rows, 0.6, cheap, asking=4.0)
    world.run(200)
    world.rested = 0
    speed, _ = world.run(4000)
    assert speed > 0.98 * rows / cheap(rows)
    assert world.rested > 0.95 * 4000
    world.asking = 0.0
    world.run(8000)
    assert world.run(100)[1] > 2


def test_bad_luck_of_one_is_forgotten_while_others_guess():
    world = World(4, 0.8, lambda tokens: 4 + 0.3 * (tokens - 4))
    world.run(50)
    unlucky = world.policy._rates[world.seqs[0]]
    for _ in range(30):
        unlucky.learn(4, 4, 0)
    assert unlucky.rate < 0.3
    world.run(300)
    assert unlucky.rate > 0.4


def test_a_policy_that_does_not_adapt_always_guesses_in_full():
    assert World(4, 0.0, dear, adapts=False).run(50)[1] == MOST


def test_a_dear_guess_is_a_short_one():
    world = World(8, 0.6, lambda tokens: 8 + 0.35 * (tokens - 8))
    world.run(50)
    _, guessed = world.run(400)
    assert 1 <= guessed < 3


def test_guessing_begins_again_when_it_pays_again():
    world = World(4, 0.0, cheap)
    world.run(300)
    world.rate = 0.9
    world.run(1500)
    _, guessed = world.run(200)
    assert guessed > 2


def test_no_guess_reaches_past_the_limit():
    world = World(1, 0.9, cheap)
    world.run(10)
    seq = world.seqs[0]
    for left, most in ((1, 0), (2, 1), (3, 2), (50, MOST)):
        seq.limit = seq.known + left
        assert world.policy.budgets([seq]).get(seq, 0) == most
    seq.computed = 0
    assert world.policy.budgets([seq]) == {}
