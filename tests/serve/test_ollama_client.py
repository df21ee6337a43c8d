"""The `ollama` client, which nobody here wrote, against a live server: over the fake, then the real model."""

from __future__ import annotations

import json
from typing import Any

import httpx
import jsonschema
import ollama
import pytest
from fake_frontend import FakeFrontend

MODEL = FakeFrontend.model_name
QUESTION = [{"role": "user", "content": "What is the weather in Paris?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.fixture
def fake(fake_server: str) -> ollama.Client:
    return ollama.Client(host=fake_server)


@pytest.fixture
def live(live_server: str) -> ollama.Client:
    return ollama.Client(host=live_server, timeout=120)


def test_chat(fake: ollama.Client, says: Any, fake_frontend: FakeFrontend) -> None:
    says("Sunny.")
    options = {"temperature": 0.3, "num_predict": 40, "stop": ["x"], "seed": 7, "repeat_penalty": 1.2, "num_ctx": 2048}
    answer = fake.chat(model=MODEL, messages=QUESTION, options=options)
    assert answer.message.content == "Sunny." and answer.done and answer.done_reason == "stop"
    assert answer.eval_count == 7 and answer.prompt_eval_count == len(fake_frontend.requests[-1].prompt)
    assert (answer.total_duration or 0) >= (answer.eval_duration or 0) > 0
    params = fake_frontend.requests[-1].params
    assert (params.temperature, params.max_tokens, params.stop, params.seed) == (0.3, 40, ["x"], 7)
    assert (params.repetition_penalty, params.top_k, params.top_p) == (1.2, 40, 0.9)
    assert fake.chat(model=f"{MODEL}:latest", messages=QUESTION).message.content == "Sunny."


def test_chat_streams_lines(fake: ollama.Client, fake_server: str, says: Any) -> None:
    says("<think>Hm.</think>Sunny.", reasons=True)
    parts = list(fake.chat(model=MODEL, messages=QUESTION, stream=True))
    assert "".join(part.message.content or "" for part in parts) == "Sunny."
    assert "".join(part.message.thinking or "" for part in parts) == "Hm."
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    silent = fake.chat(model=MODEL, messages=QUESTION, think=False)
    assert silent.message.thinking is None
    response = httpx.post(f"{fake_server}/api/chat", json={"model": MODEL, "messages": QUESTION})
    assert response.headers["content-type"] == "application/x-ndjson"
    assert all(json.loads(line) for line in response.text.splitlines())


def get_weather(city: str) -> str:
    """The weather in a city.

    Args:
      city: where

    Returns:
      the weather
    """
    return f"sunny in {city}"


def test_tools(fake: ollama.Client, says: Any, fake_frontend: FakeFrontend) -> None:
    says('<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>')
    for streaming in (False, True):
        found = fake.chat(model=MODEL, messages=QUESTION, tools=[get_weather], stream=streaming)  # type: ignore[call-overload]
        parts = list(found) if streaming else [found]
        [call] = [call for part in parts for call in part.message.tool_calls or ()]
        assert (call.function.name, call.function.arguments) == ("get_weather", {"city": "Paris"})
    says("Sunny.")
    result = {"role": "tool", "tool_name": "get_weather", "content": get_weather(**call.function.arguments)}
    call_message = {"role": "assistant", "tool_calls": [call.model_dump()]}
    answer = fake.chat(model=MODEL, messages=[*QUESTION, call_message, result], tools=[get_weather])
    assert answer.message.content == "Sunny."
    assert [message["role"] for message in fake_frontend.text.rendered[-1]["messages"]] == ["user", "assistant", "tool"]


def test_generate(fake: ollama.Client, says: Any, fake_frontend: FakeFrontend) -> None:
    says("Sunny.")
    answer = fake.generate(model=MODEL, prompt="Weather?", system="Be brief.", format="json")
    assert answer.response == "Sunny." and answer.done
    assert [message["role"] for message in fake_frontend.text.rendered[-1]["messages"]] == ["system", "user"]
    grammar = fake_frontend.requests[-1].params.grammar
    assert grammar is not None and grammar.kind == "json_object"
    fake.generate(model=MODEL, prompt="Weather?", raw=True)
    assert bytes(fake_frontend.requests[-1].prompt) == b"Weather?"
    assert "".join(part.response for part in fake.generate(model=MODEL, prompt="x", stream=True)) == "Sunny."
    loaded = fake.generate(model=MODEL)
    assert (loaded.done_reason, loaded.response) == ("load", "")
    scored = fake.generate(model=MODEL, prompt="x", logprobs=True, top_logprobs=2)
    assert scored.logprobs is not None and len(scored.logprobs[0].top_logprobs or []) == 2


def test_models(fake: ollama.Client, fake_server: str) -> None:
    [listed] = fake.list().models
    assert listed.model == MODEL
    shown = fake.show(MODEL)
    assert "tools" in (shown.capabilities or []) and shown.template
    assert fake.ps().models[0].model == MODEL
    assert httpx.get(f"{fake_server}/api/version").json()["version"]


def test_embed(fake: ollama.Client) -> None:
    one = fake.embed(model=MODEL, input="a")
    two = fake.embed(model=MODEL, input=["a", "b" * 600])  # longer than the context: cut, unless told otherwise
    assert two.embeddings[0] == one.embeddings[0] and len(two.embeddings) == 2
    assert fake.embeddings(model=MODEL, prompt="a").embedding == one.embeddings[0]
    with pytest.raises(ollama.ResponseError, match="context"):
        fake.embed(model=MODEL, input="b" * 600, truncate=False)
    with pytest.raises(ollama.ResponseError, match="at most 1024"):
        fake.embed(model=MODEL, input=["a"] * 1025)
    with pytest.raises(ollama.ResponseError, match="empty"):
        fake.embed(model=MODEL, input=["a", ""])
    many = fake.embed(model=MODEL, input=[f"{i % 7}" for i in range(200)]).embeddings
    assert many == [many[i % 7] for i in range(200)]


ERRORS: list[tuple[dict[str, Any], int, str]] = [
    ({"model": "other"}, 404, "not found"),
    ({"options": {"mirostat": 2}}, 400, "mirostat"),
    ({"options": {"temperatur": 1}}, 400, "temperatur"),
    ({"options": {"num_predict": "x"}}, 400, "num_predict"),
    ({"messages": [{"role": "user", "content": "overloaded"}]}, 503, "full"),
    ({"messages": [{"role": "user", "content": "boom"}]}, 500, "error id"),
]


@pytest.mark.parametrize(("change", "status", "word"), ERRORS)
def test_errors_have_ollamas_shape(
    fake: ollama.Client, fake_server: str, change: dict[str, Any], status: int, word: str
) -> None:
    with pytest.raises(ollama.ResponseError) as caught:
        fake.chat(**{"model": MODEL, "messages": QUESTION, **change})
    assert caught.value.status_code == status and word in caught.value.error and "secret" not in caught.value.error
    response = httpx.post(
        f"{fake_server}/api/chat", json={"model": MODEL, "messages": QUESTION, "stream": False, **change}
    )
    assert set(response.json()) == {"error"} and isinstance(response.json()["error"], str)


def test_a_stream_that_fails_says_so(fake: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="internal error"):
        list(fake.chat(model=MODEL, messages=[{"role": "user", "content": "late-boom"}], stream=True))


# ---- the real model -----------------------------------------------------------------------------------------


def test_live(live: ollama.Client) -> None:
    model = str(live.list().models[0].model)
    options = {"temperature": 0, "num_predict": 12}
    whole = live.chat(model=model, messages=QUESTION, options=options)
    text = "".join(
        p.message.content or "" for p in live.chat(model=model, messages=QUESTION, options=options, stream=True)
    )
    assert text == whole.message.content != "" and whole.done_reason == "length" and whole.eval_count == 12
    bound = live.generate(model=model, prompt="A city?", format=SCHEMA, options={"temperature": 0, "num_predict": 60})
    jsonschema.validate(json.loads(bound.response or ""), SCHEMA)
    assert len(live.embed(model=model, input=["a", "b"]).embeddings) == 2
