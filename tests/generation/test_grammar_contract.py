"""What every GrammarBackend must do, asked of all of them."""

import json
import random

import numpy as np
import pytest

from quire.generation.grammar.grammar_store import MAX_COMPILED_GRAMMARS, GrammarStore
from quire.generation.grammar.llguidance_backend import LLGuidanceBackend
from quire.generation.grammar.slot_grammars import Accepting, SlotGrammars
from quire.types.errors import InputError
from quire.types.fakes import FakeGrammars
from quire.types.grammar import GrammarSpec, Vocabulary
from quire.types.plan import Admit
from quire.types.sampling_params import SamplingParams

WORDS = [b"ye", b"yes", b"no", b"non", b"e", "é".encode(), b"aybe", b"\xff"]
TOKENS = [bytes([b]) for b in range(256)] + WORDS + [b"<end>", b""]
END = len(TOKENS) - 2


def encode(text):
    """Longest token first."""
    data, ids = text.encode(), []
    while data:
        piece = max((w for w in TOKENS[:-2] if data.startswith(w)), key=len)
        ids.append(TOKENS.index(piece))
        data = data[len(piece) :]
    return ids


VOCABULARY = Vocabulary(tokens=TOKENS, special=frozenset({END}), ends=[END], encode=encode)
CHOICES = ["yes", "yellow", "no", "none", "maybe", "né", "né\n"]


@pytest.fixture(params=[FakeGrammars, LLGuidanceBackend])
def backend(request):
    return request.param()


def compiled(backend, choices=CHOICES):
    return backend.compile(GrammarSpec("choice", json.dumps(choices)), VOCABULARY)


