"""The `anthropic` client, which nobody here wrote, against a live server: over the fake, then the real model."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import httpx
import jsonschema
import pytest
from fake_frontend import CONTEXT, FakeFrontend

MODEL = FakeFrontend.model_name
QUESTION: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [{"name": "get_weather", "description": "The weather.", "input_schema": WEATHER}]
K, GREEDY = {"top_k": 3}, {"temperature": 0}
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>'


@pytest.fixture
def fake(fake_server: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=fake_server, api_key="none", max_retries=0, timeout=30)


@pytest.fixture
def live(live_server: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=live_server, api_key="none", max_retries=0, timeout=120)


def test_message(fake: anthropic.Anthropic, says: Any, fake_frontend: FakeFrontend) -> None:
    says("Sunny.")
    answer = fake.messages.create(model=MODEL, max_tokens=64, system="Be brief.", messages=QUESTION, extra_body=K)
    assert (answer.type, answer.role, answer.stop_reason) == ("message", "assistant", "end_turn")
    assert [block.text for block in answer.content if block.type == "text"] == ["Sunny."]
    usage = answer.usage
    assert usage.output_tokens == len("Sunny.") + 1
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == len(fake_frontend.requests[-1].prompt)
    assert fake_frontend.text.rendered[-1]["messages"][0] == {"role": "system", "content": "Be brief."}
    assert fake_frontend.requests[-1].params.top_k == 3


def test_why_it_stopped(fake: anthropic.Anthropic, says: Any) -> None:
    says("one two three")
    cut = fake.messages.create(model=MODEL, max_tokens=4, messages=QUESTION)
    assert cut.stop_reason == "max_tokens"
    stopped = fake.messages.create(model=MODEL, max_tokens=64, messages=QUESTION, stop_sequences=["two"])
    assert stopped.content[0].text == "one "  # type: ignore[union-attr]


def test_tools(fake: anthropic.Anthropic, says: Any, fake_frontend: FakeFrontend) -> None:
    says(f"Looking.\n{CALL}")
    answer = fake.messages.create(model=MODEL, max_tokens=200, messages=QUESTION, tools=TOOLS)
    text, call = answer.content
    assert answer.stop_reason == "tool_use" and text.type == "text" and text.text == "Looking."
    assert call.type == "tool_use" and (call.name, call.input) == ("get_weather", {"city": "Paris"})
    says("Sunny.")
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "sun"}]}
    more: list[Any] = [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    fake.messages.create(model=MODEL, max_tokens=200, messages=[*QUESTION, *more], tools=TOOLS)
    sent = fake_frontend.text.rendered[-1]["messages"]
    assert [message["role"] for message in sent] == ["user", "assistant", "tool"]
    assert sent[1]["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": {"city": "Paris"}}
    says(CALL.replace("Paris", "Rome"))
    forced: Any = {"type": "tool", "name": "get_weather"}
    answer = fake.messages.create(model=MODEL, max_tokens=200, messages=QUESTION, tools=TOOLS, tool_choice=forced)
    assert answer.content[0].type == "tool_use" and answer.content[0].input == {"city": "Rome"}
    assert fake_frontend.requests[-1].params.grammar is not None


def test_event_order(fake: anthropic.Anthropic, fake_server: str, says: Any) -> None:
    says(f"<think>Hm.</think>Looking.\n{CALL}", reasons=True)
    body = {
        "model": MODEL, "max_tokens": 200, "messages": QUESTION, "tools": TOOLS, "stream": True,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }  # fmt: skip
    frames = httpx.post(f"{fake_server}/v1/messages", json=body).text.split("\n\n")[:-1]
    events = [json.loads(frame.split("\ndata: ")[1]) for frame in frames]
    assert [frame.split("\n")[0].removeprefix("event: ") for frame in frames] == [event["type"] for event in events]
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["message_start", "ping"] and kinds[-2:] == ["message_delta", "message_stop"]
    opened = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
    assert opened == ["thinking", "text", "tool_use"]
    index = None
    for event in events[2:-2]:  # blocks do not overlap
        if event["type"] == "content_block_start":
            assert index is None
            index = event["index"]
        assert event["index"] == index
        if event["type"] == "content_block_stop":
            index = None
    with fake.messages.stream(model=MODEL, max_tokens=200, messages=QUESTION, tools=TOOLS) as stream:
        final = stream.get_final_message()
    assert [block.type for block in final.content] == ["text", "tool_use"]  # thoughts only where asked for
    assert final.content[1].input == {"city": "Paris"}  # type: ignore[union-attr]
    assert final.stop_reason == "tool_use" and final.usage.output_tokens > 0


def test_the_answer_may_be_begun(fake: anthropic.Anthropic, fake_frontend: FakeFrontend) -> None:
    begun: list[Any] = [*QUESTION, {"role": "assistant", "content": "It is"}]
    fake.messages.create(model=MODEL, max_tokens=8, messages=begun)
    assert bytes(fake_frontend.requests[-1].prompt).endswith(b"assistant: It is")


def test_output_schema(fake: anthropic.Anthropic, fake_frontend: FakeFrontend) -> None:
    config: Any = {"format": {"type": "json_schema", "schema": WEATHER}}
    fake.messages.create(model=MODEL, max_tokens=8, messages=QUESTION, output_config=config)
    grammar = fake_frontend.requests[-1].params.grammar
    assert grammar is not None and json.loads(grammar.source) == {"x-quire-closed": True} | WEATHER


def test_counting_tokens(fake: anthropic.Anthropic, fake_frontend: FakeFrontend) -> None:
    count = fake.messages.count_tokens(model=MODEL, messages=QUESTION, system="Be brief.", tools=TOOLS)
    fake.messages.create(model=MODEL, max_tokens=4, messages=QUESTION, system="Be brief.", tools=TOOLS)
    assert count.input_tokens == len(fake_frontend.requests[-1].prompt)


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
ERRORS: list[tuple[dict[str, Any], type[anthropic.APIStatusError], str, str]] = [
    ({"model": "other"}, anthropic.NotFoundError, "not_found_error", "other"),
    ({"max_tokens": 0}, anthropic.BadRequestError, "invalid_request_error", "max_tokens"),
    ({"messages": []}, anthropic.BadRequestError, "invalid_request_error", "messages"),
    (
        {"messages": [{"role": "user", "content": "x" * CONTEXT}]},
        anthropic.BadRequestError,
        "invalid_request_error",
        "",
    ),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, anthropic.BadRequestError, "invalid_request_error", "image"),
    ({"extra_body": {"max_token": 3}}, anthropic.BadRequestError, "invalid_request_error", "max_token"),
    ({"messages": [{"role": "user", "content": "overloaded"}]}, anthropic.APIStatusError, "overloaded_error", "full"),
    ({"messages": [{"role": "user", "content": "boom"}]}, anthropic.InternalServerError, "api_error", "error id"),
]


@pytest.mark.parametrize(("change", "kind", "type", "word"), ERRORS)
def test_errors_have_anthropics_shape(
    fake: anthropic.Anthropic, change: dict[str, Any], kind: Any, type: str, word: str
) -> None:
    with pytest.raises(kind) as caught:
        fake.messages.create(**{"model": MODEL, "max_tokens": 5, "messages": QUESTION, **change})
    body = caught.value.body
    assert body["type"] == "error" and body["error"]["type"] == type and word in body["error"]["message"]
    assert "secret" not in str(body)


def test_a_stream_that_fails_says_so(fake: anthropic.Anthropic) -> None:
    late: list[Any] = [{"role": "user", "content": "late-boom"}]
    with (
        pytest.raises(anthropic.APIStatusError, match="internal error"),
        fake.messages.stream(model=MODEL, max_tokens=64, messages=late) as stream,
    ):
        stream.until_done()


# ---- the real model -----------------------------------------------------------------------------------------


def test_live(live: anthropic.Anthropic) -> None:
    model = live.models.list().data[0].id
    question: list[Any] = [{"role": "user", "content": "What is gravity?"}]
    whole = live.messages.create(model=model, max_tokens=16, extra_body=GREEDY, messages=question)
    with live.messages.stream(model=model, max_tokens=16, extra_body=GREEDY, messages=question) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text != ""  # type: ignore[union-attr]
    assert final.stop_reason == whole.stop_reason == "max_tokens" and final.usage.output_tokens == 16
    count = live.messages.count_tokens(model=model, messages=question).input_tokens
    assert count == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
    forced: Any = {"type": "any", "disable_parallel_tool_use": True}
    called = live.messages.create(
        model=model, max_tokens=80, extra_body=GREEDY, messages=QUESTION, tools=TOOLS, tool_choice=forced
    )
    assert called.stop_reason == "tool_use" and called.content[0].type == "tool_use"
    jsonschema.validate(called.content[0].input, WEATHER)
