"""Tools told to a model, and grammars that bind its calls, checked by the grammar library itself."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import llguidance
import pytest

from quire.generation.grammar.llguidance_backend import sources
from quire.text import TextModel, Tool
from quire.text.call_formats.call_format import ToolFormat
from quire.text.call_formats.format_choice import FORMATS
from quire.text.call_formats.harmony import HARMONY, HarmonyReader
from quire.text.call_formats.hermes_calls import HERMES
from quire.text.call_formats.json_list_calls import JsonListFormat
from quire.text.call_formats.llama_calls import LLAMA3
from quire.text.segments import CallArguments, CallBegun
from quire.text.tool_calls import required_grammar, spell_out, strict_grammar
from quire.text.tool_reader import ToolReader
from quire.types.errors import ConfigError, InputError
from quire.types.grammar import GrammarSpec

POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
NESTED = {
    "type": "object",
    "properties": {"p": {"$ref": "#/$defs/Point"}},
    "required": ["p"],
    "additionalProperties": False,
    "$defs": {"Point": POINT},
}
TOOLS = [Tool(name="f", description="finds", parameters=NESTED, strict=True), Tool(name="g")]
GOOD, BAD = {"p": {"x": 1}}, {"p": {"x": "one"}}


@pytest.fixture(scope="module")
def text(default_model: Any) -> TextModel:
    return TextModel.load(default_model)


@pytest.fixture(scope="module")
def accepts(text: TextModel) -> Any:
    """Whether a grammar takes a text as a whole."""
    vocabulary = llguidance.LLTokenizer(text.tokenizer._backend.to_str())

    def check(spec: GrammarSpec, answer: str) -> bool:
        compile = llguidance.LLMatcher.grammar_from_json_schema
        if spec.kind == "lark":
            compile = llguidance.LLMatcher.grammar_from_lark
        matcher = llguidance.LLMatcher(vocabulary, compile(spec.source))
        assert not matcher.get_error(), matcher.get_error()
        tokens = text.tokenizer.encode(answer, add_special=False)
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    return check


def no_special(mark: str) -> None:
    return None


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_required_calls_are_in_the_model_s_own_format(accepts: Any, format: ToolFormat) -> None:
    one, many = (required_grammar(TOOLS, format, no_special, parallel=parallel) for parallel in (False, True))
    f, g = ("f", GOOD), ("g", {})
    assert accepts(one, format.spelled(f)) and accepts(one, format.spelled(g)) and accepts(many, format.spelled(f))
    assert accepts(many, format.spelled(f, g)) == format.parallel and not accepts(one, format.spelled(f, g))
    assert not accepts(one, "words") and not accepts(many, "")
    assert not accepts(one, format.spelled(("h", {})))
    assert not accepts(one, format.spelled(("f", {}))) and not accepts(one, format.spelled(("f", {**GOOD, "q": 1})))
    if format.name not in ("gemma4", "functiongemma"):  # in Gemma's notation only scalars are bound
        assert not accepts(one, format.spelled(("f", BAD)))


@pytest.mark.parametrize(
    "format", [format for format in FORMATS.values() if format is not HARMONY], ids=lambda format: format.name
)
def test_strict_tools_bind_calls_and_leave_words_free(accepts: Any, format: ToolFormat) -> None:
    spec = strict_grammar(TOOLS, format, no_special)
    assert accepts(spec, "Just words, <tool or [TOOL or {.")
    assert accepts(spec, format.spelled(("f", GOOD))) and not accepts(spec, format.spelled(("f", {})))
    assert accepts(spec, format.spelled(("g", {}), ("f", GOOD)))
    if not format.bare:
        assert accepts(spec, "Let me see.\n" + format.spelled(("f", GOOD)))
        assert accepts(spec, format.spelled(("f", GOOD)) + "\nand " + format.spelled(("g", {})))


def test_strict_tools_with_a_marker_that_is_a_token(accepts: Any, text: TextModel) -> None:
    """`<|im_start|>` and `<|im_end|>` stand for a family's own marks."""
    format = JsonListFormat("own", ("<|im_start|>",), "<|im_end|>")
    spec = strict_grammar(TOOLS, format, text.special_id)
    assert "<[1]>" in spec.source
    assert accepts(spec, "Words") and accepts(spec, "Well: " + format.spelled(("f", GOOD)))
    assert not accepts(spec, format.spelled(("f", BAD)))
    assert accepts(required_grammar(TOOLS, format, text.special_id, parallel=True), format.spelled(("f", GOOD)))


def test_tools_beside_a_response_format(accepts: Any) -> None:
    spec = strict_grammar(TOOLS, HERMES, no_special, GrammarSpec("json_schema", json.dumps(POINT)))
    assert accepts(spec, '{"x": 3}') and accepts(spec, HERMES.spelled(("f", GOOD)))
    assert not accepts(spec, "words") and not accepts(spec, '{"y": 3}')
    with pytest.raises(InputError, match="cannot be combined"):
        strict_grammar(TOOLS, HERMES, no_special, GrammarSpec("regex", "a"))


