"""Every family's tool-call format: what is spelled is read, however it is cut, and a grammar writes nothing else."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from quire.text.call_formats.call_format import ToolFormat
from quire.text.call_formats.format_choice import FORMATS, choose_format
from quire.text.call_formats.harmony import HARMONY, HarmonyReader
from quire.text.segments import CallArguments, CallBegun, Said, Segment
from quire.text.tool_reader import ToolReader
from quire.types.errors import ConfigError

SCHEMAS: dict[str, Any] = {
    "write_file": {
        "type": "object",
        "properties": {
            "path": {"type": "string"},
            "text": {"type": "string"},
            "mode": {"enum": ["w", "a"]},
            "lines": {"type": "array", "items": {"type": "integer"}},
        },
        "required": ["path"],
    },
    "move": {
        "type": "object",
        "properties": {
            "x": {"type": "integer"},
            "y": {"type": ["number", "null"]},
            "fast": {"type": "boolean"},
            "to": {"$ref": "#/$defs/place"},
        },
        "required": ["x"],
        "$defs": {"place": {"type": "object", "properties": {"name": {"type": "string"}, "ids": {"type": "array"}}}},
    },
    "now": {"type": "object", "properties": {}},
}
WORDS = ["", " ", "a b", '"quoted"', "\\n\\", "line\nbreak\n", "\n", "</p", "<tool", "[x", "{1: 2}", "é😀", "5", "true"]


def some_calls(rng: random.Random) -> list[tuple[str, dict[str, Any]]]:
    def text() -> str:
        return "".join(rng.choice(WORDS) for _ in range(rng.randrange(4)))

    def place() -> dict[str, Any]:
        return {"ids": [rng.randrange(9), None, text()], "name": text()}

    made: dict[str, Any] = {
        "path": text, "text": text, "mode": lambda: rng.choice("wa"), "lines": lambda: [1, -2][: rng.randrange(3)],
        "x": lambda: rng.randrange(-9, 9), "y": lambda: rng.choice([None, 0.5, 3]), "fast": lambda: rng.random() < 0.5,
        "to": place,
    }  # fmt: skip
    calls = []
    for _ in range(rng.randrange(1, 4)):
        name = rng.choice(list(SCHEMAS))
        properties, required = SCHEMAS[name]["properties"], SCHEMAS[name].get("required", ())
        calls.append((name, {key: made[key]() for key in properties if key in required or rng.random() < 0.6}))
    return calls


def reader_of(format: ToolFormat) -> Any:
    return HarmonyReader(SCHEMAS) if format is HARMONY else ToolReader(format, SCHEMAS)


def read(reader: Any, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    segments: list[Segment] = [one for piece in pieces for one in reader.push(piece)] + reader.end()
    said, calls = "", list[tuple[str, str]]()
    for segment in segments:
        if isinstance(segment, CallBegun):
            assert segment.index == len(calls)
            calls.append((segment.name, ""))
        elif isinstance(segment, CallArguments):
            assert segment.index == len(calls) - 1, "a call's arguments come before the next begins"
            calls[-1] = calls[-1][0], calls[-1][1] + segment.text
        else:
            assert isinstance(segment, Said)
            said += segment.text
    return said, calls


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_calls_are_read_as_they_were_spelled_wherever_the_text_is_cut(format: ToolFormat) -> None:
    rng = random.Random(format.name)
    for _ in range(8):
        calls = some_calls(rng)
        words = rng.choice(["", "Let me see."]) if not format.bare and format is not HARMONY else ""
        text = words + format.spelled(*calls)
        whole = read(reader_of(format), [text])
        assert whole[0] == words
        assert [(name, json.loads(arguments)) for name, arguments in whole[1]] == calls
        assert read(reader_of(format), list(text)) == whole
        for cut in range(len(text)):
            assert read(reader_of(format), [text[:cut], text[cut:]]) == whole, text[:cut]


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_no_mark_leaks_however_an_answer_is_cut_short(format: ToolFormat) -> None:
    text = format.spelled(("write_file", {"path": "a\nb", "lines": [1]}), ("move", {"x": 1}))
    begun = 0
    for end in range(len(text)):
        said, calls = read(reader_of(format), list(text[:end]))
        assert len(calls) >= begun  # once a call is shown it stays
        begun = len(calls)
        if calls:
            assert said == ""
            assert calls[0][0] == "write_file" and json.dumps(read(reader_of(format), [text[:end]])[1]) == json.dumps(
                calls
            )


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_names_come_first_and_arguments_stream(format: ToolFormat) -> None:
    text = format.spelled(("write_file", {"path": "somewhere", "text": "word " * 20, "lines": [1, 2]}))
    reader = reader_of(format)
    pieces = [segment for character in text for segment in reader.push(character)]
    assert isinstance(pieces[0], CallBegun) and len(pieces) > 3
    assert all(isinstance(piece, CallArguments) for piece in pieces[1:])


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_what_names_no_tool_is_text(format: ToolFormat) -> None:
    text = format.spelled(("unknown", {"a": 1}))
    whole = read(reader_of(format), [text])
    assert whole[1] == [] and (format is HARMONY or whole[0] == text)
    for cut in range(len(text)):
        assert read(reader_of(format), [text[:cut], text[cut:]]) == whole


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_no_text_breaks_a_reader(format: ToolFormat) -> None:
    """Marks, halves of marks and other characters in any order: the same in one piece as in many."""
    rng = random.Random(format.name)
    calls = format.spelled(("move", {"x": 1, "fast": True}), ("now", {}))
    parts = [*format.all_marks(), calls, *"[]{}()<>|,:= \n\"'", "move", "x=1", "to=functions.now", "json", "final"]
    for _ in range(150):
        text = ""
        for _ in range(rng.randrange(12)):
            part = rng.choice(parts)
            text += part[: rng.randrange(len(part) + 1)] if rng.random() < 0.3 else part
        whole = read(reader_of(format), [text])
        assert read(reader_of(format), list(text)) == whole, text
        size = rng.randrange(2, 9)
        assert read(reader_of(format), [text[i : i + size] for i in range(0, len(text), size)]) == whole, text


TEMPLATES = [
    ("{{ '<tool_call>' }}", "hermes"),
    ("<tool_call>\n<function=example>\n<parameter=x>", "qwen3_coder"),
    ("'<tool_call>' + name + '\n<arg_key>' k '</arg_key>\n<arg_value>' v '</arg_value>'", "glm45"),
    ("'<tool_call>' + name + '<arg_key>' k '</arg_key><arg_value>' v '</arg_value>'", "glm47"),
    ("[TOOL_CALLS][", "mistral"),
    ("[TOOL_CALLS]name[ARGS]", "mistral_args"),
    ("<|python_tag|>", "llama3"),
    ('{"name": function name, "parameters": dictionary}', "llama3"),
    ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>' + '\n```json\n'", "deepseek_v3"),
    ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>'", "deepseek_v31"),
    ("<｜DSML｜function_calls>", "deepseek_v32"),
    ("<|channel|>commentary to=functions. <|message|>", "harmony"),
    ("<|tool_calls_section_begin|><|tool_call_begin|>", "kimi_k2"),
    ("<|tool|>' + tools + '<|/tool|>'", "phi4_mini_json"),
    ("respond with <|tool_call|> followed by a JSON list", "granite"),
    ("<|tool_call_start|>[", "lfm2"),
    ("<|START_ACTION|> <|END_ACTION|>", "cohere"),
    ("<TOOLCALL>[]</TOOLCALL>", "nemotron_json"),
    ("<function_calls>", "olmo3"),
    ("<|tool_call>call:' name '{' <tool_call|>", "gemma4"),
    ("<start_function_call>call:", "functiongemma"),
    ("<|python_start|>", "pythonic"),
    ("{{ messages }}", "hermes"),
]


@pytest.mark.parametrize(("template", "name"), TEMPLATES)
def test_the_format_is_read_from_the_template(template: str, name: str) -> None:
    assert choose_format("auto", template).name == name


def test_formats_have_the_names_that_vllm_gives_them() -> None:
    names = {
        "hermes": "hermes", "llama3_json": "llama3", "llama4_pythonic": "pythonic", "mistral": "mistral",
        "qwen3_coder": "qwen3_coder", "qwen3_xml": "qwen3_coder", "deepseek_v3": "deepseek_v3", "glm45": "glm45",
        "openai": "harmony", "kimi_k2": "kimi_k2", "phi4_mini_json": "phi4_mini_json", "granite": "granite",
    }  # fmt: skip
    for name, ours in names.items():
        assert choose_format(name, "{{ '<tool_call>' }}").name == ours
    assert choose_format("mistral", "[TOOL_CALLS] [ARGS]").name == "mistral_args"
    with pytest.raises(ConfigError, match="hermes"):
        choose_format("nothing", "")
