"""Stop strings against a twin made of str.find: same text, same stop, nothing of a stop let out."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.text import StopMatcher


def twin(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The stop that ends first wins; the longest of those that end at the same place."""
    ends = [(text.find(s) + len(s), -len(s), s) for s in stops if s in text]
    if not ends:
        return text, None
    end, _, stop = min(ends)
    return text[: end if include else end - len(stop)], stop


def run(text: str, stops: list[str], include: bool, cuts: list[int]) -> tuple[list[str], str | None]:
    matcher = StopMatcher(stops, include)
    out, at = [], 0
    for cut in [*sorted(cuts), len(text)]:
        piece, stop = matcher.push(text[at:cut])
        at = cut
        out.append(piece)
        if stop is not None:
            assert matcher.push("more") == ("", stop)
            assert matcher.flush() == ""
            return out, stop
    return [*out, matcher.flush()], None


def test_what_is_complete_too_early_is_passed_over() -> None:
    matcher = StopMatcher(["end", "stop"])
    assert [matcher.push(piece, early=True) for piece in ("an end", " and st")] == [("an ", None), ("end and ", None)]
    assert matcher.push("op, end") == ("", "stop")  # begun early, complete in time
    matcher = StopMatcher(["end"], include_stop=True)
    assert matcher.push("end", early=True) == ("", None) and matcher.flush() == "end"


short = st.text("ab\n", max_size=4)


@settings(max_examples=500, deadline=None)
@given(st.text("ab\nc", max_size=40), st.lists(short.filter(bool), min_size=1, max_size=5), st.booleans(), st.data())
def test_equals_the_twin_however_it_is_cut(text: str, stops: list[str], include: bool, data: st.DataObject) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    expected, stop = twin(text, stops, include)
    pieces, found = run(text, stops, include, cuts)
    assert ("".join(pieces), found) == (expected, stop)


@settings(max_examples=300, deadline=None)
@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4))
def test_holds_back_exactly_what_could_become_a_stop(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops, False)
    out = ""
    for at, character in enumerate(text):
        piece, stop = matcher.push(character)
        out += piece
        if stop is not None:
            return
        seen = text[: at + 1]
        starts = [k for s in stops for k in range(1, len(s)) if seen.endswith(s[:k])]
        assert out == seen[: len(seen) - max(starts, default=0)]


def test_no_stops_let_everything_through() -> None:
    matcher = StopMatcher([], False)
    assert matcher.push("anything") == ("anything", None)
    assert matcher.flush() == ""


def test_characters_that_mean_something_to_patterns() -> None:
    for stop in ("]", "^", "-", "\\", "[a-z]", ".*", "\n\n", "🙂"):
        assert StopMatcher([stop], False).push(f"x{stop}y") == ("x", stop)
        assert StopMatcher([stop], True).push(f"x{stop}y") == (f"x{stop}", stop)
        assert StopMatcher([stop], False).push("xyz") == ("xyz", None)


def test_the_first_to_be_complete_wins() -> None:
    assert StopMatcher(["abcd", "bc"], False).push("xabcd") == ("xa", "bc")
    assert StopMatcher(["bc", "abc"], False).push("xabc") == ("x", "abc")


@pytest.mark.timeout(20)
def test_hostile_stops_take_linear_time() -> None:
    """64 stops of 1024 characters that all begin alike, over text that nearly matches all the time."""
    stops = ["a" * 960 + "b" * (i + 1) for i in range(64)]
    matcher = StopMatcher(stops, False)
    rng = random.Random(2)
    text = "".join("a" * 959 + rng.choice("ac") for _ in range(200))
    out = "".join(matcher.push(text[i : i + 4])[0] for i in range(0, len(text), 4)) + matcher.flush()
    assert out == text