RICH = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "kind": {"enum": ["big", "small"]},
        "code": {"type": "string", "pattern": "^[A-C]{2}$"},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "on": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 2},
        "at": {"$ref": "#/$defs/point"},
    },
    "required": ["name", "count"],
    "additionalProperties": False,
    "$defs": {"point": {**POINT, "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}}}},
}


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_what_a_grammar_writes_is_read_and_fits_the_schema(format: ToolFormat) -> None:
    """Random walks along the masks, over an alphabet of bytes."""
    rng = random.Random(format.name)
    alphabet = llguidance.LLTokenizer("byte")
    tools = [Tool(name="rich", parameters=RICH), Tool(name="none", parameters={"type": "object", "properties": {}})]
    schemas = {tool.name: tool.parameters for tool in tools}
    source = required_grammar(tools, format, no_special, parallel=True)
    taken = next(one for one in sources(source) if one)
    seen = 0
    for _ in range(16):
        matcher = llguidance.LLMatcher(alphabet, llguidance.LLMatcher.grammar_from_lark(taken.source))
        assert not matcher.get_error(), matcher.get_error()
        written = bytearray()
        while not matcher.is_stopped() and not (matcher.is_accepting() and rng.random() < 0.8) and len(written) < 3000:
            mask = matcher.compute_bitmask()
            allowed = [i for i in range(256) if mask[i // 8] >> i % 8 & 1]
            byte = rng.choice([i for i in allowed if 32 <= i < 127] or allowed)
            assert matcher.consume_token(byte)
            written.append(byte)
        if not matcher.is_accepting() and not matcher.is_stopped():
            continue  # a value without an end
        reader: Any = HarmonyReader(schemas) if format is HARMONY else ToolReader(format, schemas)
        calls: list[list[str]] = []
        for segment in reader.push(written.decode()) + reader.end():
            if isinstance(segment, CallBegun):
                calls.append([segment.name, ""])
            else:
                assert isinstance(segment, CallArguments), (written, segment)
                calls[-1][1] += segment.text
        assert calls
        for name, arguments in calls:
            found = json.loads(arguments)
            if format.name in ("gemma4", "functiongemma"):
                found = {key: value for key, value in found.items() if key not in ("tags", "at")}
            jsonschema.validate(found, schemas[name])
            seen += name == "rich"
    assert seen


def test_parameters_that_a_format_cannot_be_held_to_are_refused() -> None:
    tool = Tool(name="f", parameters={"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 1})
    with pytest.raises(InputError, match="minProperties") as caught:
        required_grammar([tool], FORMATS["qwen3_coder"], no_special, parallel=False)
    assert caught.value.code == "invalid_grammar"
    required_grammar([tool], HERMES, no_special, parallel=False)


def test_endless_schemas_are_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(100):
        schema = {"properties": {"a": schema}}
    with pytest.raises(InputError, match="deep"):
        required_grammar([Tool(name="f", parameters=schema)], HERMES, no_special, parallel=False)


CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": GOOD}}],
    },
    {"role": "tool", "content": "sunny", "tool_call_id": "1"},
]


def test_a_template_without_tools_gets_them_in_words(text: TextModel) -> None:
    rendered = text.render_chat(CONVERSATION, tools=[tool.described() for tool in TOOLS])
    assert '"finds"' in rendered and "sunny" in rendered
    assert rendered.count("<tool_call>") == 2 and json.dumps({"name": "f", "arguments": GOOD}) in rendered
    assert "finds" not in text.render_chat(CONVERSATION)
    assert text.render_chat(CONVERSATION[:1]) == text.render_chat(CONVERSATION[:1], tools=[])


def test_a_system_message_stays_the_first() -> None:
    messages = spell_out([{"role": "system", "content": "Be brief."}], [TOOLS[0].described()], HERMES)
    assert [message["role"] for message in messages] == ["system"]
    assert messages[0]["content"].startswith("Be brief.\n\n")


def test_a_template_with_tools_keeps_its_own_way(text: TextModel) -> None:
    template = (
        "{% for t in tools or [] %}T:{{ t.function.name }} {% endfor %}"
        "{% for m in messages %}{{ m.role }} {% endfor %}<|python_tag|></think>"
    )
    own = TextModel(text.tokenizer, {"default": template})
    assert own.render_chat(CONVERSATION, tools=[TOOLS[0].described()]).startswith("T:f user assistant tool")
    assert own.tool_format is LLAMA3 and own.reasons
    assert TextModel(text.tokenizer, {"default": template}, tool_call_parser="hermes").tool_format is HERMES
    assert not TextModel(text.tokenizer, {"default": template}, reasoning_parser="none").reasons
    with pytest.raises(ConfigError, match="think"):
        TextModel(text.tokenizer, {"default": template}, reasoning_parser="nothing")


def test_a_thought_that_the_prompt_began(text: TextModel) -> None:
    thinking = TextModel(text.tokenizer, {"default": "x"}, reasoning_parser="think")
    reader = thinking.reasoning_reader(thinking.tokenizer.encode("<|im_start|>assistant\n<think>\n"))
    assert reader is not None and [type(s).__name__ for s in reader.push("so</think>yes")] == ["Thought", "Said"]
    assert text.reasoning_reader([1]) is None


def test_an_answer_may_be_begun(text: TextModel) -> None:
    plain, begun = text.encode_chat(CONVERSATION[:1]), text.encode_chat(CONVERSATION[:1], prefix="Once upon")
    assert begun[: len(plain)] == plain and text.tokenizer.decode(begun[len(plain) :]) == "Once upon"
