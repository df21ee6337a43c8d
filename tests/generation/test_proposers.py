"""Every proposer: bounded, never wrong in kind, blind to other salts; and the one verifier that judges them."""

import random

import pytest

from quire.generation.drafting.ngram import NGramProposer, SuffixProposer, SyntheticProposer
from quire.generation.drafting.predicted import PredictedProposer
from quire.generation.drafting.speculation import Speculation, TreeRow, verify
from quire.types.fakes import FakeProposer
from quire.types.grammar import GrammarSpec
from quire.types.plan import Admit, Row, Sample, StepPlan, Write
from quire.types.sampling_params import SamplingParams
from quire.types.seams import DraftContext, DraftTree

VOCAB = 50
PROPOSERS = [
    pytest.param(lambda: FakeProposer([7, 8, 9]), id="fake"),
    pytest.param(NGramProposer, id="ngram"),
    pytest.param(PredictedProposer, id="predicted, nothing"),
    pytest.param(lambda: PredictedProposer(NGramProposer()), id="predicted, else ngram"),
    pytest.param(SuffixProposer, id="suffix"),
    pytest.param(lambda: SyntheticProposer(0.5, VOCAB), id="synthetic"),
]


def admit(slot, tokens, salt="", **more):
    return Admit(
        slot=slot, key=f"r{slot}/0", tokens=list(tokens), prompt_len=len(tokens), params=SamplingParams(), seed=0,
        branch=0, stop_ids=[], salt=salt, **more,
    )  # fmt: skip


def grow(proposer, context, tokens):
    context.tokens += tokens
    proposer.observe(context, tokens)


@pytest.mark.parametrize("make", PROPOSERS)
def test_contract(make):
    proposer, rng = make(), random.Random(3)
    contexts = [DraftContext(admit(slot, [rng.randrange(6) for _ in range(slot * 5 + 1)])) for slot in range(6)]
    for _ in range(60):
        budgets = [rng.randint(1, 9) for _ in contexts]
        before = [list(context.tokens) for context in contexts]
        drafts = proposer.propose(contexts, budgets)
        assert len(drafts) == len(contexts)
        assert all(len(draft) <= budget for draft, budget in zip(drafts, budgets, strict=True))
        assert all(0 <= token < VOCAB for draft in drafts for token in draft)
        assert [context.tokens for context in contexts] == before
        for context in contexts:
            grow(proposer, context, [rng.randrange(6) for _ in range(rng.randint(1, 4))])
        gone = rng.randrange(6)
        proposer.forget(contexts[gone])
        contexts[gone] = DraftContext(admit(gone, [rng.randrange(6)]))
    assert proposer.propose([], []) == []


def test_a_prediction_is_followed_left_and_found_again():
    context = DraftContext(admit(0, [1, 2], prediction=[*range(10, 20), 5, 6, 7, 8]))
    proposer = PredictedProposer()
    grow(proposer, context, [10])
    assert proposer.propose([context], [3]) == [[11, 12, 13]]
    grow(proposer, context, [11, 12, 40])  # an edit
    assert proposer.propose([context], [3]) == [[]]
    grow(proposer, context, [14])
    assert proposer.propose([context], [3]) == [[]]  # one token could stand anywhere
    grow(proposer, context, [15])
    assert proposer.propose([context], [3]) == [[16, 17, 18]]
    grow(proposer, context, [16, 17, 18, 19, 5, 6, 7])
    assert proposer.propose([context], [3]) == [[8]]
    grow(proposer, context, [8])
    assert proposer.propose([context], [3]) == [[]]  # it is over
    proposer.forget(context)
    assert proposer._followers == {}


def test_another_proposer_drafts_where_a_prediction_does_not_help():
    left = DraftContext(admit(0, [1, 2, 3, 1, 2], prediction=[50, 51]))
    plain = DraftContext(admit(1, [4, 5, 6, 4, 5]))
    followed = DraftContext(admit(2, [4, 5, 6, 4, 5], prediction=[7, 8]))
    contexts = [left, plain, followed]
    proposer = PredictedProposer(NGramProposer())
    grow(proposer, left, [3, 1, 2])
    assert proposer.propose(contexts, [2, 2, 2]) == [[3, 1], [6, 4], [7, 8]]


def test_without_predictions_nothing_is_kept_of_a_slot():
    speculation = Speculation(PredictedProposer(), predicted_only=True)
    plan = StepPlan(step=0, admits=[admit(0, [1]), admit(1, [1], prediction=[2])], writes=[Write(0, 1, [9])])
    speculation.expand(plan)
    assert set(speculation._contexts) == {1}


def test_ngram_continues_what_stood_there_last_and_goes_round():
    context = DraftContext(admit(0, [1, 2, 3, 4, 5, 9, 2, 3, 4]))
    proposer = NGramProposer()
    assert proposer.propose([context], [3]) == [[5, 9, 2]]
    assert proposer.propose([context], [8]) == [[5, 9, 2, 3, 4, 5, 9, 2]]
    grow(proposer, context, [7])
    assert proposer.propose([context], [3]) == [[]]
    grow(proposer, context, [2, 3, 4])
    assert proposer.propose([context], [2]) == [[7, 2]]


