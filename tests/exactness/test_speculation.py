"""Output with speculation is output without it: greedy and seeded, with everything that shapes a sample, any drafter.

The compiled decoder gives a row the same bits whatever runs beside it, so equality is exact: no ties are excused.
"""

import random
import sys
from functools import cache
from itertools import islice
from pathlib import Path

import pytest
import torch
from prompts import BEGINNINGS, LONG, QUESTIONS, forty

from quire import LLM, SamplingParams
from quire.generation.drafting.head_proposers import EagleProposer, MedusaProposer, Recorder
from quire.generation.drafting.heads import load_heads, save_heads
from quire.generation.drafting.speculation import Speculation
from quire.scheduling.features.draft_budgets import Drafting
from quire.types.grammar import GrammarSpec
from quire.types.seams import DraftTree

GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
WAYS = {
    "seeded": SamplingParams(temperature=0.9, top_p=0.9, top_k=50, seed=11, max_tokens=24),
    "penalties": SamplingParams(
        temperature=0.7, seed=3, max_tokens=24, frequency_penalty=0.4, presence_penalty=0.2, repetition_penalty=1.1
    ),
    "logprobs": SamplingParams(temperature=0, logprobs=3, max_tokens=24, min_tokens=10),
    "branches": SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=16, min_p=0.05),
    "stops": SamplingParams(temperature=0, max_tokens=40, stop=[".", "\n"], bad_words=[" the"]),
    "grammar": SamplingParams(
        temperature=0, max_tokens=48, grammar=GrammarSpec("regex", r"(red|green|blue)(, (red|green|blue)){4,12}\.")
    ),
    "json": SamplingParams(temperature=0.8, seed=2, max_tokens=40, grammar=GrammarSpec("json_object")),
}
EDIT = "Repeat this list: red, green, blue, red, green, blue, red, green, blue.\nred, green, blue, red,"


def texts(result):
    return [(o.token_ids, o.text, o.finish_reason, o.logprobs) for o in result.outputs]


def engine(speculation, **options):
    room = {} if "kv_pages" in options else {"kv_memory": "256M"}
    return LLM("smollm2-135m", **room, **{"speculation": speculation, **options})


@pytest.fixture(scope="module")
def plain(default_model):
    with engine("off") as llm:
        yield llm


@pytest.fixture(scope="module")
def few(plain):
    prompts = forty(plain)
    return [EDIT, prompts[0], prompts[2], prompts[12], prompts[17], prompts[36]]


@pytest.fixture(scope="module")
def heads(plain, few, tmp_path_factory):
    """Small heads, taught by the model's answers to a few of the prompts: speculation by kind; any other as it is."""
    train_draft, model = trainer(), plain._link.core.executor.model
    layers = train_draft.depths(len(model.spec.layers))

    @cache
    def records():
        answers = watched(plain, few, Recorder(), layers)
        return train_draft.Records(answers, answers, train_draft.head_of(model), layers)

    @cache
    def heads(kind):
        if kind not in ("medusa", "eagle"):
            return kind
        torch.manual_seed(1)
        path = tmp_path_factory.mktemp("heads") / f"{kind}.safetensors"
        made = train_draft.build(kind, records(), 500)
        losses = list(train_draft.train(made, records().answers, epochs=12, rate=2e-3, positions=128, seed=1))
        assert losses[-1] < losses[0] / 2
        save_heads(made, path, {})
        return f"{kind}:{path}"

    return heads


def trainer():
    sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
    import train_draft

    return train_draft


def watched(plain, prompts, recorder, layers):
    """Answers, with the hidden states that they were drawn from."""
    plain._link.core.executor.watch(recorder, layers)
    plain.generate(prompts, SHORT)
    return [trainer().Answer(torch.tensor(t), torch.cat(h)) for t, h in recorder.answers.values()]


@pytest.fixture(scope="module")
def expected(plain, few):
    greedy = [texts(result) for result in plain.generate(few, SHORT)]
    return greedy, {way: [texts(r) for r in plain.generate(few[:3], params)] for way, params in WAYS.items()}


class DraftingRecorder(Recorder):
    """Records, and asks another proposer for a draft after every token."""

    def __init__(self, proposer):
        super().__init__()
        self.proposer, self.drafts = proposer, {}

    def observe(self, context, tokens):
        super().observe(context, tokens)
        self.proposer.observe(context, tokens)
        self.drafts.setdefault(context.admit.key, []).append(self.proposer.propose([context], [3])[0])


