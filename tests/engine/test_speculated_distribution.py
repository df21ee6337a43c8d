"""Speculation keeps the target's distribution: the joint law of four sampled tokens, through the real worker, sampler
and verifier, over a tiny model whose law is known exactly."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from quire.generation.drafting.speculation import Speculation, verify
from quire.runtime.sampling_head import SamplingHead
from quire.runtime.step_result import run_step
from quire.runtime.worker import ForwardWorker
from quire.types.kv import KVGroup, KVLayout
from quire.types.plan import Admit, Capacity, PageDelta, Row, Sample, StepPlan
from quire.types.sampling_params import SamplingParams
from quire.types.seams import DraftTree

VOCAB, LENGTH, SLOTS, TOP_P = 5, 4, 2500, 0.9
LAYOUT = KVLayout((KVGroup((0,), 8, 1, 1),), "float32")
CAPACITY = Capacity(pages=SLOTS + 1, slots=SLOTS, max_model_len=8, max_batch_tokens=1 << 20, depth=1, drafts=3)
PARAMS = SamplingParams(temperature=1.0, top_p=TOP_P)
TABLE = torch.tensor(np.random.default_rng(8).normal(0, 1.2, (VOCAB, VOCAB)), dtype=torch.float32)


class TableModel:
    """Logits that depend on the last token alone."""

    spec = SimpleNamespace(vocab_size=VOCAB, layers=())
    sampling = None
    adapter_slots = 0

    def sketch(self):
        return None

    def prefix_heads(self, layout):
        return None

    def prepared_lengths(self, longest):
        return []

    def forward(self, input_ids, batch, kv, *, last=False, tap=None):
        return input_ids[batch.ends] if last else input_ids

    def logits(self, hidden):
        return TABLE[hidden]


class RandomProposer:
    """Random drafts, some accepted and some not."""

    def __init__(self, seed):
        self._rng = np.random.default_rng(seed)

    def propose(self, contexts, budgets):
        return self._rng.integers(0, VOCAB, (len(budgets), max(budgets))).tolist()

    def observe(self, context, tokens):
        pass

    def forget(self, context):
        pass


class RandomTrees(RandomProposer):
    """Three draft tokens, each after any before it or after the last known one."""

    def propose(self, contexts, budgets):
        drafts = super().propose(contexts, budgets)
        return [
            DraftTree(tokens[:budget], [int(self._rng.integers(-1, i)) if i else -1 for i in range(budget)])
            for tokens, budget in zip(drafts, budgets, strict=True)
        ]


def draw(count, first_seed, speculation=None):
    """`count` answers of four tokens to the prompt [0], seeds counting up."""
    grammars = SimpleNamespace(close=lambda: None)
    worker = ForwardWorker(TableModel(), LAYOUT, CAPACITY, torch.device("cpu"))
    head = SamplingHead(worker, grammars, speculation)
    answers = []
    for base in range(0, count, SLOTS):
        slots = range(min(SLOTS, count - base))
        known = {slot: [0] for slot in slots}
        plan = StepPlan(step=0, frees=list(slots) if base else [])
        plan.admits = [Admit(s, str(s), [0], 1, PARAMS, first_seed + base + s, 0, []) for s in slots]
        plan.deltas = [PageDelta(s, 0, 0, [s + 1]) for s in slots]
        while going := [s for s in slots if len(known[s]) <= LENGTH]:
            for row, slot in enumerate(going):
                at = len(known[slot])
                drafts = min(3, LENGTH - at) if speculation else 0
                plan.rows.append(Row(slot, at - 1, 1, drafts=drafts))
                plan.samples.append(Sample(row, slot, at))
            for slot, tokens in zip(going, run_step(plan, worker, head).result().tokens, strict=True):
                known[slot] += tokens
            plan = StepPlan(step=0)
        answers += [known[slot][1:] for slot in slots]
    return np.array(answers)


def law():
    """The exact probability of every answer, from the definition of top-p."""
    after = TABLE.double().softmax(-1).numpy()
    for row in after:
        order = np.argsort(-row)
        before = np.cumsum(row[order]) - row[order]
        row[order[before >= TOP_P]] = 0
        row /= row.sum()
    return {
        answer: np.prod([after[a, b] for a, b in itertools.pairwise((0, *answer))])
        for answer in itertools.product(range(VOCAB), repeat=LENGTH)
    }


def counts(answers):
    places = answers @ VOCAB ** np.arange(LENGTH - 1, -1, -1)
    return np.bincount(places, minlength=VOCAB**LENGTH)


def p_value(observed, expected):
    """Chi-squared, cells with little expected joined into one."""
    large = expected >= 8
    seen = np.append(observed[large], observed[~large].sum())
    mean = np.append(expected[large], expected[~large].sum())
    seen, mean = seen[mean > 0], mean[mean > 0]
    statistic = ((seen - mean) ** 2 / mean).sum()
    return torch.special.gammaincc(torch.tensor((len(mean) - 1) / 2.0), torch.tensor(statistic / 2)).item()


def test_the_same_seeds_give_the_same_tokens():
    plain = draw(3000, 100)
    assert (plain == draw(3000, 100, Speculation(RandomProposer(1)))).all()
    assert (plain == draw(3000, 100, Speculation(RandomTrees(1)))).all()


@pytest.mark.slow
@pytest.mark.parametrize("proposer", [RandomProposer, RandomTrees])
def test_joint_distribution_of_four_tokens(proposer):
    exact, count = np.array(list(law().values())), 50_000
    plain, speculated = counts(draw(count, 0)), counts(draw(count, 10**6, Speculation(proposer(1))))
    assert (speculated[exact == 0] == 0).all()
    assert p_value(plain, exact * count) > 0.001
    assert p_value(speculated, exact * count) > 0.001
    both = plain + speculated  # two samples: each against their mean, half the statistic of a twin test
    assert p_value(speculated, both / 2) > 0.001


@pytest.mark.slow
def test_a_biased_verifier_is_caught():
    calls = itertools.count()

    def lenient(draft, drawn):
        right = verify(draft, drawn)
        return min(len(draft), right + (next(calls) % 25 == 0))  # one draft token in 25 passes unverified

    biased = counts(draw(50_000, 10**6, Speculation(RandomProposer(1), lenient)))
    assert p_value(biased, np.array(list(law().values())) * 50_000) < 1e-6