def test_suffix_learns_from_answers_of_its_own_salt_only():
    proposer = SuffixProposer()
    first = DraftContext(admit(0, [1, 2]))
    grow(proposer, first, [3, 4, 5, 6])
    same, other = DraftContext(admit(1, [9, 1, 2])), DraftContext(admit(2, [9, 1, 2], salt="tenant"))
    assert proposer.propose([same, other], [4, 4]) == [[3, 4, 5, 6], []]


def test_suffix_takes_the_likelier_and_stops_when_unsure():
    proposer = SuffixProposer()
    for token in (5, 5, 6):
        grow(proposer, DraftContext(admit(0, [1, 2])), [token])
    assert proposer.propose([DraftContext(admit(1, [1, 2]))], [4]) == [[5]]
    for token in range(10, 14):
        for _ in range(3):
            grow(proposer, DraftContext(admit(0, [1, 2])), [token])
    assert proposer.propose([DraftContext(admit(1, [1, 2]))], [4]) == [[]]


def test_suffix_forgets_rather_than_grows():
    proposer, rng = SuffixProposer(max_ngrams=100), random.Random(1)
    context = DraftContext(admit(0, [1]))
    grow(proposer, context, [rng.randrange(VOCAB) for _ in range(500)])
    assert len(proposer._counts) == 100


def test_synthetic_accepts_the_share_it_is_told():
    proposer = SyntheticProposer(0.8, VOCAB)
    counts = [proposer.verify([0] * 4, [0] * 5) for _ in range(20_000)]
    assert sum(counts) / len(counts) == pytest.approx(0.8 + 0.8**2 + 0.8**3 + 0.8**4, abs=0.03)


def test_verify_counts_the_draft_tokens_before_the_first_wrong_one():
    assert verify([1, 2, 3], [1, 2, 3, 4]) == 3
    assert verify([1, 2, 3], [1, 9, 3, 4]) == 1
    assert verify([5], [1, 2]) == 0
    assert verify([], [1]) == 0


def test_a_plan_with_drafts_becomes_rows_of_one_token():
    speculation = Speculation(FakeProposer([7, 8, 9]))
    first = StepPlan(step=1, admits=[admit(3, [1, 2]), admit(5, [4])], rows=[Row(3, 0, 2), Row(5, 0, 1)])
    assert speculation.expand(first).plan is first
    speculation.observe(3, 2, [6])
    plan = StepPlan(
        step=2,
        rows=[Row(3, 2, 1, drafts=2), Row(5, 0, 1)],
        samples=[Sample(0, 3, 3), Sample(1, 5, 1)],
        writes=[Write(3, 2, [6])],
    )
    expanded = speculation.expand(plan)
    assert expanded.plan.rows == [Row(3, 2, 1, drafts=2), Row(3, 3, 1), Row(3, 4, 1), Row(5, 0, 1)]
    assert expanded.plan.samples == [Sample(0, 3, 3), Sample(1, 3, 4), Sample(2, 3, 5), Sample(3, 5, 1)]
    assert expanded.plan.writes == [Write(3, 2, [6]), Write(3, 3, [7, 8])]
    assert list(expanded.samples()) == [(Sample(0, 3, 3), [7, 8], 3), (Sample(3, 5, 1), [], 1)]
    assert speculation.accept([7, 8], [7, 1, 2]) == ([7, 1], [0, 1])


TREE = DraftTree([10, 11, 12, 13, 14, 15], [-1, -1, 0, 1, 3, 1])


def test_a_tree_becomes_rows_at_places_with_positions_by_depth():
    speculation = Speculation(FakeProposer(TREE))
    speculation.expand(StepPlan(step=1, admits=[admit(3, [1, 2])], rows=[Row(3, 0, 2)]))
    speculation.observe(3, 2, [6])
    plan = StepPlan(step=2, rows=[Row(3, 2, 1, drafts=6)], samples=[Sample(0, 3, 3)])
    expanded = speculation.expand(plan)
    assert expanded.plan.rows[1:] == [Row(3, at, 1) for at in range(3, 9)]
    assert [s.position for s in expanded.plan.samples] == [3, 4, 4, 5, 5, 6, 5]
    assert expanded.plan.writes == [Write(3, 3, TREE.tokens)]
    assert expanded.tree_rows == {
        1: TreeRow(3, 0, 0x0),
        2: TreeRow(3, 0, 0x1),
        3: TreeRow(3, 1, 0x20),
        4: TreeRow(3, 1, 0x31),
        5: TreeRow(3, 2, 0x431),
        6: TreeRow(3, 1, 0x51),
    }
    drawn = [11, 0, 13, 0, 14, 99, 0]
    assert speculation.accept(TREE, drawn) == ([11, 13, 14, 99], [0, 2, 4, 5])
    assert speculation.accept(TREE, [12, *drawn[1:]]) == ([12], [0])


@pytest.mark.parametrize(
    "params", [{"bad_words": ["x"]}, {"frequency_penalty": 0.1}, {"grammar": GrammarSpec("json_object")}]
)
def test_where_draws_have_a_history_a_tree_is_cut_to_its_first_branch(params):
    speculation, one = Speculation(FakeProposer(TREE)), admit(3, [1, 2])
    one.params = SamplingParams(**params)
    speculation.expand(StepPlan(step=1, admits=[one], rows=[Row(3, 0, 2)]))
    expanded = speculation.expand(StepPlan(step=2, rows=[Row(3, 2, 1, drafts=6)], samples=[Sample(0, 3, 3)]))
    assert expanded.drafts == [[10, 12]] and not expanded.tree_rows and TREE.first_branch() == [10, 12]
