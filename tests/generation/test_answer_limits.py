"""Limits count for each answer: what one does to a grammar is not felt by the next, and none takes for ever."""

import hashlib
import json
import random
import threading
import time
from concurrent.futures import Future

import numpy as np
import pytest

from quire.generation.grammar import answer_grammar, grammar_store, llguidance_backend, slot_grammars
from quire.generation.grammar.answer_grammar import AnswerGrammar
from quire.generation.grammar.grammar_store import GrammarStore
from quire.generation.grammar.llguidance_backend import LLGuidanceBackend
from quire.generation.grammar.slot_grammars import Accepting, SlotGrammars
from quire.text import load_tokenizer, vocabulary_of
from quire.types.errors import OverloadedError
from quire.types.grammar import GrammarSpec, ThoughtSpec
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

    return AnswerGrammar(compiled.parts[0][0].grammar.fork(), own, compiled.first_masks[0])


def accept(slots, sampled):
    """Of (slot, position, tokens)."""
    found = [Accepting(slots.of(slot), position, tokens) for slot, position, tokens in sampled]
    slots.accept(found)
    slots.settle(found)
    return found


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
    store.backend = monkey
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
        assert np.stack(slots.masks()).any()
        position, error, late = 1, "", False
        while not error:
            (accepting,) = accept(slots, [(0, position, tokens[:1])])
            late = late or not accepting.known
            position, error = position + 1, accepting.told().error
        assert "computing" in error and late, "it was waited for to the end"
        (accepting,) = accept(slots, [(1, 1, tokens[:1])])
        assert not accepting.told().error
    finally:
        slots.close()


def test_answers_moved_together_and_apart_are_the_same(store, monkeypatch):
    """With a thought first, forced text and an end; some are forks of a second copy."""
    vocabulary = store._known_vocabulary()
    schema = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}, "n": {"type": "integer"}}}
    specs = [
        GrammarSpec("json_schema", json.dumps(schema | {"required": ["name", "n"]})),
        GrammarSpec("json_schema", json.dumps(schema), thought=ThoughtSpec("<think>", ("</think>",), budget=3)),
        GrammarSpec("choice", json.dumps(["yes", "yellow", "no"])),
    ]
    monkeypatch.setattr(grammar_store, "FORKS", 3)
    monkeypatch.setattr(grammar_store, "QUICK_COMPILE_S", 9.0)
    monkeypatch.setattr(slot_grammars, "PATIENCE_S", 9.0)
    store.backend.threads = 2
    for spec in specs:
        store.prepare(spec).result()
    found = {}
    for apart in (False, True):
        slots = SlotGrammars(store, vocab_size=len(vocabulary.tokens), max_len=200)
        try:
            begin = [
                Admit(slot, f"r/{slot}", [1], 1, SamplingParams(grammar=specs[slot % 3], max_tokens=60), 0, 0, [])
                for slot in range(24)
            ]
            slots.apply([], begin[:12])
            store._thread.submit(lambda: None).result()  # copies were made
            slots.apply([], begin[12:])
            rng, position, going_on = random.Random(5), dict.fromkeys(range(24), 1), set(range(24))
            answers = {slot: [] for slot in range(24)}
            while going_on:
                order = sorted(going_on)
                slots.begin_masks([(slot, []) for slot in order])
                masks = np.unpackbits(np.stack(slots.masks()), axis=1, bitorder="little")
                drawn = [rng.choice(np.flatnonzero(mask).tolist()) for mask in masks]
                if apart:
                    for slot in order:
                        slots._by_slot[slot].alone = 9
                took = accept(
                    slots, [(slot, position[slot], [token]) for slot, token in zip(order, drawn, strict=True)]
                )
                for slot, one in zip(order, took, strict=True):
                    accepted = one.told()
                    answers[slot].append((accepted.tokens, list(accepted.forced), accepted.done, accepted.error))
                    position[slot] += len(accepted.tokens)
                    if accepted.done or accepted.error or position[slot] >= 60:
                        going_on.discard(slot)
                tasks = {one.place[0] for one in took}
                assert len(tasks) == len(order) if apart else len(tasks) <= len(specs)
            found[apart] = answers
        finally:
            slots.close()
    assert found[False] == found[True]
    assert sum(len(accepted[0]) > 1 for answer in found[True].values() for accepted in answer), "nothing was forced"
    assert [len(store.compiled(spec).parts[0]) for spec in specs] == [2, 2, 2]


def test_one_slow_answer_among_many_is_found_and_goes_alone(store, monkeypatch):
    """Those moved with it go alone for some tokens; then they are moved together again, and it is not."""
    spec = GrammarSpec("choice", json.dumps(["a" * n for n in range(200, 210)]))
    store.prepare(spec).result()
    slots = SlotGrammars(store, vocab_size=len(store._known_vocabulary().tokens), max_len=4000)
    try:
        params = SamplingParams(grammar=spec, max_tokens=4000, logprobs=0)
        slots.apply([], [Admit(slot, f"r/{slot}", [1], 1, params, seed=0, branch=0, stop_ids=[]) for slot in range(4)])
        token, slow = store._known_vocabulary().encode("a")[:1], slots._by_slot[2].grammar
        fill = type(slow._grammar).fill

        def taking_long(grammar, row):
            if grammar is slow._grammar:
                spins = time.thread_time() + 2 * answer_grammar.SLOW_S
                while time.thread_time() < spins:
                    hashlib.blake2b(bytes(1 << 20)).digest()  # which keeps no other thread from running
            fill(grammar, row)

        def all_taking_long(grammars, size, own=store.backend.fill_each):
            if slow._grammar in grammars:
                taking_long(slow._grammar, np.empty(size, np.uint8))
            return own(grammars, size)

        monkeypatch.setattr(type(slow._grammar), "fill", taking_long)
        monkeypatch.setattr(store.backend, "fill_each", all_taking_long)
        tasks = []
        for position in range(1, 13):
            took = accept(slots, [(slot, position, token) for slot in range(4)])
            assert not any(one.told().error for one in took)
            tasks.append(len({one.place[0] for one in took}))
        assert tasks[0] == 1 and set(tasks[1:5]) == {4} and 2 in tasks[5:], tasks
        assert slots.of(2).alone > 1000 > slots.of(1).alone
    finally:
        slots.close()


