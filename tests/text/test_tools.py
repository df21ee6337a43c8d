"""Tools told to a model, and grammars that bind its calls, checked by the grammar library itself."""

from __future__ import annotations

import json
from typing import Any

import llguidance
import pytest

from quire.text import TextModel, Tool
from quire.text.tool_calls import forced_grammar, spell_out, strict_grammar
from quire.text.tool_formats import HERMES, LLAMA3, MISTRAL
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


def test_forced_calls(accepts: Any) -> None:
    one, many = (forced_grammar(TOOLS, HERMES, parallel=parallel) for parallel in (False, True))
    call = {"name": "f", "arguments": GOOD}
    assert accepts(one, json.dumps(call)) and accepts(many, json.dumps([call, {"name": "g", "arguments": {"a": 1}}]))
    assert not accepts(one, json.dumps([call])) and not accepts(many, json.dumps(call)) and not accepts(many, "[]")
    assert not accepts(one, json.dumps({"name": "f", "arguments": BAD}))
    assert not accepts(one, json.dumps({"name": "h", "arguments": {}}))


@pytest.mark.parametrize("format", [HERMES, LLAMA3, MISTRAL])
def test_strict_tools_bind_calls_and_leave_words_free(accepts: Any, format: Any) -> None:
    spec = strict_grammar(TOOLS, format)
    assert accepts(spec, "Just words, <tool or [TOOL or {.")
    assert accepts(spec, format.spelled("f", GOOD)) and not accepts(spec, format.spelled("f", BAD))
    assert accepts(spec, format.spelled("g", {"anything": [1]}))
    if not format.bare:
        assert accepts(spec, "Let me see.\n" + format.spelled("f", GOOD))


def test_strict_tools_with_a_marker_that_is_a_token(accepts: Any, text: TextModel) -> None:
    format = MISTRAL._replace(marker="<|im_start|>")
    spec = strict_grammar(TOOLS, format, text.special_id("<|im_start|>"))
    assert accepts(spec, "Words") and accepts(spec, "Well: " + format.spelled("f", GOOD))
    assert not accepts(spec, format.spelled("f", BAD))


def test_tools_beside_a_response_format(accepts: Any) -> None:
    spec = strict_grammar(TOOLS, HERMES, None, GrammarSpec("json_schema", json.dumps(POINT)))
    assert accepts(spec, '{"x": 3}') and accepts(spec, HERMES.spelled("f", GOOD))
    assert not accepts(spec, "words") and not accepts(spec, '{"y": 3}')
    with pytest.raises(InputError, match="cannot be combined"):
        strict_grammar(TOOLS, HERMES, None, GrammarSpec("regex", "a"))


def test_endless_schemas_are_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(100):
        schema = {"properties": {"a": schema}}
    with pytest.raises(InputError, match="deep"):
        forced_grammar([Tool(name="f", parameters=schema)], HERMES, parallel=False)


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
    assert TextModel(text.tokenizer, {"default": template}, tool_parser="hermes").tool_format is HERMES
    assert not TextModel(text.tokenizer, {"default": template}, reasoning_parser="none").reasons
    with pytest.raises(ConfigError, match="think"):
        TextModel(text.tokenizer, {"default": template}, reasoning_parser="r1")


def test_a_thought_that_the_prompt_began(text: TextModel) -> None:
    thinking = TextModel(text.tokenizer, {"default": "x"}, reasoning_parser="think")
    reader = thinking.reasoning_reader(thinking.tokenizer.encode("<|im_start|>assistant\n<think>\n"))
    assert reader is not None and [type(s).__name__ for s in reader.push("so</think>yes")] == ["Thought", "Said"]
    assert text.reasoning_reader([1]) is None


def test_an_answer_may_be_begun(text: TextModel) -> None:
    plain, begun = text.encode_chat(CONVERSATION[:1]), text.encode_chat(CONVERSATION[:1], prefix="Once upon")
    assert begun[: len(plain)] == plain and text.tokenizer.decode(begun[len(plain) :]) == "Once upon"