@pytest.mark.parametrize(
    ("kind", "proposer"),
    [pytest.param("medusa", MedusaProposer, marks=pytest.mark.slow), ("eagle", EagleProposer)],
)
def test_heads_draft_in_the_engine_what_they_draft_in_training(plain, few, heads, kind, proposer):
    train_draft, spec = trainer(), plain._link.core.executor.model.spec
    made = load_heads(
        kind, heads(kind).partition(":")[2], hidden=spec.hidden, layers=len(spec.layers), vocab=spec.vocab_size,
        device=torch.device("cpu"),
    )  # fmt: skip
    watcher = DraftingRecorder(proposer(made))
    answers = watched(plain, few, watcher, made.layers if kind == "eagle" else ())
    lesson = train_draft.Lesson(answers, made, made.words.head.weight)
    with torch.no_grad():
        logits = list(islice(train_draft.draft_logits(made, lesson), 3))
    first, rest = [], []
    for i, drafts in enumerate(watcher.drafts.values()):
        for at, draft in enumerate(drafts):
            offline = [made.words.ids[part[i, at].argmax()].item() for part in logits]
            first.append(draft[0] == offline[0])
            drawn = lesson.tokens[i, at + 1 : at + 3].tolist()
            for depth in (1, 2):  # in training the drafter is told what was drawn: the same, while drafts are accepted
                if kind == "medusa" or draft[:depth] == drawn[:depth]:
                    rest.append(draft[depth] == offline[depth])
    assert len(first) == sum(len(a.tokens) for a in answers) and len(rest) > 50
    assert sum(first) >= 0.99 * len(first) and sum(rest) >= 0.99 * len(rest)  # but for near-ties


@pytest.mark.parametrize(
    "speculation",
    [
        "ngram",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("suffix", "draft:smollm2-135m", "medusa", "eagle")),
    ],
)
def test_equals_plain(few, expected, heads, speculation):
    greedy, ways = expected
    with engine(heads(speculation), draft_adapt=False) as llm:  # however fast this machine is
        alone = [texts(llm.generate(prompt, SHORT)[0]) for prompt in few]
        together = [texts(result) for result in llm.generate(few, SHORT)]
        found = {way: [texts(r) for r in llm.generate(few[:3], params)] for way, params in WAYS.items()}
        stats = llm.stats()
    assert alone == greedy and together == greedy
    assert found == ways
    assert stats.accepted_tokens > 10 and stats.waste["draft"] == stats.drafted_tokens - stats.accepted_tokens
    assert stats.running == stats.waiting == stats.pages_used == 0


class Dozing(Drafting):
    """Drafts all it may for some steps, nothing for some."""

    steps = 0

    def budgets(self, running):
        self.steps += 1
        self.rests = self.steps % 8 < 4
        return {} if self.rests else super().budgets(running)


@pytest.mark.parametrize("kind", [pytest.param("medusa", marks=pytest.mark.slow), "eagle"])
def test_while_drafting_is_off_no_hidden_states_are_returned(few, expected, heads, kind, monkeypatch):
    monkeypatch.setattr("quire.scheduling.feature_set.Drafting", Dozing)
    with engine(heads(kind), draft_adapt=False) as llm:
        core, seen = llm._link.core, []
        forward = core.executor.model.forward
        monkeypatch.setattr(
            core.executor.model, "forward", lambda *a, tap=None, **k: seen.append(tap) or forward(*a, tap=tap, **k)
        )
        assert [texts(result) for result in llm.generate(few, SHORT)] == expected[0]
        assert seen.count(None) >= 4 and len(seen) - seen.count(None) >= 4
        assert llm.stats().accepted_tokens > 10


@pytest.mark.parametrize(
    "options",
    [
        {"kv_pages": 16, "max_model_len": 224},
        *(pytest.param(o, marks=pytest.mark.slow) for o in ({"depth": 2}, {"prefill_chunk": 7, "page_size": 5})),
        pytest.param({"process": True}, marks=pytest.mark.slow),
    ],
    ids=["preemption", "two steps in flight", "small chunks and pages", "process"],
)
def test_other_ways_to_run(few, expected, options):
    with engine("suffix", draft_adapt=False, **options) as llm:
        results = llm.generate(few, SHORT)
        again = llm.generate(few, SHORT)
        stats = llm.stats()
    assert [texts(result) for result in results] == [texts(result) for result in again] == expected[0]
    assert stats.accepted_tokens > 10
    assert sum(r.outputs[0].accepted_tokens for r in (*results, *again)) == stats.accepted_tokens
    assert stats.preemptions > 0 or "kv_pages" not in options