def allowed(grammar):
    row = np.empty(-(-len(TOKENS) // 8), np.uint8)
    grammar.fill(row)
    return np.flatnonzero(np.unpackbits(row, bitorder="little")[: len(TOKENS)]).tolist()


def text(tokens):
    return b"".join(TOKENS[t] for t in tokens if t != END)


def walk(grammar, rng):
    taken = []
    while not grammar.done:
        options = allowed(grammar)
        assert options, f"nothing may follow {taken}"
        taken.append(rng.choice(options))
        grammar.accept(taken[-1:])
        assert not grammar.error
    return taken


def test_every_walk_ends_in_a_choice_and_every_choice_is_reached(backend):
    rng, start = random.Random(1), compiled(backend)
    assert {text(walk(start.fork(), rng)) for _ in range(400)} == {choice.encode() for choice in CHOICES}


def test_the_end_is_allowed_only_after_a_whole_answer(backend):
    grammar = compiled(backend)
    for token in encode("no"):
        assert END not in allowed(grammar)
        grammar.accept([token])
    assert END in allowed(grammar) and not grammar.done, "none may still come"
    grammar.accept([END])
    assert grammar.done and not grammar.error


def test_forced_tokens_are_the_only_way_on(backend):
    rng = random.Random(2)
    for _ in range(50):
        grammar = compiled(backend)
        while not grammar.done:
            before = grammar.fork()
            forced = grammar.forced()
            for token in forced:
                assert token in allowed(grammar)
                grammar.accept([token])
            said = text(forced)
            others = [walk(before.fork(), random.Random(seed)) for seed in range(20)]
            assert all(text(other).startswith(said) for other in others)
            if not grammar.done:
                grammar.accept([rng.choice(allowed(grammar))])


def test_rollback_returns_to_where_it_was(backend):
    rng, grammar = random.Random(3), compiled(backend)
    for _ in range(50):
        before = allowed(grammar)
        fork = grammar.fork()
        steps = walk(fork, rng)
        fork.rollback(len(steps))
        assert allowed(fork) == before and not fork.done


def test_forks_do_not_feel_each_other(backend):
    grammar = compiled(backend)
    grammar.accept(encode("ye"))
    before, fork = allowed(grammar), grammar.fork()
    fork.accept(encode("s"))
    assert allowed(grammar) == before and fork.done and not grammar.done


def test_each_at_once_is_one_after_another(backend):
    """Wrong tokens among them."""
    rng, size = random.Random(4), -(-len(TOKENS) // 8)
    together = [compiled(backend) for _ in range(9)]
    apart = [compiled(backend) for _ in range(9)]
    for _ in range(4):
        going_on = [at for at in range(9) if not apart[at].done and not apart[at].error]
        tokens = [rng.choice(allowed(apart[at])) if rng.random() < 0.9 else encode("x")[0] for at in going_on]
        backend.accept_each([together[at] for at in going_on], tokens)
        for at, token in zip(going_on, tokens, strict=True):
            apart[at].accept([token])
            assert (together[at].done, bool(together[at].error)) == (apart[at].done, bool(apart[at].error))
        going_on = [at for at in going_on if not apart[at].done and not apart[at].error]
        rows = backend.fill_each([together[at] for at in going_on], size)
        found = [np.flatnonzero(np.unpackbits(row, bitorder="little")[: len(TOKENS)]).tolist() for row in rows]
        assert found == [allowed(apart[at]) for at in going_on]


def test_a_token_that_may_not_come_is_an_error(backend):
    grammar = compiled(backend)
    grammar.accept(encode("x"))
    assert grammar.error


def test_what_makes_no_sense_is_refused(backend):
    with pytest.raises(InputError):
        compiled(backend, [])


def each(number):
    return GrammarSpec("each", json.dumps([f"yes{number}", f"no{number}"]))


def admit(spec, branch=0, tokens=()):
    params = SamplingParams(grammar=spec, max_tokens=9)
    return Admit(branch, f"r/{branch}", [1, *tokens], 1, params, seed=0, branch=branch, stop_ids=[])


def test_the_most_recent_are_kept_and_those_that_are_referenced(backend):
    store = GrammarStore(backend, lambda: VOCABULARY)
    try:
        held = store.prepare(each(0))
        for number in range(1, MAX_COMPILED_GRAMMARS + 20):
            store.prepare(each(number)).result()
            assert len(store._compiled) <= MAX_COMPILED_GRAMMARS + 2, "the thread may not have let go of the last"
        assert store.prepare(each(0)) is held
    finally:
        store.close()


class Once:
    """A backend that compiles what it is told to, and nothing again."""

    def __init__(self, backend):
        self.backend, self.seen = backend, set()

    def __getattr__(self, name):
        return getattr(self.backend, name)

    def compile(self, spec, vocabulary):
        if spec in self.seen:
            raise RuntimeError("compiled again")
        self.seen.add(spec)
        return self.backend.compile(spec, vocabulary)


def accept(slots, slot, position, tokens):
    one = Accepting(slots.of(slot), position, tokens)
    slots.accept([one])
    return one.told()


def test_what_was_prepared_is_never_compiled_in_a_step(backend):
    """However many others are asked for before it is admitted, and after it was preempted."""
    store = GrammarStore(Once(backend), lambda: VOCABULARY)
    slots = SlotGrammars(store, vocab_size=len(TOKENS), max_len=9)
    try:
        held = [store.prepare(each(0)), store.prepare(GrammarSpec("choice", '["yes"]'))]
        for number in range(1, 2 * MAX_COMPILED_GRAMMARS):
            store.prepare(each(number))
        assert all(ready.result() for ready in held)
        for _ in range(2):
            slots.apply([0, 1], [admit(each(0)), admit(each(0), 1, encode("n"))])
            assert accept(slots, 0, 1, encode("ye")).tokens == [*encode("ye"), *encode("s0")]
            assert accept(slots, 1, 2, encode("o")).tokens == [*encode("o"), *encode("0")]
            slots.apply([0], [admit(GrammarSpec("choice", '["yes"]'))])
            assert accept(slots, 0, 1, encode("yes")).done
    finally:
        slots.close()
        store.close()


def test_an_answer_without_a_compiled_grammar_ends_alone(backend):
    store = GrammarStore(backend, lambda: VOCABULARY)
    slots = SlotGrammars(store, vocab_size=len(TOKENS), max_len=9)
    try:
        wrong, good = GrammarSpec("choice", "[]"), store.prepare(each(0))
        failed = store.prepare(wrong)
        assert failed.exception() and good.result()
        for lost, reason in ((each(5), "not prepared"), (wrong, "InputError")):
            slots.apply([0, 1], [admit(lost), admit(each(0), 1)])
            slots.begin_masks([(0, [3, 4]), (1, [])])
            masks = np.stack(slots.masks())
            assert masks[0].any() and np.unpackbits(masks[3], bitorder="little")[encode("no")[0]]
            assert reason in accept(slots, 0, 1, [3]).error
            assert not accept(slots, 1, 1, encode("n")).error
    finally:
        slots.close()
        store.close()


def test_slots_that_close_leave_the_store_to_the_next(backend):
    """As when an engine sleeps and wakes."""
    store = GrammarStore(backend, lambda: VOCABULARY)
    try:
        SlotGrammars(store, vocab_size=len(VOCABULARY.tokens), max_len=9).close()
        assert store.prepare(GrammarSpec("choice", json.dumps(["later"]))).result()
    finally:
        store.close()
