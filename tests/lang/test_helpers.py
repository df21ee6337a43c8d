"""Helpers built on the language: they find what is there to be found, and say what it cost."""

import re

import pytest

from quire.lang import (
    Example,
    Int,
    Task,
    bootstrap,
    chain_of_thought,
    gen,
    map_reduce,
    react,
    select,
    self_consistency,
    system,
    tree_of_thoughts,
)
from quire.lang.documents import split
from quire.types.errors import InputError

# Both ways of asking are held to the same answers in test_prompts.py.
over_http = pytest.mark.parametrize(
    "either", [pytest.param("in process", marks=pytest.mark.slow), "over HTTP"], indirect=True
)


def test_chain_of_thought(model):
    found = chain_of_thought(model, "What is 2 + 2?", where=Int(0, 99), max_tokens=40)
    assert isinstance(found.answer, int) and found.reasoning
    assert found.prompt.messages[-1]["content"] == f"{found.reasoning}\nThe answer is {found.answer}"
    assert chain_of_thought(model + system("Be brief."), "Why?", max_tokens=8).prompt.messages[0]["role"] == "system"


@over_http
def test_self_consistency_stops_once_decided(either):
    """All agree, so that five of nine decide; those that go on are cut short. Without a stop the same is said."""
    ask = {"n": 9, "max_tokens": 60, "temperature": 0.7, "seed": 2}
    vote = self_consistency(either, "Say hello.", extract=lambda text: "yes", **ask)
    assert vote.asked == 9 and 5 <= vote.ended < 9 and vote.votes == {"yes": vote.ended}
    whole = self_consistency(either, "Say hello.", extract=lambda text: None, **ask)
    assert whole.ended == 9 and whole.tokens_saved == 0 and whole.answer is None
    assert all(full.startswith(cut) for full, cut in zip(whole.texts, vote.texts, strict=True))
    assert vote.tokens_saved > 0 and whole.tokens > vote.tokens


@over_http
def test_tree_of_thoughts(either):
    judge = ("\nGood?", select("good", [" yes", " no"]))
    tree = tree_of_thoughts(
        either, "How do I get to the moon?", branches=6, depth=2, keep=2, judge=judge,
        step=gen("idea", max_tokens=8, seed=1, stop="\n"), answer=gen("end", max_tokens=4),
    )  # fmt: skip
    assert [len(level) for level in tree.levels] == [6, 6]
    for level in tree.levels:
        assert [t.score for t in level] == sorted((t.score for t in level), reverse=True)
    parents = {t.prompt.text for t in tree.levels[0][:2]}
    assert {t.prompt.text.split("Step 2:")[0] for t in tree.levels[1]} == parents
    assert tree.best.text.startswith(tree.levels[1][0].prompt.text) and tree.best.text.endswith(tree.answer)
    assert "Good?" not in tree.best.text
    with pytest.raises(InputError, match="keep"):
        tree_of_thoughts(either, "?", branches=2, keep=3)


def test_tools_get_arguments_that_fit(model):
    seen = []

    def weather(city: str, days: int = 1) -> str:
        """The weather in a city."""
        seen.append((city, days))
        raise RuntimeError("no satellite")

    acted = react(model, "What is the weather in Rome?", [weather], max_steps=2)
    assert seen and all(isinstance(city, str) and isinstance(days, int) for city, days in seen)
    assert acted.steps[0].tool == "weather" and acted.steps[0].result == "error: no satellite"
    assert "Result: error: no satellite" in acted.prompt.text
    assert acted.finished == (len(acted.steps) < 2) and acted.prompt["answer"] == acted.answer
    with pytest.raises(InputError, match="named parameters"):
        react(model, "?", [print])


def test_documents_are_read_in_parts(model):
    document = "\n\n".join(f"Fact {i}: the number {i} is {'odd' if i % 2 else 'even'}." for i in range(16))
    found = map_reduce(model, document, "Which numbers are odd?", chunk=300, max_tokens=16)
    assert len(found.rounds[0]) == len(split(document, 300)) > 1
    assert found.answer == found.prompt["note"]


@pytest.mark.parametrize("text", ["a b c d", "one. two! three? four", "x" * 50, "a\n\nb\n\n" * 9, "ä日" * 20 + "\ny"])
def test_parts_are_the_whole(text):
    for size in (1, 3, 8, 100):
        parts = split(text, size)
        assert "".join(parts) == text and all(0 < len(part) <= size for part in parts)
    assert not any(re.search(r"\S$", part) for part in split("one two three four", 6)[:-1])


def test_the_optimiser_helps_on_what_it_has_not_seen(model):
    words = ["red", "blue", "green", "black", "white", "yellow", "brown", "pink", "grey", "orange"]
    examples = [Example(word, f"{word} [{word}]") for word in words]
    found = bootstrap(
        model, Task("Repeat the word."), examples[:6], examples[6:], lambda e, a: float(a.strip() == e.answer),
        shots=3, trials=3,
    )  # fmt: skip
    assert found.before == 0 and found.after > 0.5
    assert len(found.trials) == 3 and len(found.task.examples) == 3
    with pytest.raises(InputError, match="held_out"):
        bootstrap(model, Task("x"), examples, examples[:2], lambda e, a: 1.0)
