"""Under a grammar too a step is launched before the last one is read, and draws what it would have drawn alone."""

import json
import random

import pytest
from fuzz_cases import GRAMMARS, SCHEMA, Asked
from fuzz_models import EOS, fuzz_models
from fuzz_runner import Engine
from launching_ahead import CapturingWorker, LaunchingAhead

from quire.generation.grammar import slot_grammars
from quire.types.grammar import GrammarSpec, ThoughtSpec
from quire.types.sampling_params import SamplingParams

SPECS = [
    *GRAMMARS,
    GrammarSpec("json_schema", json.dumps({"type": "array", "items": SCHEMA, "minItems": 2, "maxItems": 2})),
    GrammarSpec("regex", "[a-z ]{9,30}", thought=ThoughtSpec("the", ("xyz",), inside=True, budget=5)),
    None,
]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Of a model that gives the same bits for a row whatever runs beside it."""
    return fuzz_models(tmp_path_factory.mktemp("models"))["compiled"].path


def asked(count, **params):
    rng = random.Random(5)
    found = []
    for i in range(count):
        prompt = [rng.randrange(EOS) for _ in range(rng.randint(3, 14))]
        chosen = {"temperature": i % 2, "seed": i, "max_tokens": rng.randint(3, 40), "grammar": SPECS[i % len(SPECS)]}
        found.append(Asked(f"r{i}", prompt, SamplingParams(**chosen | params), at=rng.randrange(9)))
    return found


def answers(engine, requests):
    engine.answers.clear()
    assert not engine.run(requests)
    engine.check_idle()
    return {name: [one.token_ids for one in answer.output.outputs] for name, answer in engine.answers.items()}


def open_engine(path, seed, **options):
    options = {"kv_pages": 400, "max_seqs": 8, "page_size": 4, "max_model_len": 96, "threads": 1} | options
    return Engine({"model": path, **options}, seed)


@pytest.fixture(scope="module")
def one_in_flight(path):
    engine = open_engine(path, 0, depth=1)
    yield engine
    engine.close()


@pytest.mark.parametrize("patience", [60.0, 0.0], ids=["soon", "late"])
@pytest.mark.parametrize(
    ("options", "params"),
    [
        ({}, {}),
        ({"depth": 3}, {}),
        ({"kv_pages": 30}, {}),
        ({}, {"n": 3, "temperature": 1.0}),
        ({}, {"logprobs": 2}),
        ({}, {"presence_penalty": 1.0, "logit_bias": {3: 5.0}}),
        ({"speculation": "ngram", "draft_adapt": False}, {}),
        ({"speculation": "suffix", "draft_adapt": True}, {}),
    ],
    ids=["plain", "deep", "preempted", "branches", "logprobs", "penalties", "drafts", "adapting"],
)
def test_the_same_tokens_as_with_one_step_in_flight(path, one_in_flight, monkeypatch, options, params, patience):
    expected = answers(one_in_flight, asked(16, **params))
    monkeypatch.setattr(slot_grammars, "PATIENCE_S", patience)
    engine = open_engine(path, 1, **{"depth": 2, **options})
    try:
        assert isinstance(engine.core.executor, LaunchingAhead)
        assert answers(engine, asked(16, **params)) == expected
        late, stats = engine.core.executor._worker.late, engine.core.stats()
        assert late > 20 or "draft_adapt" in options
        assert stats.preemptions > 0 or "kv_pages" not in options
    finally:
        engine.close()


@pytest.mark.parametrize("patience", [60.0, 0.0], ids=["soon", "late"])
@pytest.mark.parametrize("depth", [2, 3])
def test_captured_steps_draw_what_does_not_wait(dense_model, monkeypatch, depth, patience):
    """Greedy answers without a grammar are drawn with the step, those beside them later, from logits that the next
    step would write over."""
    reference = open_engine(dense_model, 0, depth=1)
    requests = asked(24, temperature=0)
    try:
        expected = answers(reference, requests)
    finally:
        reference.close()
    monkeypatch.setattr(slot_grammars, "PATIENCE_S", patience)
    monkeypatch.setattr(LaunchingAhead, "worker", CapturingWorker)
    engine = open_engine(dense_model, 1, depth=depth)
    try:
        assert answers(engine, requests) == expected
        worker = engine.core.executor._worker
        assert worker.late > 60 and worker.replays > 10 and worker.mixed > 2
    finally:
        engine.close()


def test_what_comes_from_the_grammar_overlaps_with_the_forward_pass(path, monkeypatch):
    """With one answer each step but the first is launched while the last is in flight, unless tokens are forced."""
    monkeypatch.setattr(slot_grammars, "PATIENCE_S", 60.0)
    engine = open_engine(path, 1, depth=2)
    try:
        spec = GrammarSpec("regex", "[a-z]{30}")
        (found,) = answers(engine, [Asked("r", [1, 2, 3], SamplingParams(max_tokens=10, seed=1, grammar=spec))])["r"]
        assert len(found) == 10 and engine.core.executor._worker.late == 9 and engine.core.stats().steps == 10
    finally:
        engine.close()


def test_an_abort_in_the_middle_leaves_nothing(path, monkeypatch):
    monkeypatch.setattr(slot_grammars, "PATIENCE_S", 0.0)
    engine = open_engine(path, 1, depth=2, max_seqs=2)
    try:
        requests = asked(12, max_tokens=30)
        for at, one in enumerate(requests):
            one.abort = at % 5 if at % 3 else None
        assert not engine.run(requests)
        engine.check_idle()
        assert not engine.core.executor._head._late._waiting
    finally:
        engine.close()


def test_a_grammar_that_fails_ends_its_answer_alone(path, monkeypatch):
    """While its next step is on its way."""
    taken = slot_grammars._accept_each

    def failing(backend, moves, *how):
        found = taken(backend, moves, *how)
        for at, move in enumerate(moves):
            if move.live.end == 3 + 12 and move.position >= 6:
                found[at] = slot_grammars.Accepted(move.tokens[:1], 1, error="out of order")
        return found

    monkeypatch.setattr(slot_grammars, "_accept_each", failing)
    engine = open_engine(path, 1, depth=2)
    try:
        for length in (12, 11):
            params = SamplingParams(max_tokens=length, temperature=0, grammar=GrammarSpec("regex", "[a-z]{90}"))
            engine.core.submit(engine.request(Asked(f"r{length}", [5, length, 7], params), []))
        events = []
        while engine.core.busy:
            events += engine.core.step()
        ends = {event.request: (event.finish.value, event.message) for event in events if event.finish}
        assert ends == {"r12": ("error", "the grammar failed: out of order"), "r11": ("length", "")}
        assert engine.core.executor._worker.late > 10
    finally:
        engine.close()
