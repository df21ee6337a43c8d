"""Constraints: what the grammar lets through is what Python says is in the set."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.generation.grammar.llguidance_backend import LLGuidanceBackend
from quire.lang import Contains, EndsWith, Int, Length, OneOf, Regex, StartsWith, StopsAt, Words, gen
from quire.types.errors import InputError
from quire.types.grammar import Vocabulary

BYTES = Vocabulary(
    tokens=[bytes([i]) for i in range(256)] + [b""],
    special=frozenset([256]),
    ends=[256],
    encode=lambda text: list(text.encode()),
)
guidance = LLGuidanceBackend()


def admits(where, text):
    """Whether the grammar lets a model say exactly this text and then end."""
    import numpy as np

    grammar = guidance.compile(where.grammar(), BYTES)
    row = np.empty(-(-257 // 8), np.uint8)
    for token in [*text.encode(), 256]:
        if grammar.done:
            return token == 256
        grammar.fill(row)
        if not row[token // 8] >> (token % 8) & 1:
            return False
        grammar.accept([token])
    return True


SETS = {
    "regex": Regex(r"[a-c]+/\d{2}"),
    "one of": OneOf("a", "a b", "[x]*", "a/b", "two\nlines", "~&#-"),
    "int": Int(-12, 345),
    "length": Length(2, 4),
    "words": Words(2, 3),
    "starts": StartsWith("a."),
    "ends": EndsWith("b?"),
    "stops": StopsAt("ab"),
    "both": StartsWith("a") & Length(max=4) & ~Contains("bb"),
    "either": OneOf("a", "b") | Int(7, 9),
}
TEXTS = [
    "", "a", "b", "a b", "ab", "abb", "aab", "abab", "a.", "a.x", "ab?", "b?", "[x]*", "a/b", "two\nlines", "~&#-",
    "7", "10", "-12", "-13", "345", "346", "007", "-0", "0", "abc/12", "a/1", "one two", "one two three", "one  two",
    "abcde", "cab", "é", "日本語",
]  # fmt: skip


@pytest.mark.parametrize("name", SETS)
def test_grammar_and_python_agree(name):
    where = SETS[name]
    assert [t for t in TEXTS if t and admits(where, t)] == [t for t in TEXTS if t and where.holds(t)]
    assert any(where.holds(t) for t in TEXTS) and not all(where.holds(t) for t in TEXTS)


@settings(max_examples=200, deadline=None)
@given(st.integers(-3000, 3000), st.integers(-3000, 3000), st.integers(-4000, 4000))
def test_bounds_of_whole_numbers(a, b, x):
    low, high = sorted((a, b))
    assert Int(low, high).holds(str(x)) == (low <= x <= high)
    assert Int(low).holds(str(x)) == (low <= x)
    assert Int(high=high).holds(str(x)) == (x <= high)


@settings(max_examples=50, deadline=None)
@given(st.text(min_size=1, max_size=6))
def test_texts_are_taken_literally(text):
    assert StartsWith(text).holds(text + "x") and Contains(text).holds("x" + text)
    assert OneOf(text).holds(text)


def test_values():
    assert Int(0, 9).value("7") == 7
    assert (Int(0, 9) & Length(max=1)).value("7") == 7
    assert (OneOf("x") | Int(0, 9)).value("7") == 7
    assert Regex("7").value("7") == "7"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Regex("("), "no regular expression"),
        (lambda: OneOf(), "at least one"),
        (lambda: Int(3, 2), "lower"),
        (lambda: Int(0, 10**20), "digits"),
        (lambda: Length(3, 2), "min <= max"),
        (lambda: gen("x", where="a", schema=int), "not both"),
        (lambda: gen("x", schema=re.compile), "no JSON schema"),
    ],
)
def test_what_makes_no_sense_is_refused(make, says):
    with pytest.raises(InputError, match=re.escape(says)):
        make()
