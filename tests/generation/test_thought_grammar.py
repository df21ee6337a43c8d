"""A thought before a constrained answer: free, bounded, and never in the way of the grammar behind it."""

from __future__ import annotations

import json
import random

import jsonschema
import numpy as np
import pytest

from quire.generation.grammar.llguidance_backend import LLGuidanceBackend
from quire.generation.grammar.thought_grammar import compile_answer
from quire.types.grammar import GrammarSpec, ThoughtSpec, Vocabulary

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
ANSWER = GrammarSpec("json_schema", json.dumps(SCHEMA))
EXTRA = [b"</think>", b"<think>", b"</th", b"ink>", b'>{"', b">\n\n", b"> ", b'</think>{"a"', b"<eos>", b"nk>x"]
EOS = 256 + EXTRA.index(b"<eos>")


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    """Bytes, and tokens that hold marks, parts of marks, and more than marks."""
    return Vocabulary(
        [*(bytes([i]) for i in range(256)), *EXTRA], frozenset({EOS}), [EOS], lambda text: list(text.encode())
    )


@pytest.fixture(scope="module")
def backend() -> LLGuidanceBackend:
    return LLGuidanceBackend()


def thought(**fields) -> ThoughtSpec:
    return ThoughtSpec("<think>", ("</think>",), **fields)


def under(spec: GrammarSpec, thought: ThoughtSpec | None, backend, vocabulary):
    return compile_answer(backend, GrammarSpec(spec.kind, spec.source, thought=thought), vocabulary)


def allowed(grammar, vocabulary) -> set[int]:
    row = np.empty(-(-len(vocabulary.tokens) // 8), np.uint8)
    grammar.fill(row)
    return {i for i in range(len(vocabulary.tokens)) if row[i // 8] >> i % 8 & 1}


def walk(grammar, vocabulary, rng, steps=400) -> bytes:
    """Random tokens along the masks, with forks and drafts that are taken back; the bytes of the answer."""
    written = b""
    for _ in range(steps):
        if grammar.done:
            break
        if forced := grammar.forced():
            grammar.accept(forced)
            written += b"".join(vocabulary.tokens[i] for i in forced)
            continue
        if rng.random() < 0.2:
            before, taken = allowed(grammar, vocabulary), 0
            while taken < 3 and not grammar.done:
                grammar.accept([rng.choice(sorted(allowed(grammar, vocabulary)))])
                taken += 1
            grammar.rollback(taken)
            assert allowed(grammar, vocabulary) == before
        if rng.random() < 0.1:
            grammar = grammar.fork()
        marks = [i for i in allowed(grammar, vocabulary) if i >= 256]
        token = rng.choice(marks if marks and rng.random() < 0.4 else sorted(allowed(grammar, vocabulary)))
        grammar.accept([token])
        written += vocabulary.tokens[token]
    assert grammar.done, written
    return written


@pytest.mark.parametrize("inside", [True, False])
def test_thoughts_are_free_and_answers_are_not(backend, vocabulary, inside) -> None:
    rng = random.Random(int(inside))
    thoughts = 0
    for _ in range(60):
        written = walk(under(ANSWER, thought(inside=inside, budget=30), backend, vocabulary), vocabulary, rng)
        if inside or written.startswith(b"<think>"):
            _, closed, answer = written.removeprefix(b"" if inside else b"<think>").partition(b"</think>")
            thoughts += 1
            assert closed
        else:
            answer = written
        jsonschema.validate(json.loads(answer), SCHEMA)
    assert thoughts == 60 if inside else 0 < thoughts < 60


def test_every_token_but_the_end_may_be_thought(backend, vocabulary) -> None:
    grammar = under(ANSWER, thought(inside=True), backend, vocabulary)
    everything = set(range(len(vocabulary.tokens)))
    assert allowed(grammar, vocabulary) == everything - {EOS, 256 + EXTRA.index(b'</think>{"a"')}
    grammar.accept(list(b"so </think"))  # a token that would go on with an answer cannot be checked
    gone = everything - allowed(grammar, vocabulary)
    assert {bytes(vocabulary.tokens[i]) for i in gone} == {b"<eos>", b'>{"', b'</think>{"a"'}
    grammar.accept([256 + EXTRA.index(b">\n\n")])
    assert {bytes(vocabulary.tokens[i]) for i in allowed(grammar, vocabulary)} >= {b"{", b" ", b"\n"}
    grammar.accept(list(b'\n{"a": 1, "b": "x"}'))
    assert grammar.done


def test_at_its_budget_a_thought_is_ended(backend, vocabulary) -> None:
    for spec in (ANSWER, GrammarSpec("free")):
        grammar = under(spec, thought(inside=True, budget=3), backend, vocabulary)
        grammar.accept(list(b"ab"))
        assert grammar.forced() == []
        grammar.accept(list(b"c"))
        assert allowed(grammar, vocabulary) == {ord("<")} and bytes(grammar.forced()) == b"</think>"
        grammar.accept(list(b"</th"))
        grammar.rollback(1)
        assert bytes(grammar.forced()) == b"hink>"
        grammar.accept(list(b"hink>"))
        assert (EOS in allowed(grammar, vocabulary)) == (spec.kind == "free")
    grammar.accept(list(b"anything</think>at all"))
    assert not grammar.done and grammar.forced() == [] and len(allowed(grammar, vocabulary)) == len(vocabulary.tokens)


def test_a_free_answer_may_do_without_a_thought(backend, vocabulary) -> None:
    grammar = under(GrammarSpec("free"), thought(budget=2), backend, vocabulary)
    grammar.accept(list(b"\n<thin is no mark <think> here"))
    assert grammar.forced() == [] and not grammar.done
    begun = under(GrammarSpec("free"), thought(budget=2), backend, vocabulary)
    begun.accept([10, 256 + EXTRA.index(b"<think>"), 97])
    assert bytes(begun.forced()) == b"</think>"


def test_a_lead_stands_before_any_kind_of_answer(backend, vocabulary) -> None:
    for kind, source, text in (
        ("json_schema", json.dumps(SCHEMA), '{"a": 1, "b": "x"}'),
        ("json_object", "", "{}"),
        ("regex", "a+b", "aab"),
        ("choice", '["yes"]', "yes"),
        ("lark", 'start: "q" w\nw: /[0-9]/', "q7"),
        ("gbnf", 'root ::= "no"', "no"),
    ):
        spec = GrammarSpec(kind, source, '"LEAD:"', thought(inside=True))
        grammar = compile_answer(backend, spec, vocabulary)
        grammar.accept(list(b"hm</think>LEAD:" + text.encode()))
        assert not grammar.error and (grammar.done or EOS in allowed(grammar, vocabulary)), kind
        wrong = compile_answer(backend, spec, vocabulary)
        wrong.accept(list(b"hm</think>"))
        assert {bytes([i]) for i in allowed(wrong, vocabulary) if i < 128} <= {b"L", b" ", b"\n", b"\t", b"\r"}
