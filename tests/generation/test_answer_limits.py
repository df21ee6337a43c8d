"""Limits count for each answer: what one does to a grammar is not felt by the next, and none takes for ever."""

import json
import random

import numpy as np
import pytest

from quire.generation.grammar import answer_grammar, llguidance_backend
from quire.generation.grammar.answer_grammar import AnswerGrammar
from quire.generation.grammar.grammar_store import GrammarStore
from quire.generation.grammar.llguidance_backend import LLGuidanceBackend
from quire.generation.grammar.slot_grammars import SlotGrammars
from quire.text import load_tokenizer, vocabulary_of
from quire.types.grammar import GrammarSpec
from quire.types.plan import Admit
from quire.types.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def vocabulary(default_model):
    return vocabulary_of(load_tokenizer(default_model))


@pytest.fixture
def store(vocabulary):
    store = GrammarStore(LLGuidanceBackend(), lambda: vocabulary)
    yield store
    store.close()


def begin(store, spec):
    compiled = store.prepare(spec).result()

    def own():
        compiled.spoiled = True
        return store.fresh(spec, 0)

    return AnswerGrammar(compiled.parts[0].fork(), own, compiled.first_masks[0])


def walk(answer, seed, length, wanted=lambda token: True):
    """Tokens drawn at random among those allowed; the error, if any."""
    rng = random.Random(seed)
    for _ in range(length):
        allowed = np.flatnonzero(np.unpackbits(answer.mask, bitorder="little")).tolist()
        answer.advance([rng.choice([token for token in allowed if wanted(token)] or allowed)], most=0)
        if answer.done:
            break
    return answer.error


def test_states_of_answers_do_not_add_up(store, vocabulary, monkeypatch):
    """`the.{0,100}end` failed from the seventh answer on."""
    monkeypatch.setitem(llguidance_backend.LIMITS, "max_lexer_states", 1000)
    goes_on = [b"e" in piece and b"d" not in piece and len(piece) < 5 for piece in vocabulary.tokens]
    spec = GrammarSpec("regex", "the.{0,100}end")
    first = store.prepare(spec).result()
    errors = [walk(begin(store, spec), seed, 40, lambda token: goes_on[token]) for seed in range(12)]
    assert errors == [""] * 12
    assert first.spoiled, "no answer met the limit: the test tests nothing"


def test_an_answer_that_fails_ruins_nothing(store):
    """A pattern that fails at its opening quote: the next seven requests got an error."""
    words = {"type": "string", "pattern": r"^$|(^(?:\S+\s+){0,99}\S+$)", "maxLength": 5000}
    spec = GrammarSpec("json_schema", json.dumps({"type": "object", "properties": {"q": words}}))
    grammar = llguidance_backend.compile_unchecked
    monkey = LLGuidanceBackend()
    monkey.compile = lambda spec, vocabulary: grammar(spec, monkey.tokenizer(vocabulary))[0]
    store._backend = monkey
    encode = store._known_vocabulary().encode
    failed = begin(store, spec)
    for token in encode('{"q": "'):
        failed.advance([token], most=0)
    assert "too complex" in failed.error
    for _ in range(7):
        answer = begin(store, spec)
        answer.advance(encode("{}"), most=0)
        assert not answer.error and answer.done


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 8))])
def test_random_patterns_answer_alike_whoever_was_before(store, vocabulary, seed, monkeypatch):
    monkeypatch.setitem(llguidance_backend.LIMITS, "max_lexer_states", 1500)
    rng = random.Random(seed)
    parts = [
        rng.choice(["[a-f]", ".", r"\w", "(ab|b.c)"]) + f"{{{rng.randint(0, 3)},{rng.randint(4, 60)}}}"
        for _ in range(3)
    ]
    spec = GrammarSpec("regex", "".join(parts) + "x")
    in_order = [walk(begin(store, spec), n, 30) for n in range(6)]
    alone = []
    for n in range(6):
        store._compiled.pop(spec)
        alone.append(walk(begin(store, spec), n, 30))
    assert [bool(error) for error in in_order] == [bool(error) for error in alone]


def test_masks_that_take_too_long_end_their_answer_only(store, monkeypatch):
    monkeypatch.setattr(answer_grammar, "MASK_BUDGET_S", 0.2)
    spec = GrammarSpec("lark", 'start: e\ne: e e | e e e | "a"')
    store.prepare(spec).result()
    tokens = store._known_vocabulary().encode("aaaaaaaa")
    slots = SlotGrammars(store, vocab_size=len(store._known_vocabulary().tokens), max_len=4000)
    try:
        params = SamplingParams(grammar=spec, max_tokens=4000)
        slots.apply([], [Admit(slot, f"r/{slot}", [1], 1, params, seed=0, branch=0, stop_ids=[]) for slot in (0, 1)])
        slots.begin_masks([(0, []), (1, [])])
        assert slots.masks().any()
        position, error, late = 1, "", False
        while not error:
            accepting = slots.accept(0, position, tokens[:1])
            slots.settle([accepting])
            late = late or not accepting.done()
            position, error = position + 1, accepting.result().error
        assert "computing" in error and late, "it was waited for to the end"
        assert not slots.accept(1, 1, tokens[:1]).result().error
    finally:
        slots.close()
