"""Calls and thoughts in text: the same whatever the pieces the text comes in."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.text.reasoning_reader import ReasoningReader
from quire.text.segments import CallArguments, CallBegun, Said, Segment, Thought
from quire.text.tool_calls import FORCED
from quire.text.tool_formats import FORMATS, HERMES, LLAMA3, MISTRAL, choose_format
from quire.text.tool_reader import ToolReader, python_call
from quire.types.errors import ConfigError

NAMES = {"f", "g", "get_weather"}


def gathered(segments: list[Segment]) -> dict[str, Any]:
    said = "".join(s.text for s in segments if isinstance(s, Said))
    thought = "".join(s.text for s in segments if isinstance(s, Thought))
    calls: list[tuple[str, str]] = []
    for segment in segments:
        if isinstance(segment, CallBegun):
            assert segment.index == len(calls)
            calls.append((segment.name, ""))
        elif isinstance(segment, CallArguments):
            calls[segment.index] = (calls[segment.index][0], calls[segment.index][1] + segment.text)
    return {"said": said, "thought": thought, "calls": calls}


def read(reader: Any, pieces: list[str]) -> dict[str, Any]:
    segments: list[Segment] = []
    for piece in pieces:
        segments += reader.push(piece)
    return gathered(segments + reader.end())


CASES = [
    (
        HERMES,
        'Sure.\n<tool_call>\n{"name": "f", "arguments": {"a": "x}\\"{ ", "b": [1, {"c": 2}]} }\n</tool_call>\n'
        '<tool_call>{"arguments": {"z": 1}, "name": "g"}</tool_call> bye',
        "Sure.bye",
        [("f", {"a": 'x}"{ ', "b": [1, {"c": 2}]}), ("g", {"z": 1})],
    ),
    (HERMES, '<tool_call>{"name": "nope", "arguments": {}}</tool_call>', None, []),
    (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", {"a": 1})]),
    (HERMES, '<tool_call>{"name": "f"}</tool_call>', "", [("f", {})]),
    (HERMES, "a <tool_c b < <tool", None, []),
    (HERMES, '<tool_call>{"name": "f", "arguments": {}}</tool_', "", [("f", {})]),  # cut short behind the call
    (HERMES, "<tool_call>nothing</tool_call>", None, []),
    (
        LLAMA3,
        '{"name": "f", "parameters": {"q": 1}}; {"name": "g", "parameters": {}}',
        "",
        [("f", {"q": 1}), ("g", {})],
    ),
    (LLAMA3, '<|python_tag|>f.call(query="what, (x)", n=3)', "", [("f", {"query": "what, (x)", "n": 3})]),
    (LLAMA3, '<|python_tag|>{"name": "f", "parameters": {"q": "1"}}', "", [("f", {"q": "1"})]),
    (LLAMA3, "<|python_tag|>print(open('x'))", None, []),
    (LLAMA3, '{"x": 1} is JSON', None, []),
    (LLAMA3, "[1, 2] too", None, []),
    (LLAMA3, 'hello {"name": "f"}', None, []),
    (
        MISTRAL,
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
        "",
        [("f", {"a": 1}), ("g", {})],
    ),
    (MISTRAL, '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g{"b": {}}', "", [("f", {"a": 1}), ("g", {"b": {}})]),
    (MISTRAL, '[TOOL_CALLS]other[ARGS]{"a": 1}', None, []),
    (MISTRAL, "see [TOOL or [1]", None, []),
    (
        FORCED,
        '[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"a": 2}}]',
        "",
        [("f", {}), ("g", {"a": 2})],
    ),
    (FORCED, '{"name": "f", "arguments": {"a": null}}', "", [("f", {"a": None})]),
]


@pytest.mark.parametrize(("format", "text", "said", "calls"), CASES)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_calls_in_any_pieces(format: Any, text: str, said: str | None, calls: list[Any], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    found = read(ToolReader(format, NAMES), pieces)
    assert found["said"] == (text if said is None else said)
    assert [(name, json.loads(arguments)) for name, arguments in found["calls"]] == calls


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
@settings(max_examples=60, deadline=None)
@given(
    arguments=st.dictionaries(st.text(), st.recursive(st.none() | st.integers() | st.text(), st.lists, max_leaves=5)),
    size=st.integers(1, 9),
)
def test_what_is_spelled_is_read(format: Any, arguments: dict[str, Any], size: int) -> None:
    text = format.spelled("get_weather", arguments)
    found = read(ToolReader(format, NAMES), [text[i : i + size] for i in range(0, len(text), size)])
    assert found["said"] == ""
    assert [(name, json.loads(given)) for name, given in found["calls"]] == [("get_weather", arguments)]


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
@settings(max_examples=150, deadline=None)
@given(
    text=st.text(st.sampled_from('<>[]{}"\\:,; \ntool_call/|pyhnag.TOCALSRG#name=f'), max_size=60),
    size=st.integers(1, 9),
)
def test_no_text_breaks_a_reader(format: Any, text: str, size: int) -> None:
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    assert read(ToolReader(format, NAMES), pieces) == read(ToolReader(format, NAMES), [text])


def test_a_call_is_shown_before_it_is_complete() -> None:
    reader = ToolReader(HERMES, NAMES)
    assert reader.push('<tool_call>{"name": "f", "arg') == [CallBegun(0, "f")]
    assert reader.push('uments": {"city": "Par') == [CallArguments(0, '{"city": "Par')]
    assert reader.push('is"}') == [CallArguments(0, 'is"}')]
    assert reader.end() == []


def test_only_the_first_call_counts_where_calls_are_not_parallel() -> None:
    text = HERMES.spelled("f", {"a": 1}) + HERMES.spelled("g", {})
    assert read(ToolReader(HERMES, NAMES, parallel=False), [text])["calls"] == [("f", '{"a": 1}')]


@pytest.mark.parametrize("text", ["f(1)", "f(a=b)", "f(a=__import__('os'))", "x = 1", "", "f(**{'a': 1})" * 99])
def test_python_that_is_no_call_of_constants(text: str) -> None:
    assert python_call(text) is None


def test_the_format_is_read_from_the_template() -> None:
    assert choose_format("auto", "{{ '<tool_call>' }}") is HERMES
    assert choose_format("auto", "{{ '[TOOL_CALLS]' }}") is MISTRAL
    assert choose_format("auto", "{{ '<|python_tag|>' }}") is LLAMA3
    assert choose_format("auto", "{{ messages }}") is HERMES
    assert choose_format("mistral", "{{ '<tool_call>' }}") is MISTRAL
    with pytest.raises(ConfigError, match="hermes, llama3, mistral"):
        choose_format("gpt", "")


THOUGHTS = [
    ("<think>\nHm. </th x\n\n</think>\n\nYes  ok", False, "Hm. </th x", "Yes  ok"),
    ("plain <think>", False, "", "plain <think>"),
    ("hm</think>a", True, "hm", "a"),
    ("<think>never done", False, "never done", ""),
    ("<thi", False, "", "<thi"),
    ("  x", False, "", "  x"),
]


@pytest.mark.parametrize(("text", "inside", "thought", "said"), THOUGHTS)
@pytest.mark.parametrize("size", [1, 2, 5, 99])
def test_thoughts(text: str, inside: bool, thought: str, said: str, size: int) -> None:
    found = read(ReasoningReader(inside), [text[i : i + size] for i in range(0, len(text), size)])
    assert (found["thought"], found["said"]) == (thought, said)