@pytest.fixture
def ten(store):
    """Ten answers under one grammar."""
    spec = GrammarSpec("choice", json.dumps(["a" * n for n in range(200, 210)]))
    store.prepare(spec).result()
    slots = SlotGrammars(store, vocab_size=len(store._known_vocabulary().tokens), max_len=4000)
    params = SamplingParams(grammar=spec, max_tokens=4000, logprobs=0)
    slots.apply([], [Admit(slot, f"r/{slot}", [1], 1, params, seed=0, branch=0, stop_ids=[]) for slot in range(10)])
    yield slots
    slots.close()
    assert not any(copy.answers for copy in store.compiled(spec).parts[0])


def test_a_grammar_that_fails_among_others_fails_or_goes_on_by_itself(ten, store, monkeypatch):
    """Compiling it anew may take long, or be refused; nobody waits for it and nobody else ends."""
    token = store._known_vocabulary().encode("a")[:1]
    go_on, fresh = threading.Event(), store.fresh

    def compiled_anew(spec, branch):
        go_on.wait(30)
        if refused:
            raise OverloadedError("too many")
        return fresh(spec, branch)

    monkeypatch.setattr(store, "fresh", compiled_anew)
    for position, refused in ((1, False), (2, True)):
        ten.of(3).grammar._grammar.accept([0])
        assert ten.of(3).grammar._grammar.error
        go_on.clear()
        took = accept(ten, [(slot, position, token) for slot in range(10)])
        assert [one.known for one in took] == [slot != 3 for slot in range(10)]
        go_on.set()
        assert [one.told().error for one in took if one is not took[3]] == [""] * 9
        assert took[3].told().error == ("OverloadedError: too many" if refused else "")
        assert took[3].told().tokens == token
    allowed = [np.unpackbits(ten.of(slot).grammar.mask, bitorder="little").tolist() for slot in (2, 4)]
    assert allowed[0] == allowed[1]


def test_who_looks_ahead_keeps_nobody_waiting(ten, store):
    token = store._known_vocabulary().encode("a")[:1]
    ten.of(5).looking = Future()
    with ten.of(5).lock:
        took = accept(ten, [(slot, 1, token) for slot in range(10)])
        assert [one.known for one in took] == [slot != 5 for slot in range(10)]
    assert not took[5].told().error


def test_many_answers_under_one_grammar_share_the_time_it_takes(ten, store, monkeypatch):
    """Each of ten that take 10 ms ends after as many tokens as if it were alone."""
    monkeypatch.setattr(answer_grammar, "MASK_BUDGET_S", 0.05)
    fill = store.backend.fill_each

    def slow(grammars, size):
        time.sleep(0.01 * len(grammars))
        return fill(grammars, size)

    monkeypatch.setattr(store.backend, "fill_each", slow)
    monkeypatch.setattr(slot_grammars, "PATIENCE_S", 60.0)
    store.backend.threads = 1
    token, ends = store._known_vocabulary().encode("a")[:1], []
    for position in range(1, 15):
        ends = [one.told().error for one in accept(ten, [(slot, position, token) for slot in range(10)])]
        if any(ends):
            break
    assert all("computing" in error for error in ends) and 8 <= position <= 11


def test_copies_are_compiled_for_many_answers_and_go_when_others_need_theirs(store, monkeypatch):
    monkeypatch.setattr(grammar_store, "MAX_COPIED", 1)
    monkeypatch.setattr(grammar_store, "QUICK_COMPILE_S", 9.0)
    store.backend.threads = 4
    specs = [GrammarSpec("choice", json.dumps(words)) for words in (["yes", "no"], ["in", "out"])]
    slots = SlotGrammars(store, vocab_size=len(store._known_vocabulary().tokens), max_len=99)

    def copies():
        store._thread.submit(lambda: None).result()
        return [len(store.compiled(spec).parts[0]) for spec in specs]

    def begin(spec, first):
        params = SamplingParams(grammar=spec, max_tokens=9)
        slots.apply([], [Admit(first + at, f"r/{at}", [1], 1, params, 0, 0, []) for at in range(20)])
        for _ in range(4):  # each copy asks for the next
            store._thread.submit(lambda: None).result()

    try:
        for spec in specs:
            store.prepare(spec).result()
        begin(specs[0], 0)
        assert copies() == [3, 1], "eight answers each"
        begin(specs[1], 20)
        assert copies() == [3, 3], "all are in use"
        slots.apply(list(range(20)), [])
        store._keep_few(store.compiled(specs[1]).parts[0])
        assert copies() == [1, 3]
    finally:
        slots.close()
