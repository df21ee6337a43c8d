"""Tools, thoughts, constraints and responses through the `openai` client: over the fake, whose words are given, and
over the real model, whose calls are bound by a grammar."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import llguidance
import openai
import pytest
from fake_frontend import FakeFrontend
from pydantic import BaseModel, Field

from quire.text.call_formats.hermes_calls import HERMES
from quire.types.grammar import GrammarSpec

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get_weather", "description": "The weather.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "get_time"}},
]
QUESTION: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
CALLS = (
    'Let me look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
)


@pytest.fixture
def fake(fake_server: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{fake_server}/v1", api_key="none", max_retries=0, timeout=30)


@pytest.fixture
def live(live_server: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{live_server}/v1", api_key="none", max_retries=0, timeout=120)


MODEL = FakeFrontend.model_name


def test_calls_are_found(fake: openai.OpenAI, says: Any, fake_frontend: FakeFrontend) -> None:
    says(CALLS)
    answer = fake.chat.completions.create(model=MODEL, messages=QUESTION, tools=TOOLS)
    [choice] = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me look."
    calls = choice.message.tool_calls or []
    assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == [  # type: ignore[union-attr]
        ("get_weather", {"city": "Paris", "days": 2}),
        ("get_time", {}),
    ]
    assert fake_frontend.requests[-1].params.grammar is None
    assert [tool["function"]["name"] for tool in fake_frontend.text.rendered[-1]["tools"]] == [
        "get_weather",
        "get_time",
    ]
    results = [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in calls]
    says("It is sunny.")
    again = fake.chat.completions.create(
        model=MODEL,
        messages=[*QUESTION, choice.message, *results],
        tools=TOOLS,  # type: ignore[list-item]
    )
    assert again.choices[0].message.content == "It is sunny." and again.choices[0].message.tool_calls is None
    sent = fake_frontend.text.rendered[-1]["messages"]
    assert [message["role"] for message in sent] == ["user", "assistant", "tool", "tool"]
    assert sent[1]["tool_calls"][0]["function"]["arguments"] == {"city": "Paris", "days": 2}


def test_calls_are_streamed_as_deltas(fake: openai.OpenAI, says: Any) -> None:
    says(CALLS)
    names: dict[int, str] = {}
    arguments: dict[int, list[str]] = {}
    content, finish = "", None
    for chunk in fake.chat.completions.create(model=MODEL, messages=QUESTION, tools=TOOLS, stream=True):
        [choice] = chunk.choices
        content += choice.delta.content or ""
        finish = choice.finish_reason or finish
        for call in choice.delta.tool_calls or []:
            assert call.function is not None
            if call.id:
                names[call.index] = call.function.name or ""
            arguments.setdefault(call.index, []).append(call.function.arguments or "")
    assert (content, finish, names) == ("Let me look.", "tool_calls", {0: "get_weather", 1: "get_time"})
    assert json.loads("".join(arguments[0])) == {"city": "Paris", "days": 2} and len(arguments[0]) > 5
    # The client's own accumulator, which raises if the pieces do not fit.
    with fake.chat.completions.stream(model=MODEL, messages=QUESTION, tools=TOOLS) as stream:
        final = stream.get_final_completion()
    assert len(final.choices[0].message.tool_calls or []) == 2


def test_one_call_where_calls_are_not_parallel(fake: openai.OpenAI, says: Any) -> None:
    says(CALLS)
    answer = fake.chat.completions.create(model=MODEL, messages=QUESTION, tools=TOOLS, parallel_tool_calls=False)
    assert len(answer.choices[0].message.tool_calls or []) == 1


def test_tool_choice(fake: openai.OpenAI, says: Any, fake_frontend: FakeFrontend) -> None:
    says('<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>')
    named: Any = {"type": "function", "function": {"name": "get_time"}}
    answer = fake.chat.completions.create(model=MODEL, messages=QUESTION, tools=TOOLS, tool_choice=named)
    assert answer.choices[0].finish_reason == "stop" and answer.choices[0].message.tool_calls
    grammar = fake_frontend.requests[-1].params.grammar
    weather = ("get_weather", {"city": "Rome", "days": 1})
    validate(grammar, [("get_time", {})], [weather])

    says(HERMES.spelled(weather))
    answer = fake.chat.completions.create(model=MODEL, messages=QUESTION, tools=TOOLS, tool_choice="required")
    assert answer.choices[0].finish_reason == "tool_calls"
    validate(
        fake_frontend.requests[-1].params.grammar, [weather, ("get_time", {})], [("get_weather", {"city": "Rome"})]
    )

    told = [entry["tools"] for entry in fake_frontend.text.rendered[-2:]]
    assert told[0] == told[1] and len(told[0]) == len(TOOLS)  # whatever is forced, the prompt begins the same

    says(CALLS)
    answer = fake.chat.completions.create(model=MODEL, messages=QUESTION, tools=TOOLS, tool_choice="none")
    assert answer.choices[0].message.content == CALLS and not fake_frontend.text.rendered[-1]["tools"]
    allowed: Any = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named]}}
    fake.chat.completions.create(model=MODEL, messages=QUESTION, tools=TOOLS, tool_choice=allowed)
    assert [tool["function"]["name"] for tool in fake_frontend.text.rendered[-1]["tools"]] == ["get_time"]
    with pytest.raises(openai.BadRequestError, match="not among the tools"):
        stranger: Any = {"type": "function", "function": {"name": "x"}}
        fake.chat.completions.create(model=MODEL, messages=QUESTION, tools=TOOLS, tool_choice=stranger)


def validate(grammar: GrammarSpec | None, good: list[Any], bad: list[Any]) -> None:
    """The grammar takes these calls, and not those."""
    assert grammar is not None and grammar.kind == "lark"
    alphabet = llguidance.LLTokenizer("byte")
    for calls in (good, bad):
        matcher = llguidance.LLMatcher(alphabet, llguidance.LLMatcher.grammar_from_lark(grammar.source))
        tokens = alphabet.tokenize_str(HERMES.spelled(*calls))
        assert (matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()) == (calls is good)


def test_thoughts_are_told_apart(fake: openai.OpenAI, says: Any) -> None:
    says("<think>\nParis is in France.\n</think>\n\nSunny.", reasons=True)
    answer = fake.chat.completions.create(model=MODEL, messages=QUESTION)
    message = answer.choices[0].message
    assert (message.content, message.reasoning_content) == ("Sunny.", "Paris is in France.")  # type: ignore[attr-defined]
    assert answer.usage is not None and answer.usage.completion_tokens_details is not None
    assert 20 < (answer.usage.completion_tokens_details.reasoning_tokens or 0) < answer.usage.completion_tokens
    thought, said = "", ""
    for chunk in fake.chat.completions.create(model=MODEL, messages=QUESTION, stream=True):
        thought += getattr(chunk.choices[0].delta, "reasoning_content", None) or ""
        said += chunk.choices[0].delta.content or ""
    assert (said, thought) == ("Sunny.", "Paris is in France.")
    hidden = fake.chat.completions.create(model=MODEL, messages=QUESTION, extra_body={"include_reasoning": False})
    assert not hasattr(hidden.choices[0].message, "reasoning_content")


CLOSED_OBJECT = '{"x-quire-closed":true,"type":"object"}'
CONSTRAINTS: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "json_object"}}, "json_object", ""),
    ({"response_format": {"type": "text"}}, "", ""),
    ({"guided_regex": "a+"}, "regex", "a+"),
    ({"guided_choice": ["a", "b"]}, "choice", '["a","b"]'),
    ({"guided_grammar": "start: /a/"}, "lark", "start: /a/"),
    ({"guided_json": {"type": "object"}}, "json_schema", CLOSED_OBJECT),
    ({"guided_json": '{"type": "object"}'}, "json_schema", CLOSED_OBJECT),
    ({"guided_grammar": 'root ::= "a"'}, "gbnf", 'root ::= "a"'),
    ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
    ({"structured_outputs": {"choice": ["a"]}}, "choice", '["a"]'),
    ({"structured_outputs": {"json": {"type": "object"}}}, "json_schema", CLOSED_OBJECT),
    ({"structured_outputs": {"json_object": True}}, "json_object", ""),
    ({"structured_outputs": {"grammar": "start: /a/"}}, "lark", "start: /a/"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}},
        "json_schema",
        CLOSED_OBJECT,
    ),
]


@pytest.mark.parametrize(("fields", "kind", "source"), CONSTRAINTS)
def test_constraints_reach_the_sampler(
    fake: openai.OpenAI, fake_frontend: FakeFrontend, fields: dict[str, Any], kind: str, source: str
) -> None:
    fake.chat.completions.create(model=MODEL, messages=QUESTION, extra_body=fields)
    grammar = fake_frontend.requests[-1].params.grammar
    assert (grammar.kind, grammar.source) == (kind, source) if kind and grammar else grammar is None


def test_tiers_and_priorities(fake: openai.OpenAI, fake_frontend: FakeFrontend) -> None:
    answer = fake.chat.completions.create(model=MODEL, messages=QUESTION, service_tier="flex")
    assert answer.service_tier == "flex" and fake_frontend.requests[-1].priority == 10
    fake.chat.completions.create(model=MODEL, messages=QUESTION, service_tier="flex", extra_body={"priority": -3})
    assert fake_frontend.requests[-1].priority == -3


def test_template_variables_and_going_on(fake: openai.OpenAI, fake_frontend: FakeFrontend) -> None:
    variables = {"flavour": "x", "text": "y", "how": "z"}  # the latter two are names of ours as well
    extra: dict[str, Any] = {"chat_template_kwargs": variables, "continue_final_message": True}
    messages: list[Any] = [*QUESTION, {"role": "assistant", "content": "It is"}]
    fake.chat.completions.create(model=MODEL, messages=messages, reasoning_effort="none", extra_body=extra)
    rendered = fake_frontend.text.rendered[-1]
    assert rendered.items() >= variables.items() and rendered["enable_thinking"] is False
    assert bytes(fake_frontend.requests[-1].prompt).endswith(b"assistant: It is")


# ---- responses ----------------------------------------------------------------------------------------------

FUNCTIONS: list[Any] = [{"type": "function", "name": "get_weather", "parameters": WEATHER, "strict": False}]


def test_response(fake: openai.OpenAI, says: Any, fake_frontend: FakeFrontend) -> None:
    says("<think>Hm.</think>Sunny.", reasons=True)
    answer = fake.responses.create(model=MODEL, input="Weather?", instructions="Be brief.", metadata={"a": "b"})
    assert answer.status == "completed" and answer.output_text == "Sunny."
    assert [item.type for item in answer.output] == ["reasoning", "message"]
    assert answer.usage is not None and answer.usage.output_tokens_details.reasoning_tokens > 0
    assert answer.metadata == {"a": "b"}
    says("Yes.")
    second = fake.responses.create(model=MODEL, input="Sure?", previous_response_id=answer.id)
    sent = fake_frontend.text.rendered[-1]["messages"]
    assert [message["content"] for message in sent] == ["Weather?", "Sunny.", "Sure?"]
    assert fake.responses.retrieve(second.id).output_text == "Yes."
    assert fake.responses.input_items.list(second.id).data[0].content[0].text == "Sure?"  # type: ignore[union-attr]
    fake.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        fake.responses.retrieve(second.id)
    with pytest.raises(openai.BadRequestError, match="no stored response"):
        fake.responses.create(model=MODEL, input="x", previous_response_id=second.id)
    unkept = fake.responses.create(model=MODEL, input="x", store=False)
    with pytest.raises(openai.NotFoundError):
        fake.responses.retrieve(unkept.id)


def test_response_events(fake: openai.OpenAI, says: Any) -> None:
    says(f"<think>Hm.</think>{CALLS.split('</tool_call>')[0]}</tool_call>", reasons=True)
    with fake.responses.create(model=MODEL, input="Weather?", tools=FUNCTIONS, stream=True) as stream:
        events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.completed"
    items = [event.item.type for event in events if event.type == "response.output_item.added"]
    done = [event.item.type for event in events if event.type == "response.output_item.done"]
    assert (
        items == done == [item.type for item in events[-1].response.output] == ["reasoning", "message", "function_call"]
    )
    opened: list[int] = []  # items under way: one at a time
    for event in events:
        if event.type == "response.output_item.added":
            assert not opened
            opened.append(event.output_index)
        elif event.type == "response.output_item.done":
            assert opened.pop() == event.output_index
        elif hasattr(event, "output_index"):
            assert [event.output_index] == opened
    thoughts = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(thoughts) == "Hm."


def test_response_events_in_order(fake: openai.OpenAI, says: Any) -> None:
    says("Sunny.")
    with fake.responses.create(model=MODEL, input="Weather?", stream=True) as stream:
        kinds = [event.type for event in stream]
    assert list(dict.fromkeys(kinds)) == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        "response.output_text.delta", "response.output_text.done", "response.content_part.done",
        "response.output_item.done", "response.completed",
    ]  # fmt: skip
    # The client's own state machine over the events.
    with fake.responses.stream(model=MODEL, input="Weather?") as stream:
        final = stream.get_final_response()
    assert final.output_text == "Sunny."


def test_response_calls(fake: openai.OpenAI, says: Any, fake_frontend: FakeFrontend) -> None:
    says('<tool_call>{"name": "get_weather", "arguments": {"city": "Rome", "days": 1}}</tool_call>')
    with fake.responses.stream(model=MODEL, input="Weather?", tools=FUNCTIONS) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert "response.function_call_arguments.delta" in kinds and "response.function_call_arguments.done" in kinds
    [call] = final.output
    assert call.type == "function_call" and json.loads(call.arguments) == {"city": "Rome", "days": 1}
    says("Sunny.")
    items: list[Any] = [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
    answer = fake.responses.create(model=MODEL, input=items, previous_response_id=final.id, tools=FUNCTIONS)
    assert answer.output_text == "Sunny."
    sent = fake_frontend.text.rendered[-1]["messages"]
    assert [message["role"] for message in sent] == ["user", "assistant", "tool"]
    assert sent[1]["tool_calls"][0]["id"] == call.call_id
    items = [{"role": "user", "content": "Weather?"}, call.model_dump(exclude_none=True), *items]
    fake.responses.create(model=MODEL, input=items, tools=FUNCTIONS)
    assert [message["role"] for message in fake_frontend.text.rendered[-1]["messages"]] == ["user", "assistant", "tool"]


def test_response_that_runs_out_of_tokens_or_fails(fake: openai.OpenAI) -> None:
    answer = fake.responses.create(model=MODEL, input="x", max_output_tokens=6)
    assert answer.status == "incomplete" and answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    with fake.responses.create(model=MODEL, input="late-boom", stream=True) as stream:
        last = list(stream)[-1]
    assert last.type == "response.failed" and last.response.error is not None
    assert "secret" not in last.response.error.message
    with pytest.raises(openai.InternalServerError):
        fake.responses.create(model=MODEL, input="boom", stream=True)
    for field, value in (("moderation", {"model": "x"}), ("prompt", {"id": "x"})):
        with pytest.raises(openai.BadRequestError) as caught:
            fake.responses.create(model=MODEL, input="x", **{field: value})  # type: ignore[call-overload]
        assert caught.value.param == field


def test_response_logprobs(fake: openai.OpenAI) -> None:
    answer = fake.responses.create(
        model=MODEL, input="x", include=["message.output_text.logprobs"], top_logprobs=2, max_output_tokens=5
    )
    [message] = answer.output
    assert message.type == "message" and message.content[0].type == "output_text"
    entries = message.content[0].logprobs or []
    assert len(entries) == 5 and len(entries[0].top_logprobs) == 2


# ---- the real model -----------------------------------------------------------------------------------------


def name_of(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def test_live_required_call_keeps_to_the_schema(live: openai.OpenAI) -> None:
    for tool_choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        answer = live.chat.completions.create(
            model=name_of(live), messages=QUESTION, tools=TOOLS[:1], tool_choice=tool_choice, max_tokens=120,  # type: ignore[call-overload]
            temperature=0, parallel_tool_calls=False,
        )  # fmt: skip
        [call] = answer.choices[0].message.tool_calls
        assert call.function.name == "get_weather"
        jsonschema.validate(json.loads(call.function.arguments), WEATHER)


def test_live_strict_tools_leave_words_free(live: openai.OpenAI) -> None:
    strict: Any = {**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": True}}
    for format in ({"type": "text"}, {"type": "json_object"}):
        answer = live.chat.completions.create(
            model=name_of(live),
            messages=QUESTION,
            tools=[strict],
            response_format=format,
            temperature=0,
            max_tokens=24,  # type: ignore[call-overload]
        )
        message = answer.choices[0].message
        assert message.content or message.tool_calls
        if format["type"] == "json_object" and not message.tool_calls:
            assert message.content.lstrip().startswith("{")


BAD: list[tuple[dict[str, Any], str]] = [
    ({"guided_regex": "(unclosed"}, "guided_regex"),
    ({"structured_outputs": {"grammar": "start: nothing"}}, "structured_outputs.grammar"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no"}}}},
        "response_format",
    ),
    (
        {
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "no"}}}],
            "tool_choice": "required",
        },
        "tools",
    ),
]


@pytest.mark.parametrize(("fields", "param"), BAD)
def test_live_bad_grammars_name_their_field(live: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            live.chat.completions.create(model=name_of(live), messages=QUESTION, stream=stream, extra_body=fields)
        assert (caught.value.param, caught.value.code) == (param, "invalid_grammar")


class City(BaseModel):
    name: str = Field(max_length=12)
    population: int = Field(ge=0, le=99_999_999)  # bounds, because a small model may never stop counting


def test_live_parsed_answer(live: openai.OpenAI) -> None:
    question: list[Any] = [{"role": "user", "content": "Describe the city of Paris as JSON with name and population."}]
    answer = live.chat.completions.parse(
        model=name_of(live), messages=question, response_format=City, max_tokens=80, temperature=0
    )
    assert isinstance(answer.choices[0].message.parsed, City)
    parsed = live.responses.parse(
        model=name_of(live), input=question, text_format=City, max_output_tokens=80, temperature=0
    )
    assert parsed.output_parsed == answer.choices[0].message.parsed


def test_live_response(live: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": name_of(live), "max_output_tokens": 12, "temperature": 0}
    with live.responses.create(input="What is gravity?", stream=True, **options) as stream:
        last = list(stream)[-1]
    assert last.type == "response.incomplete"
    assert last.response.output_text and last.response.usage is not None and last.response.usage.output_tokens == 12
    more = live.responses.create(input="Go on.", previous_response_id=last.response.id, **options)
    assert more.usage is not None and more.usage.input_tokens > last.response.usage.input_tokens


def test_live_embeddings(live: openai.OpenAI) -> None:
    model = name_of(live)
    texts = ["The cat sleeps on the sofa.", "A kitten naps on the couch.", "Quarterly revenue rose by 4%."]
    plain = [item.embedding for item in live.embeddings.create(model=model, input=texts, encoding_format="float").data]
    packed = [item.embedding for item in live.embeddings.create(model=model, input=texts).data]  # base64, unpacked
    for one, other in zip(plain, packed, strict=True):
        assert one == pytest.approx(other, abs=1e-6) and sum(x * x for x in one) == pytest.approx(1, abs=1e-4)

    def dot(a: list[float], b: list[float]) -> float:
        return sum(x * y for x, y in zip(a, b, strict=True))

    assert dot(plain[0], plain[1]) > dot(plain[0], plain[2])
    short = live.embeddings.create(model=model, input=texts[0], dimensions=32, encoding_format="float")
    assert len(short.data[0].embedding) == 32
    assert sum(x * x for x in short.data[0].embedding) == pytest.approx(1, abs=1e-4)
    assert short.usage.prompt_tokens == short.usage.total_tokens > 3
    last = live.embeddings.create(model=model, input=texts[0], encoding_format="float", extra_body={"pooling": "last"})
    assert last.data[0].embedding != plain[0]
    for bad, param in (({"dimensions": 10**5}, "dimensions"), ({"input": []}, "input"), ({"input": [10**9]}, "prompt")):
        with pytest.raises(openai.BadRequestError) as caught:
            live.embeddings.create(**{"model": model, "input": "x", **bad})
        assert caught.value.param == param