class Knowing:
    """Grows trees that hold some of what will be drawn, among much that will not."""

    def __init__(self, answers, seed=1):
        self._answers, self._rng = answers, random.Random(seed)

    def propose(self, contexts, budgets):
        return [self._tree(tuple(context.tokens), budget) for context, budget in zip(contexts, budgets, strict=True)]

    def _tree(self, known, budget):
        whole = next((a for a in self._answers if a[: len(known)] == known), known)
        right, tokens, parents, last = list(whole[len(known) :]), [], [], -1
        for place in range(budget):
            if right and self._rng.random() < 0.5:  # goes on as it will be
                tokens.append(right.pop(0))
                parents.append(last)
                last = place
            else:
                tokens.append(self._rng.randrange(1000))
                parents.append(self._rng.randrange(-1, place))
        return DraftTree(tokens, parents)

    def observe(self, context, tokens):
        pass

    def forget(self, context):
        pass


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"depth": 2},
        *(
            pytest.param(options, marks=pytest.mark.slow)
            for options in (
                {"kv_pages": 16, "max_model_len": 224},
                {"page_size": 5},
                {"page_size": 1, "draft_tokens": 16},
            )
        ),
    ],
    ids=["as it is", "two steps in flight", "preemption", "small pages", "pages of one token"],
)
def test_draft_trees(plain, few, expected, options):
    """Whatever else stands in a tree, answers are those of plain steps: greedy, sampled, and with log-probabilities."""
    texts_of = [plain.text.tokenizer.encode(p) if isinstance(p, str) else p for p in few]
    known = [(*prompt, *answer[0][0]) for prompt, answer in zip(texts_of, expected[0], strict=True)]
    for way in ("seeded", "logprobs"):
        known += [(*p, *a[0][0]) for p, a in zip(texts_of, expected[1][way], strict=False)]
    with engine("suffix", draft_adapt=False, **options) as llm:
        llm._link.core.executor._head.speculate(Speculation(Knowing(known)))
        together = [texts(result) for result in llm.generate(few, SHORT)]
        alone = [texts(llm.generate(prompt, SHORT)[0]) for prompt in few[:3]]
        ways = ("seeded", "logprobs", "penalties")
        found = {way: [texts(r) for r in llm.generate(few[:3], WAYS[way])] for way in ways}
        stats = llm.stats()
    assert together == expected[0] and alone == expected[0][:3]
    assert found == {way: expected[1][way] for way in found}
    assert stats.accepted_tokens > 50 and stats.pages_used == 0


@pytest.mark.slow
def test_plain_torch_agrees_too(few):
    """There rows of another batch may round otherwise; where the oracle decides, they may not."""
    with engine("off", dtype="float32") as other:
        plain = other.generate(few[:4], SHORT)
    with engine("ngram", draft_adapt=False, dtype="float32") as other:
        results = other.generate(few[:4], SHORT)
        assert other.stats().accepted_tokens > 5
        known = [(*r.prompt_token_ids, *r.outputs[0].token_ids) for r in results]
        other._link.core.executor._head.speculate(Speculation(Knowing(known)))
        trees = other.generate(few[:4], SHORT)
        assert other.stats().accepted_tokens > 20
    assert sum(texts(a) == texts(b) for a, b in zip(results, trees, strict=True)) >= 3
    assert sum(texts(a) == texts(b) for a, b in zip(results, plain, strict=True)) >= 3


def hundred(llm):
    rest = [f"{b} {q}" for b, q in zip(BEGINNINGS * 3, QUESTIONS * 5, strict=False)]
    prompts = [*forty(llm), *(llm.text.tokenizer.encode(text) for text in rest[:60])]
    assert len(prompts) == 100 and LONG
    return prompts


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_hundred_prompts_with_every_proposer(plain, heads):
    prompts = hundred(plain)
    expected = [texts(result) for result in plain.generate(prompts, GREEDY)]
    for speculation in ("ngram", "suffix", "draft:smollm2-135m", heads("medusa"), heads("eagle")):
        with engine(speculation, draft_adapt=False) as llm:
            assert [texts(result) for result in llm.generate(prompts, GREEDY)] == expected, speculation
            alone = [texts(llm.generate(prompt, GREEDY)[0]) for prompt in prompts[::10]]
            assert alone == expected[::10], speculation
            assert llm.stats().accepted_tokens > 50
        with engine(speculation) as llm:
            assert [texts(result) for result in llm.generate(prompts, GREEDY)] == expected, f"{speculation}, adapting"
