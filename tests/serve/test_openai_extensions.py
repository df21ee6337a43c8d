"""What vLLM's, SGLang's and others' callers send beyond OpenAI's API to chat and completions, and what they read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
from fake_frontend import FakeFrontend

MODEL = FakeFrontend.model_name
QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def fake(fake_server: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=fake_server) as client:
        yield client


@pytest.fixture(scope="module")
def live(live_server: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=live_server, timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def client(live_server: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{live_server}/v1", api_key="none")


def answer(http: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def chat(http: httpx.Client, **body: Any) -> dict[str, Any]:
    return answer(http, "/v1/chat/completions", **{"messages": QUESTION, "temperature": 0, "max_tokens": 8, **body})


def complete(http: httpx.Client, **body: Any) -> dict[str, Any]:
    return answer(http, "/v1/completions", **{"prompt": "One two three", "temperature": 0, "max_tokens": 8, **body})


def chunks(http: httpx.Client, path: str, **body: Any) -> list[dict[str, Any]]:
    text = http.post(path, json={**body, "stream": True}).text
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


# ---- sampling and ends --------------------------------------------------------------------------------------


def test_one_model_need_not_be_named(fake: httpx.Client) -> None:
    assert chat(fake)["model"] == complete(fake)["model"] == MODEL
    assert answer(fake, "/v1/embeddings", input="x")["model"] == MODEL


def test_as_many_texts_are_embedded_as_openai_takes(fake: httpx.Client) -> None:
    assert len(answer(fake, "/v1/embeddings", input=["x"] * 2048)["data"]) == 2048


def test_top_k_of_minus_one_is_off(fake: httpx.Client, fake_frontend: FakeFrontend) -> None:
    chat(fake, top_k=-1)
    assert fake_frontend.requests[-1].params.top_k == 0


def test_targets_of_a_request(fake: httpx.Client, fake_frontend: FakeFrontend) -> None:
    chat(fake, slo={"ttft": 0.5, "tpot": 0.05})
    complete(fake, slo={"tpot": 0.2})
    answer(fake, "/v1/responses", input="x", slo={"ttft": 2})
    chat(fake)
    found = [(one.slo_ttft, one.slo_tpot, one.background) for one in fake_frontend.requests[-4:]]
    assert found == [(0.5, 0.05, False), (0.0, 0.2, False), (2.0, 0.0, False), (0.0, 0.0, False)]
    for wrong in ({"ttft": 0}, {"tpot": "soon"}, 3):
        assert fake.post("/v1/completions", json={"prompt": "x", "slo": wrong}).status_code == 400


def test_stop_strings_wait_for_min_tokens(live: httpx.Client) -> None:
    body = {"prompt": "a b c d e f g h a b c d e f g h a b", "max_tokens": 30, "stop": [" e"]}
    early = complete(live, **body)["choices"][0]
    late = complete(live, **body, min_tokens=8, return_token_ids=True)["choices"][0]
    assert early["stop_reason"] == " e" and " e" not in early["text"]
    assert " e" in late["text"] and late["stop_reason"] == " e" and len(late["token_ids"]) > 8


def test_stop_reason_and_include_stop(live: httpx.Client) -> None:
    body = {"prompt": "1, 2, 3, 4,", "max_tokens": 30}
    assert complete(live, **body)["choices"][0]["stop_reason"] is None
    choice = complete(live, **body, stop=["7"], include_stop_str_in_output=True)["choices"][0]
    assert choice["text"].endswith("7") and choice["stop_reason"] == "7" and choice["finish_reason"] == "stop"
    token = complete(live, **body, return_token_ids=True)["choices"][0]["token_ids"][1]
    ended = complete(live, **body, stop_token_ids=[token])["choices"][0]
    assert ended["stop_reason"] == token
    *_, last = chunks(live, "/v1/completions", **body, temperature=0, stop=["7"])
    assert last["choices"][0]["stop_reason"] == "7"


def test_only_allowed_tokens_are_drawn(live: httpx.Client) -> None:
    allowed = answer(live, "/tokenize", prompt=" yes no", add_special_tokens=False)["tokens"]
    for temperature in (0, 1.5):
        body = {"temperature": temperature, "max_tokens": 12, "allowed_token_ids": allowed, "return_token_ids": True}
        assert set(complete(live, **body)["choices"][0]["token_ids"]) <= set(allowed)


def test_beam_search(live: httpx.Client) -> None:
    found = complete(live, use_beam_search=True, n=3, best_of=4, max_tokens=6, length_penalty=0.5)
    texts = [choice["text"] for choice in found["choices"]]
    assert len(set(texts)) == 3 and all(texts)
    # The best of the beams is at least as likely as the greedy answer.
    assert (
        complete(live, use_beam_search=True, n=1, max_tokens=6)["choices"][0]["text"]
        == complete(live, max_tokens=6)["choices"][0]["text"]
    )
    talk = chat(live, use_beam_search=True, n=2, max_tokens=6)
    assert len({choice["message"]["content"] for choice in talk["choices"]}) == 2
    cut = complete(live, prompt="1, 2, 3, 4,", use_beam_search=True, n=2, max_tokens=12, stop=["6"])["choices"][0]
    assert "6" not in cut["text"] and cut["stop_reason"] == "6"


def test_best_of_in_chat_returns_the_likeliest(live: httpx.Client) -> None:
    body = {"temperature": 1.2, "seed": 5, "max_tokens": 6, "logprobs": True}
    drawn = chat(live, n=6, **body)["choices"]

    def likelihood(choice: dict[str, Any]) -> float:
        scores = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        return sum(scores) / len(scores)

    best = chat(live, n=2, best_of=6, **body)
    wanted = sorted(drawn, key=likelihood, reverse=True)[:2]
    assert [c["message"]["content"] for c in best["choices"]] == [c["message"]["content"] for c in wanted]
    assert [choice["index"] for choice in best["choices"]] == [0, 1]


# ---- prompts ------------------------------------------------------------------------------------------------


def test_a_prompt_is_scored_without_drawing_anything(client: openai.OpenAI, live: httpx.Client) -> None:
    """As lm-eval does: echo, logprobs, and no tokens wanted."""
    model = client.models.list().data[0].id
    prompts = ["The capital of France is Paris", "The capital of France is Tokyo"]
    found = client.completions.create(model=model, prompt=prompts, max_tokens=0, echo=True, logprobs=1, temperature=0)
    assert [choice.text for choice in found.choices] == prompts
    assert found.usage is not None and found.usage.completion_tokens == 0
    scores = [choice.logprobs.token_logprobs for choice in found.choices if choice.logprobs]
    assert all(row[0] is None and None not in row[1:] for row in scores)
    assert scores[0][-1] > scores[1][-1]
    with_one = complete(live, prompt=prompts[0], max_tokens=1, echo=True, logprobs=1)["choices"][0]["logprobs"]
    assert with_one["token_logprobs"][1:-1] == pytest.approx(scores[0][1:], abs=1e-3)
    streamed = chunks(live, "/v1/completions", prompt=prompts[0], max_tokens=0, echo=True, logprobs=1)
    assert "".join(c["choices"][0]["text"] for c in streamed) == prompts[0]
    silent = complete(live, max_tokens=0)
    assert silent["choices"][0]["text"] == "" and silent["usage"]["completion_tokens"] == 0


def test_prompts_are_cut_from_the_left(live: httpx.Client, fake: httpx.Client, fake_frontend: FakeFrontend) -> None:
    whole = complete(live, return_token_ids=True)["choices"][0]["prompt_token_ids"]
    cut = complete(live, return_token_ids=True, truncate_prompt_tokens=2, echo=True)["choices"][0]
    assert cut["prompt_token_ids"] == whole[-2:] and cut["text"].startswith(" two three")
    talk = chat(live, return_token_ids=True, truncate_prompt_tokens=5)
    assert len(talk["prompt_token_ids"]) == 5 and talk["usage"]["prompt_tokens"] == 5
    complete(fake, prompt="x" * 2000, truncate_prompt_tokens=-1, max_tokens=12)
    assert len(fake_frontend.requests[-1].prompt) == 500


def test_fill_in_the_middle(fake: httpx.Client, fake_frontend: FakeFrontend, live: httpx.Client) -> None:
    fake_frontend.text.tokenizer.names = {
        "<|fim_prefix|>": 1,
        "<|fim_suffix|>": 2,
        "<|fim_middle|>": 3,
        "<|file_sep|>": 4,
    }
    try:
        complete(fake, prompt="ab", suffix="cd")
        request = fake_frontend.requests[-1]
        assert request.prompt == [1, *b"ab", 2, *b"cd", 3] and 4 in request.params.stop_token_ids
        complete(fake, prompt="", suffix="cd")
        assert fake_frontend.requests[-1].prompt == [1, 2, *b"cd", 3]
    finally:
        fake_frontend.text.tokenizer.names = {}
    refused = live.post("/v1/completions", json={"prompt": "a", "suffix": "b"})
    assert refused.status_code == 400 and "fill-in-the-middle" in refused.json()["error"]["message"]
    assert complete(live, suffix="")["choices"]  # asks for nothing


# ---- shapes -------------------------------------------------------------------------------------------------


def test_token_ids_beside_text(live: httpx.Client) -> None:
    whole = chat(live, return_token_ids=True)
    ids = whole["choices"][0]["token_ids"]
    assert len(ids) == whole["usage"]["completion_tokens"]
    assert len(whole["prompt_token_ids"]) == whole["usage"]["prompt_tokens"]
    body = {"messages": QUESTION, "temperature": 0, "max_tokens": 8, "return_token_ids": True}
    streamed = chunks(live, "/v1/chat/completions", **body)
    assert [token for chunk in streamed for token in chunk["choices"][0]["token_ids"]] == ids
    assert [chunk.get("prompt_token_ids") for chunk in streamed] == [whole["prompt_token_ids"]] + [None] * (
        len(streamed) - 1
    )
    streamed = chunks(live, "/v1/completions", prompt="One two", max_tokens=4, temperature=0, return_token_ids=True)
    whole = complete(live, prompt="One two", max_tokens=4, return_token_ids=True)["choices"][0]
    assert streamed[0]["choices"][0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert [token for chunk in streamed for token in chunk["choices"][0]["token_ids"]] == whole["token_ids"]


def test_tokens_by_their_ids(live: httpx.Client) -> None:
    body = {"max_tokens": 2, "return_tokens_as_token_ids": True, "return_token_ids": True}
    choice = complete(live, logprobs=2, **body)["choices"][0]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
    assert all(key.startswith("token_id:") for top in choice["logprobs"]["top_logprobs"] for key in top)
    choice = chat(live, logprobs=True, top_logprobs=1, **body)["choices"][0]
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == [f"token_id:{t}" for t in choice["token_ids"]]


def test_token_strings_as_the_vocabulary_has_them(live: httpx.Client) -> None:
    found = answer(live, "/tokenize", prompt="Hello world", return_token_strs=True)
    assert found["token_strs"] == ["Hello", "Ġworld"]


def test_usage_in_every_chunk(fake: httpx.Client) -> None:
    for path, body in (("/v1/chat/completions", {"messages": QUESTION}), ("/v1/completions", {"prompt": "x"})):
        options = {"include_usage": True, "continuous_usage_stats": True}
        *parts, last = chunks(fake, path, **body, max_tokens=9, temperature=0, stream_options=options)
        counts = [part["usage"]["completion_tokens"] for part in parts]
        assert counts == sorted(counts) and counts[0] < counts[-1] == last["usage"]["completion_tokens"] == 9
        assert last["choices"] == []


def test_thoughts_under_both_names(fake: httpx.Client, says: Callable[..., None], fake_frontend: FakeFrontend) -> None:
    says("<think>Hm.</think>Yes", reasons=True)
    message = chat(fake, max_tokens=100)["choices"][0]["message"]
    assert message["reasoning"] == message["reasoning_content"] == "Hm." and message["content"] == "Yes"
    parts = chunks(fake, "/v1/chat/completions", messages=QUESTION)
    for name in ("reasoning", "reasoning_content"):
        assert "".join(part["choices"][0]["delta"].get(name, "") for part in parts) == "Hm."
    hidden = chat(fake, max_tokens=100, reasoning={"exclude": True, "effort": "low"})["choices"][0]["message"]
    assert "reasoning" not in hidden and fake_frontend.text.rendered[-1]["reasoning_effort"] == "low"
    chat(fake, messages=[*QUESTION, {"role": "assistant", "content": "a", "reasoning": "b"}, *QUESTION])
    assert fake_frontend.text.rendered[-1]["messages"][1]["reasoning_content"] == "b"


def test_what_templates_are_told(fake: httpx.Client, fake_frontend: FakeFrontend) -> None:
    chat(fake, verbosity="low", thinking={"type": "disabled"}, documents=[{"text": "x"}])
    told = fake_frontend.text.rendered[-1]
    assert (told["verbosity"], told["enable_thinking"], told["documents"]) == ("low", False, [{"text": "x"}])
    chat(fake, enable_thinking=True)
    assert fake_frontend.text.rendered[-1]["enable_thinking"] is True


def test_response_format_in_completions(live: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    assert json.loads(complete(live, response_format=form, max_tokens=40)["choices"][0]["text"])["a"] in (1, 2)


def test_the_models_list_reads_as_vllms(client: openai.OpenAI) -> None:
    card = client.models.list().data[0].to_dict()
    assert card["root"] and card["parent"] is None
    assert card["permission"][0]["object"] == "model_permission"  # type: ignore[index]


# ---- predictions and custom tools ---------------------------------------------------------------------------


def test_a_prediction_is_drafted_from(client: openai.OpenAI) -> None:
    model = client.models.list().data[0].id
    ask = {"model": model, "messages": QUESTION, "temperature": 0, "max_tokens": 200}
    plain = client.chat.completions.create(**ask)  # type: ignore[call-overload]
    text = plain.choices[0].message.content
    assert plain.usage.completion_tokens_details.accepted_prediction_tokens == 0
    told = client.chat.completions.create(**ask, prediction={"type": "content", "content": text})  # type: ignore[call-overload]
    assert told.choices[0].message.content == text
    assert told.usage.completion_tokens_details.accepted_prediction_tokens > 0
    wrong = client.chat.completions.create(**ask, prediction={"type": "content", "content": "Zebras! " * 50})  # type: ignore[call-overload]
    assert wrong.choices[0].message.content == text


def test_custom_tools(fake: httpx.Client, says: Callable[..., None], fake_frontend: FakeFrontend) -> None:
    says('<tool_call>{"name": "run", "arguments": {"input": "print(\\"\\u20ac\\ud83d\\ude00\\")\\n"}}</tool_call>')
    tools = [{"type": "custom", "custom": {"name": "run", "description": "Runs code."}}]
    choice = chat(fake, tools=tools, max_tokens=200)["choices"][0]
    [call] = choice["message"]["tool_calls"]
    assert call["type"] == "custom" and call["custom"] == {"name": "run", "input": 'print("€😀")\n'}
    assert choice["finish_reason"] == "tool_calls"
    parts = chunks(fake, "/v1/chat/completions", messages=QUESTION, tools=tools)
    calls = [call for part in parts for call in part["choices"][0]["delta"].get("tool_calls", [])]
    assert calls[0]["custom"]["name"] == "run" and calls[0]["type"] == "custom"
    assert "".join(call["custom"]["input"] for call in calls) == 'print("€😀")\n'
    back = [
        *QUESTION,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "ok", "tool_call_id": call["id"]},
    ]
    chat(fake, messages=back, tools=tools)
    sent = fake_frontend.text.rendered[-1]["messages"][1]["tool_calls"][0]["function"]
    assert sent == {"name": "run", "arguments": {"input": 'print("€😀")\n'}}


@pytest.mark.parametrize(
    ("syntax", "definition"), [("lark", 'start: "go " /[0-9]{2}/'), ("regex", "go [0-9]{2}")], ids=["lark", "regex"]
)
def test_custom_tools_keep_to_their_grammar(live: httpx.Client, syntax: str, definition: str) -> None:
    grammar = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}
    tools = [{"type": "custom", "custom": {"name": "move", "format": grammar}}]
    choice = {"type": "custom", "custom": {"name": "move"}}
    [call] = chat(live, tools=tools, tool_choice=choice, max_tokens=60)["choices"][0]["message"]["tool_calls"]
    text = call["custom"]["input"]
    assert text.startswith("go ") and text[3:].isdigit() and len(text) == 5
