"""Calls and thoughts in text: the same whatever the pieces the text comes in."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.text.call_formats.harmony import HarmonyReader
from quire.text.call_formats.hermes_calls import HERMES
from quire.text.call_formats.llama_calls import LLAMA3
from quire.text.call_formats.mistral_calls import MISTRAL
from quire.text.reasoning_formats import choose_reasoning
from quire.text.reasoning_reader import ReasoningReader
from quire.text.segments import CallArguments, CallBegun, Said, Segment, Thought
from quire.text.tool_reader import ToolReader

NAMES: dict[str, Any] = {"f": {}, "g": {}, "get_weather": {}}


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


def test_a_call_is_shown_before_it_is_complete() -> None:
    reader = ToolReader(HERMES, NAMES)
    assert reader.push('<tool_call>{"name": "f", "arg') == [CallBegun(0, "f")]
    assert reader.push('uments": {"city": "Par') == [CallArguments(0, '{"city": "Par')]
    assert reader.push('is"}') == [CallArguments(0, 'is"}')]
    assert reader.end() == []


def test_only_the_first_call_counts_where_calls_are_not_parallel() -> None:
    text = HERMES.spelled(("f", {"a": 1}), ("g", {}))
    assert read(ToolReader(HERMES, NAMES, parallel=False), [text])["calls"] == [("f", '{"a": 1}')]


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


MARKED = [
    ("mistral", "[THINK]so [/x[/THINK]\n\nyes [THINK]", "so [/x", "yes [THINK]"),
    ("granite", "Here is my thought process: so.\n\nHere is my response: yes", "so.", "yes"),
    ("granite", "Here's my thought process: a Here is my\nHere's my response:\nyes Here", "a Here is my", "yes Here"),
    ("granite_response", "<think>so</think>\n<response>yes < no</response>", "so", "yes < no"),
    ("cohere2", "<|START_THINKING|>so<|END_THINKING|><|START_RESPONSE|>yes<|END_RESPONSE|>", "so", "yes"),
    ("gemma4", "<|channel>thought\nso\n<channel|>yes", "so", "yes"),
    ("seed_oss", "<seed:think>so</seed:think>yes", "so", "yes"),
    ("deepseek_r1", "<think>so</think>yes", "so", "yes"),
    ("qwen3", "yes", "", "yes"),
]


@pytest.mark.parametrize(("name", "text", "thought", "said"), MARKED)
def test_thoughts_as_each_family_marks_them(name: str, text: str, thought: str, said: str) -> None:
    format = choose_reasoning(name, "")
    assert format is not None
    for cut in range(len(text)):
        found = read(ReasoningReader(False, format), [text[:cut], text[cut:]])
        assert (found["thought"], found["said"]) == (thought, said), text[:cut]


SIGNS = [
    ("{% if '</think>' in content %}", "think"),
    ("<think></think> tags and <response></response>", "granite_response"),
    ("Here is my thought process: ... Here is my response:", "granite"),
    ("[THINK]' ~ thought ~ '[/THINK]", "mistral"),
    ("<|START_THINKING|> <|END_THINKING|>", "cohere2"),
    ("<|channel|>analysis<|message|>", "harmony"),
    ("<|channel>thought\n<channel|>", "gemma4"),
    ("{{ messages }}", None),
]


@pytest.mark.parametrize(("template", "name"), SIGNS)
def test_reasoning_marks_are_read_from_the_template(template: str, name: str | None) -> None:
    found = choose_reasoning("auto", template)
    assert (found.name if found else None) == name
    assert choose_reasoning("none", template) is None


HARMONIES = [
    (
        "<|channel|>analysis<|message|>Hm <|x.<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
        {"said": "Yes.", "thought": "Hm <|x.", "calls": []},
    ),
    (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>Look.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": "<|"}<|call|>',
        {"said": "Look.", "thought": "Hm.", "calls": [("f", '{"a": "<|"}')]},
    ),
    (
        '<|start|>assistant to=functions.g<|channel|>commentary json<|message|>{"b": 1}',
        {"said": "", "thought": "", "calls": [("g", '{"b": 1}')]},
    ),
    ("just words", {"said": "just words", "thought": "", "calls": []}),
    ("<|channel|>analysis<|mess", {"said": "", "thought": "", "calls": []}),
    (
        "<|channel|>analysis<|message|>a<|channel|>final<|message|>b<|return|>",
        {"said": "b", "thought": "a", "calls": []},
    ),
]


@pytest.mark.parametrize(("text", "found"), HARMONIES)
def test_harmony_channels(text: str, found: dict[str, Any]) -> None:
    for cut in range(len(text)):
        assert read(HarmonyReader(NAMES), [text[:cut], text[cut:]]) == found, text[:cut]
    assert read(HarmonyReader(NAMES), list(text)) == found
    told = read(HarmonyReader(NAMES, thoughts=False), [text])
    assert told["thought"] == "" and len(told["said"]) == len(found["said"]) + len(found["thought"])
